"""Random orders without tables: keyed permutations of ``range(length)``, and random draws by position.

Memory does not grow with the number of rows. A permutation is a Feistel network on the mixed-radix digits of the
position. Its domain is at most a square root larger than the number of rows, so results outside are rare, and are sent
through again until they fall inside ("cycle walking").

Seeds are never added. Every key is drawn from ``(seed, epoch, purpose)``, so seed 0 of epoch 1 is not seed 1 of
epoch 0.
"""

from functools import lru_cache
from math import isqrt

import numpy as np

from penstock.base.dataclass import dataclass

# Four rounds already pass the tests of randomness that numpy's own permutation passes; six leave a margin. Small sets,
# where each round mixes few bits, get more: the extra cost is too small to notice.
ROUNDS = 6
ROUNDS_SMALL = 12
SMALL_SET = 4096

# Positions are mapped in pieces: long enough that calls of numpy cost little, and small enough for a core's cache.
PIECE = 16_384


class Permutation:
    """A keyed bijection of ``range(length)`` that needs no table.

    A position is two digits, ``high * low_modulus + low``. In each round one digit is moved, modulo its own modulus, by
    a hash of the other. Digits of sets up to 2**32 fit 16 bits, so they are computed in words of 32 bits; larger sets
    use words of 64.
    """

    def __init__(self, length: int, keys: np.ndarray) -> None:
        self.length = length
        word = _WORD32 if length <= 2**32 else _WORD64
        high = isqrt(max(length - 1, 0)) + 1
        self._word = word
        self._moduli = word.kind(high), word.kind(max(1, -(-length // high)))
        self._keys = keys[: ROUNDS if length > SMALL_SET else ROUNDS_SMALL].astype(word.kind)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
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
            # Modulo without a division or a mask: values below the modulus wrap round to huge numbers.
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
        """Spread every bit of each value over all of its bits. Overwrites ``values``."""
        for factor in self.factors:
            values ^= values >> self.kind(self.half - 1)
            values *= self.kind(factor)
        values ^= values >> self.kind(self.half)
        return values


_WORD32 = _Word(np.uint32, (0x85EBCA6B, 0xC2B2AE35), 16)
_WORD64 = _Word(np.uint64, (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53), 32)


@lru_cache(maxsize=64)
def permutation(length: int, seed: int, epoch: int, *purpose: str | int) -> Permutation:
    """The permutation of ``range(length)`` for this seed, epoch and purpose."""
    return Permutation(length, _keys(seed, epoch, *purpose))


def draw(population: int, seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
    """An independent draw from ``range(population)`` for each position."""
    first, second = _keys(seed, epoch, "resample")[:2]
    drawn = np.asarray(positions, np.uint64) ^ first
    for key in (second, first):  # after one pass, the draws of neighbouring positions would still be alike
        drawn = _WORD64.mixed(drawn) ^ key
    return np.asarray(_WORD64.mixed(drawn) % np.uint64(population), np.int64)


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int, *purpose: str | int) -> np.ndarray:
    return generator(seed, epoch, *purpose).integers(0, 2**63, ROUNDS_SMALL, dtype=np.uint64)


def generator(seed: int, epoch: int, *purpose: str | int) -> "np.random.Generator":
    """Random numbers for this seed, epoch and purpose alone."""
    words = [int.from_bytes(word.encode(), "little") if isinstance(word, str) else word for word in purpose]
    return np.random.default_rng([seed, epoch, *words])
