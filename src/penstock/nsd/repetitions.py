"""Trials that show the same picture, and trials before and after. Pure: row numbers of trials in and out."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.dataset.gather import NO_ROW
from penstock.loader.order import Order, Resampled, Rows, Shuffled, check_seed
from penstock.nsd.layout import REPS

Reps = Literal["single", "mean", "stack", "random"]
Padding = Literal["mindeye1", "mindeye2"]


def by_picture(stim_ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(pictures, 3): which of these rows show each picture, in order; -1 where it was shown less often.

    Pictures come in the order of their first trial.
    """
    order = np.argsort(stim_ids[rows], kind="stable")
    pictures, begins = np.unique(stim_ids[rows][order], return_index=True)
    counts = np.diff(begins, append=len(rows))
    most = max(REPS, int(counts.max()))
    lines = np.full((len(pictures), most), NO_ROW, np.int64)
    lines[np.arange(most) < counts[:, None]] = rows[order]
    return lines[np.argsort(lines[:, 0], kind="stable")]


def stacked(lines: np.ndarray, padding: str) -> np.ndarray:
    """Three rows per picture. A picture shown once is repeated three times, whichever the padding.

    Of two trials [a, b], "mindeye1" makes [a, b, their mean] (-1 here), and "mindeye2" makes [a, b, a].
    """
    absent = lines == NO_ROW
    if padding == "mindeye1":
        absent &= lines[:, 1:2] == NO_ROW
    return np.where(absent, lines[:, :1], lines)


def neighbours(session: np.ndarray, rows: np.ndarray, past: int, future: int) -> tuple[np.ndarray, np.ndarray]:
    """(samples, past) and (samples, future): the trials before, latest first, and after; -1 beyond the session's ends.

    ``session`` has the session of each row; rows are in the order of trials.
    """

    def shifted(by: np.ndarray) -> np.ndarray:
        wanted = rows[:, None] + by
        inside = (wanted >= 0) & (wanted < len(session))
        same = session[np.where(inside, wanted, 0)] == session[rows][:, None]
        return np.where(inside & same, wanted, NO_ROW)

    return shifted(-np.arange(1, past + 1)), shifted(np.arange(1, future + 1))


@dataclass(frozen=True, eq=False)
class OneOfEach(Order):
    """Every picture once per epoch, by one of its trials, drawn anew in each epoch."""

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
        # One draw per picture, not per position: in order or shuffled, an epoch shows the same trials.
        draws = Resampled(1 << 20, len(self), self.seed).at(epoch, pictures)
        return np.asarray(self.lines[pictures, draws % counts])

    def describe(self) -> Mapping[str, Any]:
        return {"order": "one trial of each picture", "rows": len(self), "seed": self.seed, "shuffled": self.shuffle}
