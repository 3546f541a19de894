"""Trials that show the same picture, and trials that came before and after. Pure: numbers of trials in and out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.gathered import NO_ROW
from penstock.nsd.layout import REPS
from penstock.order import Order, Resampled, Rows, Shuffled, check_seed

Reps = Literal["single", "mean", "stack", "random"]
REPS_KNOWN = ("single", "mean", "stack", "random")


def by_picture(stim_ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(pictures, 3): the rows of these that show each picture, in order; -1 where it was shown less often.

    Pictures come in the order of their first trial.
    """
    order = np.argsort(stim_ids[rows], kind="stable")
    pictures, begins = np.unique(stim_ids[rows][order], return_index=True)
    counts = np.diff(begins, append=len(rows))
    most = max(REPS, int(counts.max()))
    lines = np.full((len(pictures), most), NO_ROW, np.int64)
    lines[np.arange(most) < counts[:, None]] = rows[order]
    return lines[np.argsort(lines[:, 0], kind="stable")]


def stacked(lines: np.ndarray) -> np.ndarray:
    """With MindEye's padding: what was shown once comes three times; of two, the third is their mean (-1)."""
    once = lines[:, 1] == NO_ROW
    return np.where(once[:, None], lines[:, :1], lines)


def neighbours(session: np.ndarray, rows: np.ndarray, past: int, future: int) -> tuple[np.ndarray, np.ndarray]:
    """(samples, past) and (samples, future): the trials before, latest first, and after; -1 beyond the session's ends.

    ``session`` is that of each row; rows that follow each other are trials that followed each other.
    """

    def shifted(by: np.ndarray) -> np.ndarray:
        wanted = rows[:, None] + by
        inside = (wanted >= 0) & (wanted < len(session))
        same = session[np.where(inside, wanted, 0)] == session[rows][:, None]
        return np.where(inside & same, wanted, NO_ROW)

    return shifted(-np.arange(1, past + 1)), shifted(np.arange(1, future + 1))


@dataclass(frozen=True, eq=False)
class OneOfEach(Order):
    """Every picture once an epoch, by one of its trials, drawn anew each epoch."""

    lines: np.ndarray
    """(pictures, most): rows of each picture's trials, -1 after the last."""
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def __len__(self) -> int:
        return len(self.lines)

    def at(self, epoch: int, positions: np.ndarray) -> Rows:
        positions = np.asarray(positions, np.int64)
        pictures = Shuffled(len(self), self.seed).at(epoch, positions) if self.shuffle else positions
        counts = (self.lines != NO_ROW).sum(axis=1)[pictures]
        # A draw for each picture, not for each position: in order or shuffled, an epoch shows the same trials.
        draws = Resampled(1 << 20, len(self), self.seed).at(epoch, pictures)
        return np.asarray(self.lines[pictures, draws % counts])

    def describe(self) -> Mapping[str, Any]:
        return {"order": "one trial of each picture", "rows": len(self), "seed": self.seed, "shuffled": self.shuffle}
