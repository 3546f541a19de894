"""Pictures on their way into a batch: decoded, and made floats, in an array or a tensor, when they are stacked.

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
    """One such picture, its axes in the order of the batch's."""

    __slots__ = ("_pixels", "is_tensor")

    def __init__(self, pixels: np.ndarray, *, is_tensor: bool) -> None:
        self._pixels, self.is_tensor = pixels, is_tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self._pixels.shape

    @property
    def nbytes(self) -> int:
        """Of the floats."""
        return 4 * self._pixels.size

    def value(self) -> Any:
        """What ``decode`` gives otherwise."""
        return self._held(as_floats(self._pixels))

    def batch(self, memory: np.ndarray) -> Any:
        """Memory as a batch of such pictures."""
        return self._held(memory.view(np.float32).reshape(-1, *self.shape))

    def joins(self, other: "Pixels") -> bool:
        """Whether both can be in one batch."""
        return (self.shape, self.is_tensor) == (other.shape, other.is_tensor)

    def fits(self, block: Any) -> bool:
        """Whether it can be a row of a batch."""
        kind = "torch.float32" if self.is_tensor else "float32"
        return tuple(block.shape[1:]) == self.shape and str(block.dtype) == kind

    def write(self, block: Any, row: int) -> None:
        """Put it into a batch."""
        as_floats(self._pixels, out=np.asarray(block[row]))

    def _held(self, floats: np.ndarray) -> Any:
        if not self.is_tensor:
            return floats
        from penstock.loader.pytorch import tensor

        return tensor(floats)
