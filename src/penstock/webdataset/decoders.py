"""Bytes of a field -> its value, by the extension of its name.

``decode("torch", f, {"wav": g})`` tries in order: unpacking (``.gz``), what the caller gave (modes for pictures,
functions of name and bytes, functions by extension), and the plain kinds below. What no decoder takes stays bytes.

Modes for pictures: ``rgb8`` is rows × columns × 3 of uint8; ``rgb`` the same as float32 from 0 to 1; ``torchrgb``, also
called ``torch``, a tensor with the channels first; ``pil`` an image of Pillow's. Likewise ``l`` for grey, and ``rgba``.

Nothing is unpickled: fields that only pickle could read are refused, unless a function of the caller's takes them.
"""

import copy
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, NoReturn

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.errors import ConfigError, DecodeFailed, LimitExceeded, PenstockError, SchemaMismatch, Unsafe
from penstock.files.retry import one_line
from penstock.read import objects, pictures
from penstock.read.npy import MAX_ARRAY_BYTES, decode_npy, decode_npz, decode_ten
from penstock.read.pictures import EXTENSIONS, MAX_PIXELS
from penstock.webdataset.pixels import Pixels, as_floats
from penstock.webdataset.samples import Sample

FieldDecoder = Callable[[str, bytes], Any]
"""Takes a name such as ``.seg.png`` and its bytes; returns the value, or None to leave it to the next decoder."""


class Continue:
    """Returned by a decoder to hand a new name and new bytes to the next one."""

    def __init__(self, key: str, data: bytes) -> None:
        self.key, self.data = key, data


def gzfilter(key: str, data: bytes) -> Continue | None:
    """Unpack ``.txt.gz`` and go on with ``.txt``."""
    if not key.endswith(".gz"):
        return None
    unpacked = b""
    while data:  # a file may have several parts
        part = zlib.decompressobj(wbits=31)
        try:
            unpacked += part.decompress(data, MAX_ARRAY_BYTES - len(unpacked) + 1)
        except zlib.error as error:
            raise DecodeFailed(f"gz of {len(data):,} bytes: {error}") from error
        if len(unpacked) > MAX_ARRAY_BYTES:
            raise LimitExceeded(f"gz of {len(data):,} bytes unpacks to more than {MAX_ARRAY_BYTES:,}")
        if not part.eof:
            raise DecodeFailed(f"gz of {len(data):,} bytes: ends inside its data")
        data = part.unused_data.lstrip(b"\0")
    return Continue(key[:-3], unpacked)


def refuse_pickle(data: bytes) -> NoReturn:
    """Refused."""
    raise Unsafe(
        "only unpickling could read it, which runs code from the file; write npy or json instead. If you trust the "
        "file, give decode() a decoder of your own for it, such as {'pyd': pickle.loads}; or only= to leave it as bytes"
    )


def _undecodable(data: bytes) -> Any:
    raise ConfigError("there is no decoder for it: pass one of your own to decode(), or leave it as bytes with only=")


def _text(data: bytes) -> str:
    return data.decode("utf-8")


PLAIN: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("pkl", "pickle", "pyd", "pth"), refuse_pickle),
    **dict.fromkeys(("ten", "tb"), decode_ten),
    **dict.fromkeys(("mp", "msg"), objects.as_msgpack),
    "npy": decode_npy,
    "npz": decode_npz,
    "cbor": _undecodable,
}


def basichandlers(key: str, data: bytes) -> Any:
    """Text, numbers, json and arrays, by the last part of the name."""
    decode = PLAIN.get(key.rpartition(".")[2])
    return None if decode is None else decode(data)


@dataclass(frozen=True)
class _Form:
    holder: Literal["numpy", "torch", "pil"]
    channels: pictures.ColourMode
    floats: bool = False


