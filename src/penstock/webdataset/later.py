"""Content that is read when it is needed, so that shuffling holds places of samples instead of samples.

Where samples of uncompressed shards go straight into a shuffle, what goes through it is their names and where their
fields lie; the fields are read when the shuffle gives a sample out. The shards must be files here, or have copies here
(``cache_dir=``). The order is the same where the caller's own ``rng`` decides it, and a buffer of 500 volumes takes
kilobytes. Where it does not, many more places are mixed: up to ``PLACES`` samples come in an order that is uniform over
the epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from penstock.errors import DataError, SourceError
from penstock.extents import FileId
from penstock.fileio import Files
from penstock.webdataset.handlers import Handler
from penstock.webdataset.runs import Run
from penstock.webdataset.shuffling import drawn, shuffle_samples


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


PLACES = 8192
"""Samples that are mixed where only their places are held: some megabytes, and a moment to find them."""


def shuffle_places(
    samples: Iterator[Any], run: Run, /, bufsize: int = 1000, initial: int = 100, *, seed: int | None = None, **_: Any
) -> Iterator[Any]:
    """``shuffle_samples`` without an ``rng``, with a larger buffer while samples are places."""
    first = next(samples, None)
    if first is None:
        return
    if not _is_place(first):
        yield from shuffle_samples(chain([first], samples), run, bufsize, initial, seed=seed)
        return
    rng = (run if seed is None else run.seeded(seed)).rng()
    held = []
    for sample in chain([first], samples):
        held.append(sample)
        while len(held) > (PLACES if _is_place(sample) else bufsize):
            yield drawn(held, rng)
    while held:
        yield drawn(held, rng)


def _is_place(sample: Any) -> bool:
    return any(isinstance(value, Later) for value in sample.values())


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
