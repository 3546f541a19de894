"""Pictures on their way into a batch: decoded, and made floats with their channels first when they are stacked.

So the floats are written once, into the batch. It is done where nothing between ``decode`` and ``batched`` looks at
values; a caller's own function gets tensors.
"""

from typing import Any

import numpy as np


def as_floats(pixels: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """From 0 to 1 in single precision, in the order of the axes given."""
    floats: np.ndarray = np.divide(pixels, np.float32(255), out=out, dtype=np.float32, order="C")
    return floats


class Pixels:
    """One such picture, its channels first."""

    __slots__ = ("_pixels",)

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels

    def tensor(self) -> Any:
        """The tensor that ``decode`` gives otherwise."""
        from penstock.loader.pytorch import tensor

        return tensor(as_floats(self._pixels))

    def fits(self, block: Any) -> bool:
        """Whether it can be a row of a batch."""
        return bool(tuple(block.shape[1:]) == self._pixels.shape and str(block.dtype) == "torch.float32")

    def write(self, block: Any, row: int) -> None:
        """Put it into a batch."""
        as_floats(self._pixels, out=block[row].numpy())
