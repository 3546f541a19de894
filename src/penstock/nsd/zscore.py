"""Means and standard deviations of voxels by group of trials: one bounded pass over the trials they are fitted on."""

from dataclasses import dataclass

import numpy as np

from penstock.dataset import Dataset, from_arrays, join
from penstock.loader import Loader
from penstock.nsd.layout import FIELD
from penstock.sizes import MiB

BATCH_BYTES = 8 * MiB


@dataclass(frozen=True, eq=False)
class Moments:
    """(groups, *row shape) each; groups that nothing was fitted on have a count of 0."""

    mean: np.ndarray
    spread: np.ndarray
    counts: np.ndarray


def fit(betas: Dataset, rows: np.ndarray, groups: np.ndarray, *, memory: int | str) -> Moments:
    """Of these rows, by the group that each row of the dataset belongs to.

    Sums are of differences from the group's first row, in double precision: of whole numbers they are exact.
    """
    spec = betas.fields[FIELD]
    count = int(groups.max()) + 1
    rows = rows[np.lexsort((rows, groups[rows]))]  # a group at a time, and within it as the file has them
    chosen = join(values=betas.select(rows), group=from_arrays(group=groups[rows]))
    moments = Moments(
        np.zeros((count, *spec.shape), np.float32),
        np.zeros((count, *spec.shape), np.float32),
        np.bincount(groups[rows], minlength=count),
    )
    running: _Running | None = None
    batch_rows = max(1, min(256, BATCH_BYTES // max(1, 8 * spec.row_bytes // spec.dtype.itemsize)))
    with Loader(
        chosen, batch_size=batch_rows, memory=memory, columns=("values", "group"), output="numpy", rank=0, world_size=1
    ) as loader:
        for values, numbers in loader:
            for group in np.unique(numbers).tolist():
                if running is None or running.group != group:
                    if running is not None:
                        running.finish(moments)
                    running = _Running(group, values[numbers == group][0])
                running.add(values[numbers == group])
    if running is not None:
        running.finish(moments)
    return moments


class _Running:
    """Sums of one group."""

    def __init__(self, group: int, first: np.ndarray) -> None:
        self.group, self.shift = group, first.astype(np.float64)
        self.sum, self.squares, self.count = np.zeros_like(self.shift), np.zeros_like(self.shift), 0

    def add(self, values: np.ndarray) -> None:
        apart = values - self.shift
        self.sum += apart.sum(axis=0)
        np.multiply(apart, apart, out=apart)
        self.squares += apart.sum(axis=0)
        self.count += len(values)

    def finish(self, moments: Moments) -> None:
        mean = self.sum / self.count
        moments.mean[self.group] = self.shift + mean
        moments.spread[self.group] = np.sqrt(np.maximum(self.squares / self.count - mean * mean, 0))
