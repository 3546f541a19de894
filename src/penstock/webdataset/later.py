"""Content that is read when it is needed, so that shuffling holds places of samples instead of samples.

Where samples of uncompressed shards go straight into a shuffle, what goes through it is their names and where their
fields lie; the fields are read when the shuffle gives a sample out. The order is the same, and a buffer of 500 volumes
takes kilobytes. The shards must be files here, or have copies here (``cache_dir=``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import DataError, SourceError
from penstock.extents import FileId
from penstock.fileio import Files
from penstock.webdataset.handlers import Handler
from penstock.webdataset.runs import Run


@dataclass(frozen=True, slots=True)
class Later:
    """Bytes of a file, not read yet."""

    file: FileId
    offset: int
    size: int

    def read(self, files: Files) -> bytes:
        """The bytes, if the file is still the one it was."""
        content = np.empty(self.size, np.uint8)
        with files.lend(self.file) as handle:
            handle.read_into(self.offset, content)
        return content.tobytes()


def load_later(samples: Iterator[Any], run: Run, handler: Handler, files: Files) -> Iterator[Any]:
    """The same samples with their content."""
    try:
        for sample in samples:
            try:
                loaded = {
                    name: value.read(files) if isinstance(value, Later) else value for name, value in sample.items()
                }
            except (DataError, SourceError) as error:
                if not run.excuse(handler, error):
                    return
                continue
            yield loaded
    finally:
        files.close()
