"""The names of ``webdataset.autodecode``."""

import io
import os
import tempfile
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from penstock.errors import ConfigError
from penstock.read.npy import decode_npy as npy_loads
from penstock.read.npy import decode_npz as npz_loads
from penstock.read.npy import decode_ten as tenbin_loads
from penstock.read.objects import as_msgpack as msgpack_loads
from penstock.read.pictures import EXTENSIONS, MAX_PIXELS
from penstock.webdataset.decoders import (
    PICTURE_MODES,
    PLAIN,
    ByExtension,
    Continue,
    Decoder,
    FieldDecoder,
    PictureDecoder,
    basichandlers,
    gzfilter,
    handle_extension,
    refuse_pickle,
)
from penstock.webdataset.handlers import DecodingError
from penstock.webdataset.interface import utils

__all__ = [
    "IMAGE_EXTENSIONS",
    "Continue",
    "Decoder",
    "DecodingError",
    "ImageHandler",
    "basichandlers",
    "call_extension_handler",
    "cbor_loads",
    "decoders",
    "default_post_handlers",
    "default_pre_handlers",
    "gzfilter",
    "handle_extension",
    "imagehandler",
    "imagespecs",
    "msgpack_loads",
    "npy_loads",
    "npz_loads",
    "pytorch_weights_only",
    "tenbin_loads",
    "torch_audio",
    "torch_loads",
    "torch_video",
    "unpickle_loads",
]

IMAGE_EXTENSIONS = sorted(EXTENSIONS)
pytorch_weights_only = True
"""Whatever it is set to, files of ``torch.save`` are not unpickled."""

decoders: dict[str, Callable[[bytes], Any]] = PLAIN
"""By extension; programs may add to it."""
default_pre_handlers: list[FieldDecoder] = [gzfilter]
default_post_handlers: list[FieldDecoder] = [basichandlers]

imagespecs = {
    name: (form.holder, None if form.holder == "pil" else "float" if form.floats else "uint8", form.channels.lower())
    for name, form in PICTURE_MODES.items()
}


class ImageHandler(PictureDecoder):
    """``ImageHandler("pil", extensions=["jpg"])``: a decoder for pictures."""

    def __init__(self, imagespec: str, extensions: Collection[str] = EXTENSIONS, max_pixels: int = MAX_PIXELS) -> None:
        super().__init__(imagespec, extensions, max_pixels)
        self.imagespec = self.mode


imagehandler = ImageHandler


def call_extension_handler(key: str, data: bytes, f: Callable[[bytes], Any], extensions: Collection[str]) -> Any:
    """``f`` of the bytes if the name has one of the extensions, else None."""
    return ByExtension(dict.fromkeys(extensions, f))(key, data)


def _refuse(what: str) -> NoReturn:
    if utils.enforce_security:
        raise ConfigError(f"{what} is not allowed for security reasons when enforce_security is set.")
    refuse_pickle(b"")


def unpickle_loads(data: bytes) -> NoReturn:
    """Refused."""
    _refuse("Unpickling")


def torch_loads(data: bytes) -> NoReturn:
    """Refused: files of ``torch.save`` are pickles."""
    _refuse("torch.loads")


cbor_loads = PLAIN["cbor"]
PLAIN.update(dict.fromkeys(("pkl", "pickle", "pyd"), unpickle_loads), pth=torch_loads)

_AUDIO = frozenset({"flac", "mp3", "sox", "wav", "m4a", "ogg", "wma"})
_VIDEO = frozenset({"mp4", "ogv", "mjpeg", "avi", "mov", "h264", "mpg", "webm", "wmv"})


def torch_audio(key: str, data: bytes) -> Any:
    """A decoder for sound: samples and their rate, by torchaudio."""
    extension = key.rpartition(".")[2].lower()
    if extension not in _AUDIO:
        return None
    try:
        import torchaudio  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError("decode(torch_audio) needs its package: pip install torchaudio") from None
    return torchaudio.load(io.BytesIO(data), format=extension)


def torch_video(key: str, data: bytes) -> Any:
    """A decoder for films: frames, sound and what is known of both, by torchvision."""
    extension = key.rpartition(".")[2].lower()
    if extension not in _VIDEO:
        return None
    try:
        import torchvision.io  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError("decode(torch_video) needs its package: pip install torchvision") from None
    with tempfile.TemporaryDirectory() as folder:  # the library takes a path alone
        path = os.path.join(folder, f"film.{extension}")
        with open(path, "wb") as file:
            file.write(data)
        return torchvision.io.read_video(path, pts_unit="sec")
