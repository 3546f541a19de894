"""Small pictures of the first samples, for notebooks: PNG inside HTML, without any library."""

import base64
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base.sizes import MiB
from penstock.base.spec import FieldSpec, row_bytes
from penstock.base.urls import is_remote
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.dataset.dataset import Dataset

SHOWN = 4
SIDE = 96
SMALLEST = 8  # an array with a shorter side is not a picture
CHEAP_BYTES = 16 * MiB  # showing a dataset must not take long


def thumbnails(ds: "Dataset") -> str:
    """The first samples of the first field of pictures, as HTML; nothing if there is none, or if reading takes long."""
    name = next((name for name, spec in ds.fields.items() if _channel_axis(spec) is not None), None)
    if name is None or not len(ds):
        return ""
    try:
        one = ds.only(name)
        row_costs = row_bytes(one.fields) + one.delivered.scratch_bytes(1)
        if one.delivered.blocks is not None or row_costs > CHEAP_BYTES or is_remote(one.origin(0).url):
            return ""
        samples = one[: min(SHOWN, len(one))][name]
    except PenstockError:  # reading these samples reports it
        return ""
    axis = _channel_axis(ds.fields[name])
    return "<div>" + "".join(_image(sample, axis) for sample in samples) + "</div>"


def _channel_axis(spec: FieldSpec) -> int | None:
    """Where the channels of a picture are: 0 or 2, or -1 for grey without such an axis; None for anything else."""
    shape = spec.shape
    if spec.is_list or spec.dtype.kind not in "uf" or (spec.dtype.kind == "u" and spec.dtype.itemsize > 1):
        return None
    if len(shape) == 2 and spec.dtype.kind == "u" and min(shape) >= SMALLEST:
        return -1
    if len(shape) == 3:
        for axis in (2, 0):
            if shape[axis] in (1, 3) and min(shape[:2] if axis else shape[1:]) >= SMALLEST:
                return axis
    return None


def _image(sample: Any, axis: int | None) -> str:
    pixels = np.asarray(sample)
    pixels = pixels.transpose(1, 2, 0) if axis == 0 else pixels if axis == 2 else pixels[:, :, None]
    step = max(1, -(-max(pixels.shape[:2]) // SIDE))
    small = _as_bytes(pixels[::step, ::step])
    data = base64.b64encode(_png(small)).decode()
    return f"<img alt='a sample' style='margin:2px' src='data:image/png;base64,{data}'/>"


def _as_bytes(pixels: np.ndarray) -> np.ndarray:
    """0 to 255; floats are stretched, because their range is unknown."""
    if pixels.dtype.kind == "u":
        return pixels
    values = np.nan_to_num(pixels.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    return ((values - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)


def _png(pixels: np.ndarray) -> bytes:
    """Rows of 8-bit grey or colour, each behind a filter byte of 0."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts))


def _chunk(part: tuple[bytes, bytes]) -> bytes:
    kind, content = part
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
