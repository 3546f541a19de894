"""Loaders of trials that can only be read session by session: they mix as many sessions as memory allows."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from penstock.base.spec import row_bytes
from penstock.dataset.dataset import Dataset
from penstock.errors import BudgetExceeded
from penstock.loader.loader import Loader
from penstock.loader.request import WINDOW_BYTES

SESSIONS_MIXED = 4
"""Batches from one session would follow its drift. With four, three of four pairs of samples are of different ones."""


def windowed_loader(
    ds: Dataset, *, columns: Sequence[str] | None, memory: int | None, window: int | str | None = None, **options: Any
) -> Loader:
    """A loader of the best window for which there is memory; of the best one where no memory is given."""
    make = partial(Loader, ds, columns=columns, memory=memory, **options)
    if window is not None or ds.store.blocks is None:
        return make(window=window)
    *windows, smallest = _windows(ds, ds.store.blocks)
    if memory is None:
        return make(window=windows[0])
    for each in windows:
        if _least_bytes(ds, each, columns) <= memory:
            with suppress(BudgetExceeded):
                return make(window=each)
    return make(window=smallest)


def _windows(ds: Dataset, blocks: np.ndarray) -> list[int]:
    """Rows to mix, the best first. Few choices, so that most budgets lead to the same order."""
    largest = int(np.diff(blocks, append=len(ds)).max())
    few = [sessions * largest for sessions in range(SESSIONS_MIXED, 0, -1)]
    return list(dict.fromkeys([max(few[0], WINDOW_BYTES // max(1, row_bytes(ds.store.fields))), *few]))


def _least_bytes(ds: Dataset, window: int, columns: Sequence[str] | None) -> int:
    """Memory without which a window does not work: all of it is in batches, on a device's way there as stored."""
    fields = {name: spec for name, spec in ds.store.fields.items() if columns is None or name in columns}
    return min(window, len(ds)) * min(row_bytes(fields), row_bytes({name: ds.fields[name] for name in fields}))
