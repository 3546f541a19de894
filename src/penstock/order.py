"""Which row comes at which position of an epoch: pure functions of (seed, epoch, position).

Rule 1: an order has no cursor, no generator and no state; ``at`` may be asked for any positions in any sequence.
Rule 2: memory does not grow with the number of rows. Shuffling is a keyed permutation computed per position: a
Feistel network on the mixed-radix digits of the position, whose domain is at most a square root larger than the
number of rows, so that positions falling outside are rare and are simply sent through again until they fall inside
("cycle walking").
Rule 3: seeds are never added. Every key is drawn from ``(seed, epoch, purpose)``, so seed 0 of epoch 1 is not seed 1
of epoch 0.
"""

import hashlib
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


class InWindows(Order):
    """An order that takes whole blocks of rows, a window of them at a time, so that each need be read but once."""

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
    """Row ``i`` at position ``i``, for rows that come in blocks: each block is a window of its own."""

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
        first, second = _keys(self.seed, epoch, "resample")[:2]
        drawn = np.asarray(positions, np.uint64) ^ first
        for key in (second, first):  # one pass leaves neighbouring positions alike
            drawn = _WORD64.mixed(drawn) ^ key
        return np.asarray(_WORD64.mixed(drawn) % np.uint64(self.population), np.int64)

    def describe(self) -> Mapping[str, Any]:
        return {"order": "resampled", "rows": self.population, "length": self.length, "seed": self.seed}


@dataclass(frozen=True)
class BlockShuffled(InWindows):
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

    @property
    def quality(self) -> float:
        """How near this comes to a uniform shuffle, which is 1.0.

        Of two samples of one window, the chance that they come from different blocks, over the same chance for two
        samples of the whole set. Blocks delivered one after another have 0.
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
    """The passes of another order one after another, ``length`` positions of them an epoch.

    An epoch goes on where the one before it ended, and each pass is drawn anew: every row comes once before any comes
    twice, whatever an epoch's length.
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
    """The same of an order of windows; those at the ends of an epoch may be cut."""

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


def repeated(order: Order, length: int) -> Repeated:
    """So many positions an epoch, of passes of this order."""
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


class Permutation:
    """A keyed bijection of ``range(length)`` that needs no table.

    A position is two digits, ``high * low_modulus + low``. In each round one digit is moved, modulo its own modulus, by
    a hash of the other. Digits of sets up to 2**32 fit 16 bits, so that everything is done in words of 32; of larger
    sets, in words of 64.
    """

    def __init__(self, length: int, keys: np.ndarray) -> None:
        self.length = length
        word = _WORD32 if length <= 2**32 else _WORD64
        high = isqrt(max(length - 1, 0)) + 1
        self._word = word
        self._moduli = word.kind(high), word.kind(max(1, -(-length // high)))
        self._keys = keys[: ROUNDS if length > SMALL_SET else ROUNDS_SMALL].astype(word.kind)

    def __call__(self, positions: np.ndarray) -> Rows:
        positions = np.asarray(positions, np.int64)
        rows = np.empty(len(positions), np.int64)
        for begin in range(0, len(positions), PIECE):
            rows[begin : begin + PIECE] = self._piece(positions[begin : begin + PIECE])
        return rows

    def _piece(self, positions: np.ndarray) -> np.ndarray:
        mixed = self._mix(positions.astype(self._word.kind))
        outside = np.flatnonzero(mixed >= self.length)
        while len(outside):
            mixed[outside] = self._mix(mixed[outside])
            outside = outside[mixed[outside] >= self.length]
        return mixed

    def _mix(self, values: np.ndarray) -> np.ndarray:
        """One pass of the network."""
        digits = list(np.divmod(values, self._moduli[1]))
        for turn, key in enumerate(self._keys):
            moved, by = turn % 2, 1 - turn % 2
            shift = self._word.below(digits[by] ^ key, self._moduli[moved])
            shift += digits[moved]
            # Modulo, without a division or a mask: what is below the modulus wraps round to a huge number.
            digits[moved] = np.minimum(shift, shift - self._moduli[moved])
        return np.asarray(digits[0] * self._moduli[1] + digits[1])


@dataclass(frozen=True)
class _Word:
    """Hashing in words of one width; digits and moduli fill half of one."""

    kind: type[np.unsignedinteger]
    factors: tuple[int, int]  # of murmur3's finalizers
    half: int

    def below(self, values: np.ndarray, modulus: np.unsignedinteger) -> np.ndarray:
        """Hash each value to a number below the modulus. Overwrites ``values``."""
        first, second, half = self.kind(self.factors[0]), self.kind(self.factors[1]), self.kind(self.half)
        values *= first
        values ^= values >> self.kind(self.half - 1)
        values *= second
        values >>= half
        values *= modulus
        values >>= half
        return values

    def mixed(self, values: np.ndarray) -> np.ndarray:
        """Every bit of each value spread over all of them. Overwrites ``values``."""
        for factor in self.factors:
            values ^= values >> self.kind(self.half - 1)
            values *= self.kind(factor)
        values ^= values >> self.kind(self.half)
        return values


_WORD32 = _Word(np.uint32, (0x85EBCA6B, 0xC2B2AE35), 16)
_WORD64 = _Word(np.uint64, (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53), 32)


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
    return generator(seed, epoch, *purpose).integers(0, 2**63, ROUNDS_SMALL, dtype=np.uint64)


def generator(seed: int, epoch: int, *purpose: str | int) -> np.random.Generator:
    """Random numbers that belong to this seed, epoch and purpose alone."""
    words = [int.from_bytes(word.encode(), "little") if isinstance(word, str) else word for word in purpose]
    return np.random.default_rng([seed, epoch, *words])
