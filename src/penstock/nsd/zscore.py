"""Means and standard deviations of voxels per group of trials: one bounded pass over the trials they are fitted on."""

from math import prod

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.sizes import MiB
from penstock.dataset.composition import from_arrays, join
from penstock.dataset.dataset import Dataset, OnError
from penstock.loader.loader import Loader
from penstock.nsd.layout import FIELD

BATCH_BYTES = 8 * MiB
SUMS_BYTES = 64 * MiB
"""Sums of all pictures that are kept at a time."""
COLUMNS = 256
"""Voxels whose moments are computed at a time, in double precision."""


@dataclass(frozen=True, eq=False)
class Moments:
    """(groups, *row shape) each; the count of a group without trials is 0."""

    mean: np.ndarray
    spread: np.ndarray
    counts: np.ndarray


def fit(
    betas: Dataset,
    rows: np.ndarray,
    groups: np.ndarray,
    *,
    memory: int | str,
    ddof: int = 0,
    on_error: OnError = "raise",
) -> Moments:
    """The moments of these rows; ``groups`` has the group of each row of the dataset.

    ``ddof`` is numpy's: 1 divides by the number of rows less one. Sums are of differences from the group's first row,
    in double precision: for whole numbers they are exact.
    """
    spec = betas.fields[FIELD]
    count = int(groups.max()) + 1
    rows = rows[np.lexsort((rows, groups[rows]))]  # one group after another, and within it in the order of the file
    chosen = join(values=betas.select(rows), group=from_arrays(group=groups[rows]))
    moments = Moments(
        np.zeros((count, *spec.shape), np.float32),
        np.zeros((count, *spec.shape), np.float32),
        np.bincount(groups[rows], minlength=count),
    )
    running: _Running | None = None
    batch_rows = max(1, min(256, BATCH_BYTES // max(1, 8 * spec.row_bytes // spec.dtype.itemsize)))
    with Loader(
        chosen,
        batch_size=batch_rows,
        memory=memory,
        columns=("values", "group"),
        output="numpy",
        rank=0,
        world_size=1,
        on_error=on_error,
    ) as loader:
        for values, numbers in loader:
            for group in np.unique(numbers).tolist():
                if running is None or running.group != group:
                    if running is not None:
                        running.finish(moments, ddof)
                    running = _Running(group, values[numbers == group][0])
                running.add(values[numbers == group])
    if running is not None:
        running.finish(moments, ddof)
    return moments


def fit_means(betas: Dataset, pictures: np.ndarray, *, memory: int | str, passes: int, on_error: OnError) -> Moments:
    """The moments of the means of pictures, with ddof 1; ``pictures`` has the picture of each row, -1 to leave it out.

    For rows that can only be read session by session: the trials of a picture are spread over sessions, so sums of all
    pictures are kept, for some voxels at a time. ``passes`` limits how often each session is read.
    """
    spec, rows = betas.fields[FIELD], np.flatnonzero(pictures >= 0)
    counts = np.bincount(pictures[rows])
    layer = prod(spec.shape[1:])
    most = max(1, SUMS_BYTES // (4 * len(counts) * layer), -(-spec.shape[0] // passes))
    mean, spread = np.zeros((1, *spec.shape), np.float32), np.zeros((1, *spec.shape), np.float32)
    for first in range(0, spec.shape[0], most):
        part = slice(first, min(first + most, spec.shape[0]))
        sums = _sums(betas.select_within(FIELD, part), rows, pictures, memory=memory, on_error=on_error)
        sums /= counts[:, None]
        for begin in range(0, sums.shape[1], COLUMNS):
            some = slice(part.start * layer + begin, part.start * layer + min(begin + COLUMNS, sums.shape[1]))
            column = sums[:, begin : begin + COLUMNS].astype(np.float64)
            mean.reshape(-1)[some] = column.mean(axis=0)
            spread.reshape(-1)[some] = column.std(axis=0, ddof=1) if len(counts) > 1 else 0
    return Moments(mean, spread, np.array([len(counts)]))


def _sums(part: Dataset, rows: np.ndarray, pictures: np.ndarray, *, memory: int | str, on_error: OnError) -> np.ndarray:
    """(pictures, voxels): the sum of each picture's trials. Two or three trials: float32 is exact enough."""
    elements = prod(part.fields[FIELD].shape)
    sums = np.zeros((int(pictures.max()) + 1, elements), np.float32)
    chosen = join(values=part.select(rows), picture=from_arrays(picture=pictures[rows]))
    with Loader(
        chosen, batch_size=256, memory=memory, columns=("values", "picture"), output="numpy", rank=0, world_size=1,
        on_error=on_error,
    ) as loader:  # fmt: skip
        for values, numbers in loader:
            for value, number in zip(values.reshape(len(values), -1), numbers.tolist(), strict=True):
                sums[number] += value
    return sums


class _Running:
    """The sums of one group."""

    def __init__(self, group: int, first: np.ndarray) -> None:
        self.group, self.shift = group, first.astype(np.float64)
        self.sum, self.squares, self.count = np.zeros_like(self.shift), np.zeros_like(self.shift), 0

    def add(self, values: np.ndarray) -> None:
        difference = values - self.shift
        self.sum += difference.sum(axis=0)
        np.multiply(difference, difference, out=difference)
        self.squares += difference.sum(axis=0)
        self.count += len(values)

    def finish(self, moments: Moments, ddof: int) -> None:
        mean = self.sum / self.count
        moments.mean[self.group] = self.shift + mean
        variance = np.maximum(self.squares / self.count - mean * mean, 0) * (self.count / max(1, self.count - ddof))
        moments.spread[self.group] = np.sqrt(variance)
