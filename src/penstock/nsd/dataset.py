"""What is trained on: voxels, pictures and whatever else was asked for, one sample a trial or a picture."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from penstock.dataset import Dataset, Index
from penstock.errors import BudgetExceeded, ConfigError
from penstock.loader import Loader
from penstock.nsd.regions import Voxels
from penstock.nsd.repetitions import OneOfEach
from penstock.request import WINDOW_BYTES
from penstock.sizes import MiB, parse_size
from penstock.spec import row_bytes

SESSIONS_MIXED = 4
"""Batches of one session alone would follow its drift; of four, three quarters of any two samples are apart."""


# Measured, of a whole subject: the trial table, masks, and what the libraries that read them keep.
OPENING_BYTES = 32 * MiB


class NSDDataset(Dataset):
    """``ds[i]`` is a tuple of the columns: voxels, picture, number of the picture. Made by ``NSD.dataset``.

    It goes into torch's own ``DataLoader`` as it is, workers included; ``ds.loader(…)`` is penstock's.
    """

    def __init__(self, made: Dataset, columns: Sequence[str], trials: Any, voxels: Voxels | None) -> None:
        super().__init__(made.store, made.casts, made.left_out, made.axes)
        self.columns = tuple(columns)
        self.trials = trials
        """The trial table of the samples, a row each; of a picture's first trial where samples are pictures."""
        self.voxels = voxels
        """Which voxels, in the order in which they come; None for whole volumes."""
        self._lines: np.ndarray | None = None

    def __getitem__(self, index: Index | str) -> Any:
        sample = super().__getitem__(index)
        return tuple(sample[name] for name in self.columns)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [tuple(sample[name] for name in self.columns) for sample in super().__getitems__(indices)]

    @property
    def trial_map(self) -> list[tuple[int, int, int]]:
        """(session, trial_in_session, global_trial) of each sample."""
        columns = (self.trials[name].tolist() for name in ("session", "trial_in_session", "global_trial"))
        return list(zip(*columns, strict=True))

    def one_of_each(self, lines: np.ndarray) -> "NSDDataset":
        """The same, to be shown a trial of each picture an epoch."""
        self._lines = lines
        return self

    def order(self, seed: int = 0, *, shuffle: bool = True) -> OneOfEach:
        """For ``reps="random"``: every picture once an epoch, by one of its trials drawn anew."""
        if self._lines is None:
            raise ConfigError('order(): for datasets made with reps="random"')
        return OneOfEach(self._lines, seed, shuffle)

    def loader(self, batch_size: int, *, shuffle: Any = False, seed: int = 0, **options: Any) -> Loader:
        """A ``penstock.Loader`` of the columns; ``options`` are its own.

        Where trials can only be read session by session, at least four sessions are mixed together, pictures and all,
        which takes memory; ``window=750`` mixes one at a time, and copies by trial (``NSD.prepare``) none at all.
        Of ``memory``, some is set aside for what opening took, unless all of it is needed.
        """
        if self._lines is not None and isinstance(shuffle, bool):
            shuffle = self.order(seed, shuffle=shuffle)
        options.setdefault("columns", self.columns)
        blocks = self.store.blocks
        if blocks is not None and options.get("window") is None:
            largest = int(np.diff(blocks, append=len(self)).max())
            options["window"] = max(SESSIONS_MIXED * largest, WINDOW_BYTES // max(1, row_bytes(self.store.fields)))
        make = partial(Loader, self, batch_size=batch_size, shuffle=shuffle, seed=seed)
        if "memory" in options:
            memory = parse_size(options["memory"], argument="memory")
            aside = min(OPENING_BYTES, memory // 16)
            with suppress(BudgetExceeded):
                loader = make(**{**options, "memory": memory - aside})
                holders = {**loader.plan.holders, "opening": aside}
                loader.plan = replace(loader.plan, limit_bytes=memory, holders=holders)
                return loader
        return make(**options)
