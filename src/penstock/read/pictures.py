"""Pictures: bytes -> rows × columns × channels of uint8.

1. **The size is known before decoding**, and limited: see ``picture_headers``.
2. **Values are those Pillow gives**: libjpeg-turbo with its defaults, and grey, colour and alpha converted as
   ``Image.convert`` does. JPEG, PNG and WebP are decoded by imagecodecs, which is quicker, releases the interpreter's
   lock and can write into the caller's memory; the rest by Pillow.
3. **Decoding runs no program.** Pillow hands PostScript to Ghostscript, whatever the file is called, so it gets a
   list of the formats that it may recognise.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import numpy as np

from penstock.errors import ConfigError, DecodeFailed, LimitExceeded, PenstockError, SchemaMismatch
from penstock.read.codecs import cannot_load
from penstock.read.picture_headers import PictureHeader, read_header

ColourMode = Literal["L", "RGB", "RGBA"]
Fit = Literal["resize", "cover", "crop"]
"""To a size: stretched to it; scaled until it covers it, and what stands out cut off; or its middle cut out."""

MAX_PIXELS = 100_000_000
"""300 MB in colour; the largest photographs of common datasets have a third of it."""

EXTENSIONS = frozenset({
    "apng", "avif", "blp", "bmp", "bw", "cur", "dcx", "dds", "dib", "fit", "fits", "flc", "fli", "ftc", "ftu", "gbr",
    "gif", "icb", "icns", "ico", "iim", "im", "j2c", "j2k", "jfif", "jp2", "jpc", "jpe", "jpeg", "jpf", "jpg", "jpx",
    "msp", "pbm", "pcd", "pcx", "pgm", "png", "pnm", "ppm", "psd", "pxr", "qoi", "ras", "rgb", "rgba", "sgi", "tga",
    "tif", "tiff", "vda", "vst", "webp", "xbm", "xpm",
})  # fmt: skip
"""Names of files that hold pictures."""

# What Pillow may recognise: everything it decodes by itself.
_PILLOW_FORMATS = (
    "AVIF", "BLP", "BMP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX", "GBR", "GIF", "ICNS", "ICO", "IM", "JPEG",
    "JPEG2000", "MPO", "MSP", "PCD", "PCX", "PIXAR", "PNG", "PPM", "PSD", "QOI", "SGI", "SUN", "TGA", "TIFF", "WEBP",
    "XBM", "XPM",
)  # fmt: skip


def decode(
    data: bytes,
    mode: ColourMode = "RGB",
    max_pixels: int = MAX_PIXELS,
    out: np.ndarray | None = None,
    header: PictureHeader | None = None,
) -> np.ndarray:
    """A picture as ``(height, width)`` for "L", else ``(height, width, channels)``; into ``out`` if that is given.

    ``header`` is that of the picture, where it was read already.
    """
    header = checked_header(data, max_pixels, header)
    library = _load_imagecodecs() if header is not None and header.is_plain else None
    if header is None or library is None or header.kind not in _BY_IMAGECODECS:
        pixels = np.asarray(decode_with_pillow(data, mode, max_pixels))
    else:
        straight = out if out is not None and mode == "RGB" and _can_decode_into(out, header) else None
        pixels = _decode_with_imagecodecs(library, header.kind, data, straight)
        if straight is not None:
            return straight
        pixels = convert(pixels, mode)
    if out is None:
        return pixels if pixels.flags.writeable else pixels.copy()
    if out.shape != pixels.shape or out.dtype != np.uint8:
        raise DecodeFailed(f"a picture of shape {pixels.shape} does not fit memory for {out.dtype} of {out.shape}")
    if not np.may_share_memory(out, pixels):
        np.copyto(out, pixels)
    return out


def decode_with_pillow(data: bytes, mode: ColourMode | None, max_pixels: int = MAX_PIXELS) -> Any:
    """A picture as Pillow's own ``Image``, loaded and converted; without a mode as it is stored."""
    checked_header(data, max_pixels)
    with _opened_by_pillow(data) as picture:
        width, height = picture.size
        _check(picture.format or "picture", width, height, max_pixels)
        picture.load()
        return picture if mode is None else picture.convert(mode)


