"""Which row comes at which position of an epoch: pure functions of (seed, epoch, position).

Rule 1: an order has no cursor, no generator and no state; ``at`` accepts any positions in any sequence.
Rule 2: memory does not grow with the number of rows (see ``permutation``); an order of blocks keeps a number per block.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.loader.permutation import draw, permutation

Rows = np.ndarray
"""int64 row numbers."""

# As many bits as numpy recommends to draw for a seed.
MOST_SEED = 2**128 - 1


class Order(ABC):
    """Maps positions of an epoch to rows; the counterpart of torch's samplers."""

    @abstractmethod
    def __len__(self) -> int:
        """Positions in one epoch."""

    @abstractmethod
    def at(self, epoch: int, positions: np.ndarray) -> Rows:
        """The rows at these positions of this epoch."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """JSON that distinguishes this order from others; saved with a position and compared on resume."""

    def rows(self, epoch: int, start: int, stop: int) -> Rows:
        """The rows at positions ``start`` up to ``stop``."""
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))


@dataclass(frozen=True)
class InOrder(Order):
    """Row ``i`` at position ``i``."""

    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", checks.whole("length", self.length))

    def __len__(self) -> int:
        return self.length

    def at(self, epoch: int, positions: np.ndarray) -> Rows:
        return np.asarray(positions, np.int64)

    def describe(self) -> Mapping[str, Any]:
        return {"order": "in order", "rows": self.length}


class InWindows(Order):
    """An order that takes whole blocks of rows, one window of them at a time, so that each block is read only once."""

    starts: np.ndarray
    """First rows of the blocks, ascending, from 0."""
    window_blocks: int
    block_rows: int
    """Rows of the largest block."""

    @abstractmethod
    def windows(self, epoch: int) -> np.ndarray:
        """The first position of each window, and the end of the last."""

    @abstractmethod
    def blocks_of(self, epoch: int, window: int) -> np.ndarray:
        """The blocks that make up a window."""


@dataclass(frozen=True)
class InBlocks(InOrder, InWindows):
    """Row ``i`` at position ``i``, for rows stored in blocks: each block is a window."""

    starts: np.ndarray
    window_blocks = 1

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return int(np.diff(self.starts, append=self.length).max())

    def windows(self, epoch: int) -> np.ndarray:
        return np.append(self.starts, self.length)

    def blocks_of(self, epoch: int, window: int) -> np.ndarray:
        return np.array([window])


@dataclass(frozen=True)
class Shuffled(Order):
    """Every row once, in a new random order of the whole set each epoch."""

    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_plain(self, "length")

    def __len__(self) -> int:
        return self.length

    def at(self, epoch: int, positions: np.ndarray) -> Rows:
        return permutation(self.length, self.seed, epoch)(positions)

    def describe(self) -> Mapping[str, Any]:
        return {"order": "shuffled", "rows": self.length, "seed": self.seed}


@dataclass(frozen=True)
class Resampled(Order):
    """``length`` independent draws from ``population`` rows, with replacement."""

    population: int
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_plain(self, "length", "population")
        if self.population < 1:
            raise ConfigError(f"population={self.population}: expected at least 1 row to draw from")

    def __len__(self) -> int:
        return self.length

    def at(self, epoch: int, positions: np.ndarray) -> Rows:
        return draw(self.population, self.seed, epoch, positions)

    def describe(self) -> Mapping[str, Any]:
        return {"order": "resampled", "rows": self.population, "length": self.length, "seed": self.seed}


@dataclass(frozen=True)
class BlockShuffled(InWindows):
    """Every row once: blocks in a random order, ``window_blocks`` of them at a time, their rows mixed.

    ``starts`` are the first rows of the blocks, ascending, from 0. A reader that takes whole windows reads each block
    exactly once per epoch. The window is part of the order: another budget must not change the data.
    """

    length: int
    starts: np.ndarray
    window_blocks: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_plain(self, "length", "window_blocks")
        if self.window_blocks < 1:
            raise ConfigError(f"window_blocks={self.window_blocks}: expected at least 1 block")
        starts = np.asarray(self.starts, np.int64)
        if len(starts) == 0 or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= max(self.length, 1):
            raise ConfigError(
                f"starts={checks.shown(starts)}: expected the first rows of blocks: from 0, ascending, below the "
                f"number of rows, {self.length:,}"
            )
        object.__setattr__(self, "starts", starts)

    def __len__(self) -> int:
        return self.length

    def __hash__(self) -> int:
        return hash((self.length, len(self.starts), self.window_blocks, self.seed))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockShuffled) and (
            (self.length, self.window_blocks, self.seed) == (other.length, other.window_blocks, other.seed)
            and np.array_equal(self.starts, other.starts)
        )

    def at(self, epoch: int, positions: np.ndarray) -> Rows:
        positions = np.asarray(positions, np.int64)
        windows = np.searchsorted(self.windows(epoch), positions, side="right") - 1
        rows = np.empty(len(positions), np.int64)
        for window in np.unique(windows):
            here = windows == window
            rows[here] = self._mixed(epoch, int(window), positions[here])
        return rows

    @property
    def quality(self) -> float:
        """How close this is to a uniform shuffle, which is 1.0.

        The chance that two samples of one window come from different blocks, divided by the same chance for two
        samples of the whole set. Blocks delivered one after another give 0.
        """
        blocks = len(self.starts)
        rows = self.length / blocks
        window = min(self.window_blocks, blocks) * rows
        if rows <= 1 or blocks == 1 or window >= self.length:
            return 1.0
        apart_in_window = 1 - (rows - 1) / (window - 1)
        return apart_in_window / (1 - (rows - 1) / (self.length - 1))

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return int(_sizes(self).max())

    def windows(self, epoch: int) -> np.ndarray:
        return _window_starts(self, epoch)

    def blocks_of(self, epoch: int, window: int) -> np.ndarray:
        first = window * self.window_blocks
        last = min(first + self.window_blocks, len(self.starts))
        return permutation(len(self.starts), self.seed, epoch, "blocks")(np.arange(first, last))

    def describe(self) -> Mapping[str, Any]:
        return {
            "order": "block-shuffled", "rows": self.length, "seed": self.seed,
            "blocks": hashlib.sha256(self.starts.tobytes()).hexdigest()[:16], "window_blocks": self.window_blocks,
        }  # fmt: skip

    def _mixed(self, epoch: int, window: int, positions: np.ndarray) -> Rows:
        blocks = self.blocks_of(epoch, window)
        begins = self.starts[blocks]
        sizes = _sizes(self)[blocks]
        ends = np.cumsum(sizes)
        mixed = permutation(int(ends[-1]), self.seed, epoch, "window", window)(positions - self.windows(epoch)[window])
        place = np.searchsorted(ends, mixed, side="right")
        return np.asarray(begins[place] + mixed - (ends - sizes)[place])


@dataclass(frozen=True)
class Repeated(Order):
    """Passes over another order, one after another, ``length`` positions per epoch.

    An epoch continues where the previous one ended, and each pass has a new order: every row comes once before any
    comes twice, whatever the length of an epoch.
    """

    order: Order
    length: int

    def __len__(self) -> int:
        return self.length

    def at(self, epoch: int, positions: np.ndarray) -> Rows:
        passes, places = np.divmod(epoch * self.length + np.asarray(positions, np.int64), len(self.order))
        rows = np.empty(len(places), np.int64)
        for number in np.unique(passes).tolist():
            here = passes == number
            rows[here] = self.order.at(number, places[here])
        return rows

    def describe(self) -> Mapping[str, Any]:
        return {**self.order.describe(), "length": self.length}


@dataclass(frozen=True)
class RepeatedWindows(Repeated, InWindows):
    """The same for an order of windows; an epoch may begin and end inside a window."""

    order: InWindows

    @property
    def starts(self) -> np.ndarray:  # type: ignore[override]
        return self.order.starts

    @property
    def window_blocks(self) -> int:  # type: ignore[override]
        return self.order.window_blocks

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.order.block_rows

    def windows(self, epoch: int) -> np.ndarray:
        begin, rows = epoch * self.length, len(self.order)
        passes = range(begin // rows, -(-(begin + self.length) // rows))
        ends = np.concatenate([self.order.windows(number)[1:] + number * rows for number in passes]) - begin
        inside = ends[(ends > 0) & (ends < self.length)]
        return np.concatenate([[0], inside, [self.length]])

    def blocks_of(self, epoch: int, window: int) -> np.ndarray:
        first_pass, place = divmod(epoch * self.length, len(self.order))
        windows = self.order.windows(first_pass)
        first = int(np.searchsorted(windows, place, side="right")) - 1
        further, number = divmod(first + window, len(windows) - 1)
        return self.order.blocks_of(first_pass + further, number)


def check_seed(seed: Any) -> int:
    """The seed as a plain number; refuses anything else before an order depends on it."""
    return checks.whole("seed", seed, most=MOST_SEED)


def _check_plain(order: Any, *numbers: str) -> None:
    """Convert the seed and these fields to plain Python numbers, since they are saved as JSON."""
    object.__setattr__(order, "seed", check_seed(order.seed))
    for name in numbers:
        object.__setattr__(order, name, checks.whole(name, getattr(order, name)))


def repeated(order: Order, length: int) -> Repeated:
    """An order of ``length`` positions per epoch, made of passes over this one."""
    return RepeatedWindows(order, length) if isinstance(order, InWindows) else Repeated(order, length)


def _sizes(order: BlockShuffled) -> np.ndarray:
    return np.diff(order.starts, append=order.length)


@lru_cache(maxsize=32)  # several datasets may be read at once, each at the end of one pass and the start of the next
def _window_starts(order: BlockShuffled, epoch: int) -> np.ndarray:
    blocks = permutation(len(order.starts), order.seed, epoch, "blocks")(np.arange(len(order.starts)))
    ends = np.cumsum(_sizes(order)[blocks])
    last_of_window = np.append(
        np.arange(order.window_blocks - 1, len(blocks) - 1, order.window_blocks), len(blocks) - 1
    )
    return np.concatenate([[0], ends[last_of_window]])
