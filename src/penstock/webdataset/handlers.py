"""What a stage does about an error, and the errors of shards and samples.

A handler is given to a stage as ``handler=`` and called with the error. It raises, or returns True to go on without
what failed, or False to end there. ``DataPipeline.skipped`` counts what handlers let pass.

The errors are those of ``penstock.errors``, and also those that programs for tar shards already catch.
"""

import tarfile
import warnings
from collections.abc import Callable
from typing import NoReturn

from penstock.errors import Corrupt, DataError, Missing, PenstockError, SchemaMismatch, Truncated, Unavailable

Handler = Callable[[Exception], bool]


def reraise_exception(error: Exception) -> NoReturn:
    """Raise the error: the default everywhere."""
    raise error


def ignore_and_continue(error: Exception) -> bool:
    """Go on without what failed."""
    return True


def ignore_and_stop(error: Exception) -> bool:
    """End there, as if the data ended."""
    return False


def warn_and_continue(error: Exception) -> bool:
    """Warn, and go on without what failed."""
    warnings.warn(f"left out: {error!r}", stacklevel=2)
    return True


def warn_and_stop(error: Exception) -> bool:
    """Warn, and end there."""
    warnings.warn(f"ended early: {error!r}", stacklevel=2)
    return False


class MissingShard(Missing, FileNotFoundError):
    """There is no such file."""


class TruncatedShard(Truncated, tarfile.ReadError):
    """A shard ends before its own end."""


class CorruptShard(Corrupt, tarfile.ReadError):
    """A shard is not a tar, or stops being one."""


class UnavailableShard(Unavailable, OSError):
    """A shard cannot be read at this time."""


class NoContent(Corrupt, ValueError):
    """A member of a shard is a link, or something else that holds no bytes."""


class MissingField(SchemaMismatch, ValueError):
    """A sample lacks a field that a verb needs, or has too many."""


class RepeatedField(Corrupt, ValueError):
    """A sample has the same field twice."""


DecodingError = DataError
"""The name that programs for tar shards know for an error of a decoder; here all of them are data errors."""

_OF_SHARDS: dict[type, type[PenstockError]] = {
    Missing: MissingShard,
    Truncated: TruncatedShard,
    Corrupt: CorruptShard,
    Unavailable: UnavailableShard,
}


def as_shard_error(error: PenstockError, note: str = "") -> PenstockError:
    """The same error of the kind that programs for tar shards catch, with a note behind its message."""
    kind = _OF_SHARDS.get(type(error))
    return error if kind is None else kind(f"{error}{note}")