_CHANNELS: dict[str, pictures.ColourMode] = {"l": "L", "rgb": "RGB", "rgba": "RGBA"}
PICTURE_MODES = {
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

    defers = False
    """Whether floats are left to be made in the batch that they are put into."""

    def __init__(self, mode: str, extensions: Collection[str], max_pixels: int) -> None:
        if mode not in PICTURE_MODES:
            raise ConfigError(f"decode({mode!r}): no such mode for pictures; there are {', '.join(PICTURE_MODES)}")
        self.mode, self.extensions, self.max_pixels = mode, frozenset(extensions), max_pixels

    def __call__(self, key: str, data: bytes) -> Any:
        """The picture; None if the name is not one of a picture."""
        extension = key.rpartition(".")[2].lower()
        if extension in _PROGRAMS:
            raise Unsafe("PostScript is a program, which is not run; convert it to png, or decode with only=")
        if extension not in self.extensions:
            return None
        form = PICTURE_MODES[self.mode]
        if form.holder == "pil":
            return pictures.decode_with_pillow(data, form.channels, self.max_pixels)
        pixels = pictures.decode(data, form.channels, self.max_pixels)
        if form.holder == "torch":
            try:
                from penstock.loader.pytorch import tensor
            except ImportError:
                raise ConfigError(f'decode({self.mode!r}) gives tensors: pip install "penstock[torch]"') from None
            channels_first = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
            if form.floats and self.defers:
                return Pixels(channels_first, is_tensor=True)
            return tensor(as_floats(channels_first) if form.floats else np.ascontiguousarray(channels_first))
        if form.floats and self.defers:
            return Pixels(pixels, is_tensor=False)
        return as_floats(pixels) if form.floats else pixels


class ByExtension:
    """Functions of bytes, by extension: ``{"wav": f, "seg.png": g}``."""

    def __init__(self, functions: Mapping[str, Callable[[bytes], Any]]) -> None:
        self.functions = {name.lower().lstrip("."): function for name, function in functions.items()}

    def __call__(self, key: str, data: bytes) -> Any:
        """By as many parts of the name as an entry has; the first that fits."""
        dotted = f".{key.lower().lstrip('.')}"
        for name, function in self.functions.items():
            if dotted.endswith(f".{name}"):
                return function(data)
        return None


def handle_extension(extensions: str, f: Callable[[bytes], Any]) -> ByExtension:
    """``handle_extension("jpg jpeg", f)``: a decoder for those extensions."""
    return ByExtension(dict.fromkeys(extensions.split(), f))


def imagehandler(mode: str, extensions: Collection[str] = EXTENSIONS, max_pixels: int = MAX_PIXELS) -> PictureDecoder:
    """``imagehandler("rgb8")``: a decoder for pictures."""
    return PictureDecoder(mode, extensions, max_pixels)


Given = str | FieldDecoder | Mapping[str, Callable[[bytes], Any]]


class Decoder:
    """Decodes whole samples: for each field the first decoder that gives something."""

    def __init__(
        self,
        handlers: Iterable[Given],
        pre: Iterable[FieldDecoder] | None = None,
        post: Iterable[FieldDecoder] | None = None,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        own = [_field_decoder(each, max_pixels) for each in handlers]
        self.handlers = [
            *([gzfilter] if pre is None else pre),
            *own,
            *([basichandlers] if post is None else post),
        ]
        self.only = None if only is None else set(only.split() if isinstance(only, str) else only)
        self.partial = partial

    def decode_field(self, key: str, data: bytes) -> Any:
        """One field, by its name."""
        key = f".{key}"
        for handler in self.handlers:
            result = handler(key, data)
            if isinstance(result, Continue):
                key, data = result.key, result.data
            elif result is not None:
                return result
        return data

    decode1 = decode_field

    def deferring(self) -> "Decoder":
        """The same for samples that are only picked from and stacked: see ``pixels``."""
        same = copy.copy(self)
        same.handlers = [_deferring(each) for each in self.handlers]
        return same

    def decode(self, sample: Sample) -> Sample:
        """The same as calling it."""
        return self(sample)

    def __call__(self, sample: Sample) -> Sample:
        """Another sample with the fields' values; ``__key__`` and its like are passed on."""
        if not isinstance(sample, dict):
            raise SchemaMismatch(
                f"decode: a sample is a dict of fields, not {type(sample).__name__}; call decode before other verbs"
            )
        decoded = {}
        for name, value in sample.items():
            if name.startswith("__"):
                decoded[name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            elif (self.only is not None and name not in self.only) or (self.partial and not isinstance(value, bytes)):
                decoded[name] = value
            else:
                decoded[name] = self._checked(name, value, sample)
        return decoded

    def _checked(self, name: str, value: Any, sample: Sample) -> Any:
        if not isinstance(value, bytes):
            raise SchemaMismatch(
                f"{_where(sample, name)}: decode expects bytes, and it is {type(value).__name__}; decode once, or with "
                f"partial=True"
            )
        try:
            return self.decode_field(name, value)
        except PenstockError as error:
            raise type(error)(f"{_where(sample, name)}: {error}") from error
        except Exception as error:
            raise DecodeFailed(
                f"{_where(sample, name)} ({len(value):,} bytes): {type(error).__name__}: {one_line(error)}"
            ) from error


def _where(sample: Sample, name: str) -> str:
    return f"{sample.get('__url__', 'sample')}: {sample.get('__key__', '?')!r}, field {name!r}"


def _deferring(handler: FieldDecoder) -> FieldDecoder:
    if not isinstance(handler, PictureDecoder):
        return handler
    same = copy.copy(handler)
    same.defers = True
    return same


def _field_decoder(given: Given, max_pixels: int) -> FieldDecoder:
    if isinstance(given, str):
        return PictureDecoder(given, EXTENSIONS, max_pixels)
    if isinstance(given, Mapping):
        return ByExtension(given)
    if not callable(given):
        raise ConfigError(
            f"decode: {given!r} is neither a mode such as 'rgb8', nor a function, nor a dict by extension"
        )
    return given
