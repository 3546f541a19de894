"""Synthetic betas and pixels. Each is a function of its position, so that every number that is read proves its place.

With a signal, betas also depend on the picture shown, as they do in a brain: something can be learned from them.
"""

from dataclasses import field
from functools import cached_property

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.nsd.synthetic.scale import Scale

LARGEST = 32767  # int16
SPREAD = 6000  # of hashed values: +- 10 percent of signal change
CYCLE = 510  # after so many steps a colour is back where it began
HARMONICS = (1, 2)

# Odd constants of Weyl sequences and of murmur3's finalizer.
WEYL = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77), np.uint32(0xC2B2AE3D)
FINAL = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


@dataclass(frozen=True)
class Betas:
    """``betas.values(session, trials, voxels)``: whole numbers as stored, of shape (trials, voxels).

    Sessions count from 1, trials from 0, voxels in C order over (X, Y, Z). Where session, trial and voxel together fit
    16 bits, the value is their number; in larger sets, a hash of the three. A signal is added to the hash.
    """

    scale: Scale
    subject: int
    signal: float = 0
    """The standard deviation of the signal, as a multiple of the noise's."""
    shown: np.ndarray | None = field(default=None, compare=False, repr=False)
    """The picture of each planned trial, for the signal."""

    @property
    def exact(self) -> bool:
        """Whether one value alone proves session, trial and voxel."""
        scale = self.scale
        return not self.signal and scale.planned_sessions * scale.trials * scale.voxels <= LARGEST

    def values(self, session: int, trials: np.ndarray, voxels: np.ndarray) -> np.ndarray:
        if self.exact:
            first = (session - 1) * self.scale.trials * self.scale.voxels
            return np.asarray(first + trials[:, None] * self.scale.voxels + voxels, np.int16)
        session_part = np.uint32((session * int(WEYL[2]) + self.subject * 0x27D4EB2F) & 0xFFFFFFFF)
        hashed = (trials.astype(np.uint32) * WEYL[1] ^ session_part)[:, None] ^ (voxels.astype(np.uint32) * WEYL[0])
        hashed *= FINAL[0]
        hashed ^= hashed >> np.uint32(15)
        hashed *= FINAL[1]
        hashed >>= np.uint32(16)
        hashed *= np.uint32(SPREAD)
        hashed >>= np.uint32(16)
        # Voxels differ in their mean, and sessions too, as they do in a scanner: what a z-score is for.
        level = (voxels % 97).astype(np.int32) * 5 + session * 11 - SPREAD // 2
        values = hashed.astype(np.int32) + level
        if self.signal and self.shown is not None:
            planned = (session - 1) * self.scale.trials + trials
            values += self._response(self.shown[planned], voxels)
        return np.asarray(values.clip(-LARGEST, LARGEST), np.int16)

    def _response(self, numbers: np.ndarray, voxels: np.ndarray) -> np.ndarray:
        """What each voxel adds for each picture: a weighted sum of the picture's features."""
        scale = self.signal * SPREAD / np.sqrt(12) * np.sqrt(2 / len(self._weights))
        return np.rint(scale * features(numbers) @ self._weights[:, voxels]).astype(np.int32)

    @cached_property
    def _weights(self) -> np.ndarray:
        count = 6 * len(HARMONICS)
        return np.random.default_rng([self.subject, 5]).standard_normal((count, self.scale.voxels), np.float32)


def features(numbers: np.ndarray) -> np.ndarray:
    """(numbers, 12): where each colour of these pictures is in its cycle."""
    phase = _colour(numbers)[:, :, None] * (2 * np.pi / CYCLE) * np.array(HARMONICS)
    return np.concatenate([np.cos(phase), np.sin(phase)], axis=1).reshape(len(numbers), -1).astype(np.float32)


def _colour(numbers: np.ndarray) -> np.ndarray:
    return (numbers[:, None].astype(np.uint32) * np.array([37, 91, 173], np.uint32)) >> np.uint32(1)


def pictures(numbers: np.ndarray, size: int) -> np.ndarray:
    """Pixels of these pictures, uint8 of shape (numbers, size, size, 3): ramps from a colour of each one's own."""
    colour = _colour(numbers)
    down = np.arange(size, dtype=np.uint32)[:, None, None] * np.array([1, 2, 0], np.uint32)
    across = np.arange(size, dtype=np.uint32)[None, :, None] * np.array([2, 0, 1], np.uint32)
    ramps = colour[:, None, None, :] + down + across
    return np.abs((ramps % CYCLE).astype(np.int32) - 255).astype(np.uint8)  # there and back: no edges, as JPEG likes it
