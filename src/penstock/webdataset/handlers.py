"""What to do about an error: each is given to a stage as ``handler=`` and called with the error.

It raises, or says whether to go on without what failed (True) or to end there (False). What a handler lets pass is
counted, see ``DataPipeline.skipped``.
"""

import warnings
from collections.abc import Callable
from typing import NoReturn

Handler = Callable[[Exception], bool]


def reraise_exception(error: Exception) -> NoReturn:
    """Raise it: the default everywhere."""
    raise error


def ignore_and_continue(error: Exception) -> bool:
    """Go on without what failed."""
    return True


def ignore_and_stop(error: Exception) -> bool:
    """End there, as if the data ended."""
    return False


def warn_and_continue(error: Exception) -> bool:
    """Say so, and go on without what failed."""
    warnings.warn(f"left out: {error!r}", stacklevel=2)
    return True


def warn_and_stop(error: Exception) -> bool:
    """Say so, and end there."""
    warnings.warn(f"ended early: {error!r}", stacklevel=2)
    return False
