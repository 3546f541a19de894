"""Encodes values as the bytes of a field, by the extension of its name: the opposite of ``decoders``.

Bytes and text are written as they are, whatever the name. Values that only pickle could write are refused.
"""

import gzip
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.errors import ConfigError, Unsafe
from penstock.read.npy import encode_npy, encode_npz, encode_ten
from penstock.webdataset.samples import Sample

Encode = Callable[[Any], Any]


def encode_sample(sample: Sample, encoders: Mapping[str, Encode]) -> Sample:
    """Encode the fields; those whose name begins with an underscore stay as they are."""
    return {name: value if name.startswith("_") else _encoded(name, value, encoders) for name, value in sample.items()}


def _encoded(name: str, value: Any, encoders: Mapping[str, Encode]) -> Any:
    plain = name.removesuffix(".gz")
    if isinstance(value, str):
        value = value.encode("utf-8")
    elif not isinstance(value, bytes | bytearray | memoryview):
        extension = plain.rpartition(".")[2].lower()
        if extension not in encoders:
            raise ConfigError(
                f"field {name!r}: no encoder for .{extension} of {type(value).__name__}; give bytes, or a function for "
                f"it in encoder=. Known extensions: {', '.join(sorted(encoders))}"
            )
        value = encoders[extension](value)
    return value if plain == name else gzip.compress(value, mtime=0)


def encode_picture(value: Any, kind: str) -> bytes:
    """Encode an array of uint8, or of floats from 0 to 1, or an image of Pillow's."""
    if hasattr(value, "save") and hasattr(value, "convert"):
        return _with_pillow(value, kind)
    pixels = _pixels(np.asarray(value))
    if kind in ("PPM", "PGM"):
        letter = b"P5" if pixels.ndim == 2 else b"P6"
        return letter + b"\n%d %d\n255\n" % (pixels.shape[1], pixels.shape[0]) + pixels.tobytes()
    try:
        import imagecodecs
    except ImportError:
        return _with_pillow(pixels, kind)
    if kind == "JPEG":
        # The highest quality with subsampled colours: what other programs write to shards.
        return bytes(imagecodecs.jpeg8_encode(pixels, level=100, subsampling="420" if pixels.ndim == 3 else None))
    if kind == "PNG":
        return bytes(imagecodecs.png_encode(pixels))
    return _with_pillow(pixels, kind)


def _pixels(value: np.ndarray) -> np.ndarray:
    if value.dtype.kind == "f":
        low, high = (float(value.min()), float(value.max())) if value.size else (0.0, 0.0)
        if not (low > -0.001 and high < 1.001):
            raise ConfigError(f"a picture of floats has values from 0 to 1; these go from {low:g} to {high:g}")
        value = (np.clip(value, 0, 1) * 255).astype(np.uint8)
    if value.ndim == 3 and value.shape[2] == 1:
        value = value[..., 0]
    if value.dtype != np.uint8 or not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] == 3)):
        raise ConfigError(
            f"a picture is (height, width) or (height, width, 3) of uint8 or floats; got {value.dtype} of {value.shape}"
        )
    return np.ascontiguousarray(value)


def _with_pillow(value: Any, kind: str) -> bytes:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(f'writing {kind} needs Pillow: pip install "penstock[webdataset]"') from None
    image = Image.fromarray(value) if isinstance(value, np.ndarray) else value
    stream = io.BytesIO()
    options = {"quality": 100} if kind == "JPEG" else {}
    image.save(stream, format="PPM" if kind == "PGM" else kind, **options)
    return stream.getvalue()


class _Picture:
    """An encoder of one kind that can be sent to other processes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, value: Any) -> bytes:
        return encode_picture(value, self.kind)


def _number(value: Any) -> bytes:
    return str(value).encode("ascii")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8")


def msgpack_dumps(value: Any) -> bytes:
    """A value as msgpack."""
    try:
        import msgpack
    except ImportError:
        raise ConfigError("writing msgpack needs its package: pip install msgpack") from None
    packed: bytes = msgpack.packb(value)
    return packed


def refuse_pickle(value: Any) -> bytes:
    """Refused."""
    raise Unsafe(
        f"only pickle could write a {type(value).__name__} here, and unpickling can run any code; use npy or json"
    )


DEFAULT_ENCODERS: dict[str, Encode] = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _number),
    **dict.fromkeys(("json", "jsn"), _json),
    **dict.fromkeys(("ten", "tenbin", "tb"), encode_ten),
    **dict.fromkeys(("mp", "msgpack", "msg"), msgpack_dumps),
    **dict.fromkeys(("jpg", "jpeg", "img", "image"), _Picture("JPEG")),
    **dict.fromkeys(("tif", "tiff"), _Picture("TIFF")),
    **dict.fromkeys(("pyd", "pickle", "pkl", "pth"), refuse_pickle),
    "npy": encode_npy,
    "npz": encode_npz,
    "png": _Picture("PNG"),
    "ppm": _Picture("PPM"),
    "pgm": _Picture("PGM"),
}


def imageencoder(image: Any, format: str = "PNG") -> bytes:  # noqa: A002
    """A picture as bytes of a kind: an array of uint8, or of floats from 0 to 1, or an image of Pillow's."""
    kind = {"JPG": "JPEG", "IMG": "PPM", "IMAGE": "PPM", "TIF": "TIFF"}.get(format.upper(), format.upper())
    return encode_picture(image, kind)


def make_encoder(given: bool | Mapping[str, Encode] | Callable[[Sample], Sample] | None) -> Callable[[Sample], Sample]:
    """True: encode by extension; a dict: by its functions; a function: the whole sample; False: bytes as given."""
    if callable(given):
        return given
    if isinstance(given, Mapping):
        return lambda sample: encode_sample(sample, given)
    if given is True:
        return lambda sample: encode_sample(sample, DEFAULT_ENCODERS)
    if given is False or given is None:
        return dict
    raise ConfigError(f"encoder={given!r}: expected True, False, a function, or functions by extension")
