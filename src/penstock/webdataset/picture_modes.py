"""Decoders for pictures, by mode: what they give, in what type and with which channels.

``rgb8`` is rows × columns × 3 of uint8; ``rgb`` the same as float32 from 0 to 1; ``torchrgb``, also called ``torch``, a
tensor with the channels first; ``pil`` an image of Pillow's. Likewise ``l`` for grey, and ``rgba``.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock import pictures
from penstock.errors import ConfigError, Unsafe


@dataclass(frozen=True)
class _Form:
    holder: Literal["numpy", "torch", "pil"]
    channels: pictures.Mode
    floats: bool = False


_CHANNELS: dict[str, pictures.Mode] = {"l": "L", "rgb": "RGB", "rgba": "RGBA"}
MODES = {
    **{f"{name}8": _Form("numpy", mode) for name, mode in _CHANNELS.items()},
    **{name: _Form("numpy", mode, floats=True) for name, mode in _CHANNELS.items()},
    **{f"torch{name}8": _Form("torch", mode) for name, mode in _CHANNELS.items()},
    **{f"torch{name}": _Form("torch", mode, floats=True) for name, mode in _CHANNELS.items()},
    **{f"pil{name}": _Form("pil", mode) for name, mode in _CHANNELS.items()},
    "torch": _Form("torch", "RGB", floats=True),
    "pil": _Form("pil", "RGB"),
}

# Drawing these means running a program.
_PROGRAMS = frozenset({"eps", "ps"})


class PictureDecoder:
    """Decodes fields whose last extension is a picture's, and leaves the others alone."""

    def __init__(self, mode: str, extensions: Collection[str], max_pixels: int) -> None:
        if mode not in MODES:
            raise ConfigError(f"decode({mode!r}): no such mode for pictures; there are {', '.join(MODES)}")
        self.mode, self.extensions, self.max_pixels = mode, frozenset(extensions), max_pixels

    def __call__(self, key: str, data: bytes) -> Any:
        """The picture; None if the name is not one of a picture."""
        extension = key.rpartition(".")[2].lower()
        if extension in _PROGRAMS:
            raise Unsafe("PostScript is a program, which is not run; convert it to png, or decode with only=")
        if extension not in self.extensions:
            return None
        form = MODES[self.mode]
        if form.holder == "pil":
            return pictures.decode_with_pillow(data, form.channels, self.max_pixels)
        pixels = pictures.decode(data, form.channels, self.max_pixels)
        if form.holder == "torch":
            try:
                from penstock.pytorch import tensor
            except ImportError:
                raise ConfigError(f'decode({self.mode!r}) gives tensors: pip install "penstock[torch]"') from None
            channels_first = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
            return tensor(_floats(channels_first) if form.floats else np.ascontiguousarray(channels_first))
        return _floats(pixels) if form.floats else pixels


def _floats(pixels: np.ndarray) -> np.ndarray:
    """From 0 to 1 in single precision, in the order of the axes given."""
    floats: np.ndarray = np.divide(pixels, np.float32(255), dtype=np.float32, order="C")
    return floats
