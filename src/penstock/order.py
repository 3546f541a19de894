"""Which row comes at which position of an epoch: pure functions of (seed, epoch, position).

Rule 1: an order has no cursor, no generator and no state; ``at`` may be asked for any positions in any sequence.
Rule 2: memory does not grow with the number of rows. Shuffling is a keyed permutation computed per position: a
Feistel network on the mixed-radix digits of the position, whose domain is at most a square root larger than the
number of rows, so that positions falling outside are rare and are simply sent through again until they fall inside
("cycle walking").
Rule 3: seeds are never added. Every key is drawn from ``(seed, epoch, purpose)``, so seed 0 of epoch 1 is not seed 1
of epoch 0.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any

import numpy as np

from penstock.errors import ConfigError

Rows = np.ndarray
"""int64 row numbers."""

# Four rounds already pass the tests of randomness that numpy's own permutation passes; six leave a margin, and small
# sets, where each round mixes few bits, get more at no cost that anyone could notice.
ROUNDS = 6
ROUNDS_SMALL = 12
SMALL_SET = 4096

# Positions are mapped in pieces that stay in a core's cache: four times as fast as whole arrays.
PIECE = 4096

_MASK32 = np.uint64(0xFFFFFFFF)
_MIX1, _MIX2 = np.uint64(0x85EBCA6B), np.uint64(0xC2B2AE35)  # murmur3's finalizer
_16, _13, _32 = np.uint64(16), np.uint64(13), np.uint64(32)


class Order(ABC):
    """What plays the part of a sampler: position of an epoch -> row."""

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

    def __len__(self) -> int:
        return self.length

    def at(self, epoch: int, positions: np.ndarray) -> Rows:
        return np.asarray(positions, np.int64)

    def describe(self) -> Mapping[str, Any]:
        return {"order": "in order", "rows": self.length}


@dataclass(frozen=True)
class Shuffled(Order):
    """All rows once, in an order drawn anew each epoch, over the whole set."""

    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)

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
        check_seed(self.seed)
        if self.population < 1:
            raise ConfigError("Resampled draws from a population of at least 1 row, and was given none")

    def __len__(self) -> int:
        return self.length

    def at(self, epoch: int, positions: np.ndarray) -> Rows:
        keys = _keys(self.seed, epoch, "resample")
        drawn = np.asarray(positions, np.uint64)
        high, low = _hash32(drawn ^ keys[0]), _hash32((drawn >> _32) ^ keys[1])
        both = (_hash32(high ^ keys[2]) << _32) | _hash32(low ^ high ^ keys[3])
        return np.asarray(both % np.uint64(self.population), np.int64)

    def describe(self) -> Mapping[str, Any]:
        return {"order": "resampled", "rows": self.population, "length": self.length, "seed": self.seed}


@dataclass(frozen=True)
class BlockShuffled(Order):
    """All rows once: blocks in a random order, ``window_blocks`` of them at a time, their rows mixed.

    ``starts`` are the first rows of the blocks, ascending, from 0. Whoever reads a window whole touches each block
    exactly once an epoch. The window is part of the order: another budget must not change the data.
    """

    length: int
    starts: np.ndarray
    window_blocks: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.window_blocks < 1:
            raise ConfigError(f"window_blocks={self.window_blocks}: expected at least 1 block")
        starts = np.asarray(self.starts, np.int64)
        if len(starts) == 0 or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= max(self.length, 1):
            raise ConfigError("block starts must rise from 0 and stay below the number of rows")
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

    def windows(self, epoch: int) -> np.ndarray:
        """The first position of each window, and the end of the last."""
        return _window_starts(self, epoch)

    def blocks_of(self, epoch: int, window: int) -> np.ndarray:
        """The blocks that make up a window."""
        first = window * self.window_blocks
        last = min(first + self.window_blocks, len(self.starts))
        return permutation(len(self.starts), self.seed, epoch, "blocks")(np.arange(first, last))

    def describe(self) -> Mapping[str, Any]:
        return {
            "order": "block-shuffled", "rows": self.length, "seed": self.seed,
            "blocks": len(self.starts), "window_blocks": self.window_blocks,
        }  # fmt: skip

    def _mixed(self, epoch: int, window: int, positions: np.ndarray) -> Rows:
        blocks = self.blocks_of(epoch, window)
        begins = self.starts[blocks]
        sizes = _sizes(self)[blocks]
        ends = np.cumsum(sizes)
        mixed = permutation(int(ends[-1]), self.seed, epoch, "window", window)(positions - self.windows(epoch)[window])
        place = np.searchsorted(ends, mixed, side="right")
        return np.asarray(begins[place] + mixed - (ends - sizes)[place])


def _sizes(order: BlockShuffled) -> np.ndarray:
    return np.diff(order.starts, append=order.length)


@lru_cache(maxsize=4)
def _window_starts(order: BlockShuffled, epoch: int) -> np.ndarray:
    blocks = permutation(len(order.starts), order.seed, epoch, "blocks")(np.arange(len(order.starts)))
    ends = np.cumsum(_sizes(order)[blocks])
    last_of_window = np.append(
        np.arange(order.window_blocks - 1, len(blocks) - 1, order.window_blocks), len(blocks) - 1
    )
    return np.concatenate([[0], ends[last_of_window]])


class Permutation:
    """A keyed bijection of ``range(length)`` that needs no table."""

    def __init__(self, length: int, keys: np.ndarray) -> None:
        self.length = length
        self._high = max(1, isqrt(max(length - 1, 0)) + 1)
        self._low = max(1, -(-length // self._high))
        self._keys = keys[: ROUNDS if length > SMALL_SET else ROUNDS_SMALL]

    def __call__(self, positions: np.ndarray) -> Rows:
        positions = np.asarray(positions, np.int64)
        rows = np.empty(len(positions), np.int64)
        for begin in range(0, len(positions), PIECE):
            rows[begin : begin + PIECE] = self._piece(positions[begin : begin + PIECE])
        return rows

    def _piece(self, positions: np.ndarray) -> np.ndarray:
        mixed = self._mix(positions.astype(np.uint64))
        outside = np.flatnonzero(mixed >= self.length)
        while len(outside):
            mixed[outside] = self._mix(mixed[outside])
            outside = outside[mixed[outside] >= self.length]
        return mixed.view(np.int64)

    def _mix(self, values: np.ndarray) -> np.ndarray:
        """One pass of the network: digits take turns, each moved by a hash of the other."""
        moduli = (np.uint64(self._high), np.uint64(self._low))
        digits = list(np.divmod(values, moduli[1]))
        for turn, key in enumerate(self._keys):
            moved, by = turn % 2, 1 - turn % 2
            shift = (_hash32(digits[by] ^ key) * moduli[moved]) >> _32
            shift += digits[moved]
            np.subtract(shift, moduli[moved], out=shift, where=shift >= moduli[moved])
            digits[moved] = shift
        return np.asarray(digits[0] * moduli[1] + digits[1])


@lru_cache(maxsize=64)
def permutation(length: int, seed: int, epoch: int, *purpose: str | int) -> Permutation:
    """The permutation of ``range(length)`` that belongs to this seed, epoch and purpose."""
    return Permutation(length, _keys(seed, epoch, *purpose))


def check_seed(seed: int) -> None:
    """Refuse a seed that numpy could not take, before anything depends on it."""
    if not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed={seed!r}: expected a whole number, 0 or larger")


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int, *purpose: str | int) -> np.ndarray:
    words = [int.from_bytes(word.encode(), "little") if isinstance(word, str) else word for word in purpose]
    return np.random.default_rng([seed, epoch, *words]).integers(0, 2**32, ROUNDS_SMALL, dtype=np.uint64)


def _hash32(values: np.ndarray) -> np.ndarray:
    """32 well-mixed bits of each value's low 32 bits."""
    mixed = values & _MASK32
    mixed ^= mixed >> _16
    mixed *= _MIX1
    mixed &= _MASK32
    mixed ^= mixed >> _13
    mixed *= _MIX2
    mixed &= _MASK32
    mixed ^= mixed >> _16
    return mixed
