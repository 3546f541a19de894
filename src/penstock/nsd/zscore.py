"""Means and standard deviations of voxels per group of trials: one bounded pass over the trials they are fitted on."""

from dataclasses import dataclass

import numpy as np

from penstock.base.sizes import MiB
from penstock.dataset.composition import from_arrays, join
from penstock.dataset.dataset import Dataset, OnError
from penstock.loader.loader import Loader
from penstock.nsd.layout import FIELD

BATCH_BYTES = 8 * MiB


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
