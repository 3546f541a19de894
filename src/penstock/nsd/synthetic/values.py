"""What a synthetic beta or pixel is: a function of where it stands, so that every number read proves its place."""

from dataclasses import dataclass

import numpy as np

from penstock.nsd.synthetic.scale import Scale

LARGEST = 32767  # int16
SPREAD = 6000  # of hashed values: +- 10 percent of signal change

# Odd constants of Weyl sequences and of murmur3's finalizer.
WEYL = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77), np.uint32(0xC2B2AE3D)
FINAL = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


@dataclass(frozen=True)
class Betas:
    """``betas.values(session, trials, voxels)``: whole numbers as stored, of shape (trials, voxels).

    Sessions count from 1, trials from 0, voxels in C order over (X, Y, Z). Where session, trial and voxel together fit
    16 bits, the value is their number; in larger sets, a hash of the three.
    """

    scale: Scale
    subject: int

    @property
    def exact(self) -> bool:
        """Whether one value alone tells session, trial and voxel."""
        scale = self.scale
        return scale.planned_sessions * scale.trials * scale.voxels <= LARGEST

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
        return np.asarray(hashed.astype(np.int32) + level, np.int16)


def pictures(numbers: np.ndarray, size: int) -> np.ndarray:
    """Pixels of these pictures, uint8 of shape (numbers, size, size, 3): ramps from a colour of each one's own."""
    colour = (numbers[:, None].astype(np.uint32) * np.array([37, 91, 173], np.uint32)) >> np.uint32(1)
    down = np.arange(size, dtype=np.uint32)[:, None, None] * np.array([1, 2, 0], np.uint32)
    across = np.arange(size, dtype=np.uint32)[None, :, None] * np.array([2, 0, 1], np.uint32)
    ramps = colour[:, None, None, :] + down + across
    return np.abs((ramps % 510).astype(np.int32) - 255).astype(np.uint8)  # there and back: no edges, as JPEG likes it
