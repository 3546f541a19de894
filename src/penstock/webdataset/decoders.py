"""Bytes of a field -> its value, by the extension of its name.

``decode("torch", f, {"wav": g})`` tries in order: what unpacks (``.gz``), what the caller gave (modes for pictures,
functions of name and bytes, functions by extension), and the plain kinds below. What nobody decodes stays bytes.

Nothing is unpickled: fields that only pickle could read are refused, unless a function of the caller's takes them.
"""

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from penstock import values
from penstock.errors import ConfigError, DecodeFailed, LimitExceeded, PenstockError, SchemaMismatch, Unsafe
from penstock.pictures import EXTENSIONS, MAX_PIXELS
from penstock.webdataset.arrays import MAX_ARRAY_BYTES, decode_npy, decode_npz, decode_ten
from penstock.webdataset.picture_modes import PictureDecoder
from penstock.webdataset.samples import Sample

FieldDecoder = Callable[[str, bytes], Any]
"""Takes a name such as ``.seg.png`` and its bytes; gives the value, or None if it is for somebody else."""


class Continue:
    """What a decoder gives back to have another go on with it: a new name and new bytes."""

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


def _pickled(data: bytes) -> Any:
    raise Unsafe(
        "only unpickling could read it, which runs what the file says; write npy or json instead. If you trust the "
        "file, give decode() a decoder of your own for it, or only= to leave it as bytes"
    )


def _undecodable(data: bytes) -> Any:
    raise ConfigError(
        "nothing here reads it; give decode() a decoder of your own for it, or only= to leave it as bytes"
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8")


PLAIN: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("pkl", "pickle", "pyd", "pth"), _pickled),
    **dict.fromkeys(("ten", "tb"), decode_ten),
    **dict.fromkeys(("mp", "msg"), values.as_msgpack),
    "npy": decode_npy,
    "npz": decode_npz,
    "cbor": _undecodable,
}


def basichandlers(key: str, data: bytes) -> Any:
    """Text, numbers, json and arrays, by the last part of the name."""
    decode = PLAIN.get(key.rpartition(".")[2])
    return None if decode is None else decode(data)


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

    def __call__(self, sample: Sample) -> Sample:
        """Another sample with the fields' values; ``__key__`` and its like are passed on."""
        if not isinstance(sample, dict):
            raise SchemaMismatch(
                f"decode: a sample is a dict of fields, not {type(sample).__name__}; decode before others"
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
            words = " ".join(str(error).split()) or "no reason given"
            raise DecodeFailed(
                f"{_where(sample, name)} ({len(value):,} bytes): {type(error).__name__}: {words}"
            ) from error


def _where(sample: Sample, name: str) -> str:
    return f"{sample.get('__url__', 'sample')}: {sample.get('__key__', '?')!r}, field {name!r}"


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
