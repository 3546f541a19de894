"""What the small files of the release hold, parsed once: tables, designs and regions are saved beside chunk tables.

From the second time on, the numbers are mapped from there, and neither scipy nor nibabel is needed.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np

from penstock.errors import Corrupt
from penstock.files import saved
from penstock.files.handles import identify
from penstock.read.saved_chunks import default_folder

Columns = Mapping[str, np.ndarray]


def parsed(path: str, name: str, parse: Callable[[str], Columns]) -> Columns:
    """The columns that ``parse`` makes of a file, or those that it made of the same file before.

    ``name`` says what they are: a file can have several tables.
    """
    folder, file = default_folder(), identify(path)
    with suppress(Corrupt):  # a damaged table, which is removed
        if found := saved.load(folder, file, name):
            return found.columns()
    columns = parse(path)
    with suppress(Corrupt):
        if kept := saved.save(folder, file, name, {}, columns):
            return kept.columns()
    return columns