def read_size(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Height and width that the first bytes of a picture declare, of which nothing is decoded."""
    header = checked_header(data, max_pixels)
    if header is not None:
        return header.height, header.width
    with _opened_by_pillow(data) as picture:
        width, height = picture.size
        _check(picture.format or "picture", width, height, max_pixels)
        return height, width


def count_pixels(data: bytes) -> int:
    """Pixels that the first bytes of a picture declare."""
    header = read_header(data)
    if header is not None:
        return header.width * header.height
    if _load_pillow() is None:
        return 0
    with _opened_by_pillow(data) as picture:
        width, height = picture.size
        return int(width * height)


@contextmanager
def _opened_by_pillow(data: bytes) -> Iterator[Any]:
    """A picture of which Pillow has read the header; its errors are ours."""
    images = _load_pillow()
    if images is None:
        raise ConfigError(
            f'decoding this picture ({bytes(data[:4])!r}…) needs Pillow: pip install "penstock[webdataset]"'
        )
    try:
        with io.BytesIO(data) as stream:
            yield images.open(stream, formats=_list_allowed())
    except (PenstockError, MemoryError):
        raise
    except images.DecompressionBombError as error:
        raise LimitExceeded(f"a picture of {len(data):,} bytes: {_one_line(error)}") from None
    except Exception as error:  # its plugins raise OSError, SyntaxError, ValueError, struct.error and others
        raise DecodeFailed(f"a picture of {len(data):,} bytes: {_one_line(error, data)}") from error


def fit(pixels: np.ndarray, how: Fit, out: np.ndarray) -> None:
    """A picture brought to the size of ``out``; scaled as Pillow does, bilinear over all pixels that count."""
    height, width = pixels.shape[:2]
    high, wide = out.shape[:2]
    if how == "crop":
        if height < high or width < wide:
            raise SchemaMismatch(
                f'is {height} x {width}, too small to cut {high} x {wide} out of; fit="cover" would enlarge it'
            )
        top, left = (height - high) // 2, (width - wide) // 2
        np.copyto(out, pixels[top : top + high, left : left + wide])
        return
    images = _load_pillow()
    if images is None:
        raise ConfigError('size= needs Pillow: pip install "penstock[webdataset]"')
    box = (0.0, 0.0, float(width), float(height))
    if how == "cover":
        scale = min(height / high, width / wide)
        across, down = min(wide * scale, width), min(high * scale, height)  # rounding must not lead outside
        x, y = (width - across) / 2, (height - down) / 2
        box = (x, y, min(x + across, width), min(y + down, height))
    scaled = images.fromarray(pixels).resize((wide, high), images.Resampling.BILINEAR, box=box)
    np.copyto(out, np.asarray(scaled))


def convert(pixels: np.ndarray, mode: ColourMode) -> np.ndarray:
    """Grey, grey + alpha, RGB or RGBA of 8 or 16 bits -> ``mode``, as Pillow converts."""
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.dtype == np.uint16:
        # Pillow keeps 16 bits of grey, and clips them when it converts; of anything else it reads the upper 8.
        high = np.right_shift(pixels, 8, out=pixels) if pixels.ndim == 3 else np.minimum(pixels, 255, out=pixels)
        pixels = high.astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise DecodeFailed(f"a picture of {pixels.dtype} values; expected 8 or 16 bits")
    alpha = pixels[..., -1] if pixels.ndim == 3 and pixels.shape[2] in (2, 4) else None
    colour = pixels if pixels.ndim == 2 else pixels[..., 0] if pixels.shape[2] == 2 else pixels[..., :3]
    if mode == "L":
        return colour if colour.ndim == 2 else _luma(colour)
    if mode == "RGB":
        return np.repeat(colour[..., None], 3, axis=2) if colour.ndim == 2 else colour
    result = np.empty((*pixels.shape[:2], 4), np.uint8)
    result[..., :3] = colour[..., None] if colour.ndim == 2 else colour
    result[..., 3] = 255 if alpha is None else alpha
    return result


def _luma(colour: np.ndarray) -> np.ndarray:
    """ITU-R 601 in 16-bit fixed point, rounded: the same integers as Pillow's."""
    red, green, blue = (colour[..., channel].astype(np.uint32) for channel in range(3))
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).astype(np.uint8)


_BY_IMAGECODECS = {"jpeg": "jpeg8_decode", "png": "png_decode", "webp": "webp_decode"}


def _decode_with_imagecodecs(library: Any, kind: str, data: bytes, out: np.ndarray | None) -> np.ndarray:
    try:
        pixels: np.ndarray = getattr(library, _BY_IMAGECODECS[kind])(data, out=out)
    except ImportError as error:
        raise cannot_load(_BY_IMAGECODECS[kind]) from error
    except (RuntimeError, ValueError) as error:  # its own errors derive from the one, bad arguments are the other
        raise DecodeFailed(f"{kind} of {len(data):,} bytes: {_one_line(error, data)}") from error
    return pixels


def _can_decode_into(out: np.ndarray, header: PictureHeader) -> bool:
    """Whether the decoder can write there itself: colour JPEGs only, since other kinds may have alpha or 16 bits."""
    shape = (header.height, header.width, header.channels)
    return header.channels == 3 and out.dtype == np.uint8 and out.flags.c_contiguous and out.shape == shape


def checked_header(
    data: bytes, max_pixels: int = MAX_PIXELS, header: PictureHeader | None = None
) -> PictureHeader | None:
    """The header, if its kind is known: within the limit, and with an end."""
    if not data:
        raise DecodeFailed("a picture of 0 bytes")
    header = header or read_header(data)
    if header is None:
        return None
    _check(header.kind, header.width, header.height, max_pixels)
    # Without its end marker a JPEG was cut: libjpeg would make up the rest in grey. Inside a scan these two bytes
    # cannot occur; as a rule they are the last.
    if header.kind == "jpeg" and data.rfind(b"\xff\xd9", header.scan) < 0:
        raise DecodeFailed(f"jpeg of {len(data):,} bytes: ends before its end marker; it was cut short")
    return header


def _check(kind: str, width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise LimitExceeded(
            f"{kind} declares {width:,} by {height:,} = {width * height:,} pixels, more than "
            f"max_pixels={max_pixels:,}; give a larger max_pixels= if that is intended"
        )


def _one_line(error: BaseException, data: bytes | None = None) -> str:
    """The message of a decoder in one line; the kind of error if the message is empty or garbage."""
    text = " ".join(str(error).split())
    if "BytesIO object" in text or not text or not text.isprintable():
        first = "" if data is None else f"; it begins with {bytes(data[:8])!r}"
        return f"not a picture that can be read ({type(error).__name__}{first})"
    return text


@cache
def _load_imagecodecs() -> Any:
    try:
        import imagecodecs
    except ImportError:
        return None
    return imagecodecs


@cache
def _load_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        return None
    Image.init()
    return Image


@cache
def _list_allowed() -> tuple[str, ...]:
    return tuple(name for name in _PILLOW_FORMATS if name in _load_pillow().OPEN)
