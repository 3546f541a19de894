"""Write samples to tar shards; the same samples always give the same bytes.

A shard appears under its name when it is whole: until then it is written beside it, as ``.partial``, and what fails or
is interrupted leaves no shard that only looks like one. What a process that was killed left beside it is removed by the
next that writes the same shard: a lock tells whether its writer is alive. Its index is made on the way, so that
``penstock.open`` does not walk through it.
"""

import bz2
import contextlib
import glob
import gzip
import logging
import lzma
import os
import re
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from penstock.base import checks
from penstock.base.urls import scheme_of
from penstock.errors import ConfigError, ConvertFailed, Corrupt, LimitExceeded
from penstock.files import locks
from penstock.files.atomic import remove_abandoned
from penstock.files.handles import identify
from penstock.formats.tar import samples as tar_samples
from penstock.formats.tar.members import MemberList
from penstock.read import saved_chunks
from penstock.read.npy import encode_npy, encode_npz, encode_ten
from penstock.webdataset.encoders import (
    DEFAULT_ENCODERS,
    encode_sample,
    imageencoder,
    make_encoder,
    msgpack_dumps,
    refuse_pickle,
)
from penstock.webdataset.interface import gopen
from penstock.webdataset.samples import Sample
from penstock.webdataset.shards import BUFFER_BYTES, own_opener

__all__ = [
    "ShardWriter",
    "TarWriter",
    "default_handlers",
    "encode_based_on_extension",
    "gopen",
    "imageencoder",
    "make_encoder",
    "mp_dumps",
    "numpy_dumps",
    "numpy_npz_dumps",
    "tenbin_dumps",
    "torch_dumps",
]

log = logging.getLogger(__name__)

# The names that programs know.
default_handlers = DEFAULT_ENCODERS
encode_based_on_extension = encode_sample
numpy_dumps, numpy_npz_dumps, tenbin_dumps = encode_npy, encode_npz, encode_ten
mp_dumps, torch_dumps = msgpack_dumps, refuse_pickle

RECORD = 20 * tarfile.BLOCKSIZE
"""A tar is filled up with zeros to a multiple of this, as it was on tape."""

_PARTIAL = re.compile(r"\.\d+\.partial")

_COMPRESSORS: dict[str, Callable[[Any], Any]] = {
    "gz": lambda stream: gzip.GzipFile("", "wb", fileobj=stream, mtime=0),  # no name, no hour
    "bz2": lambda stream: bz2.BZ2File(stream, "wb"),
    "xz": lambda stream: lzma.LZMAFile(stream, "wb"),  # noqa: SIM115
}


class TarWriter:
    """Writes samples to one tar: a path, or a file object, which stays open.

    encoder:    True encodes values by extension; False takes bytes; or a function of the sample; or a dict of functions
                by extension
    compress:   True or "gz", "bz2", "xz"; False for none; by default it follows from the file name
    mtime:      the time stamp of each member; None for the current time, which makes every shard different
    keep_meta:  also write fields whose names begin with an underscore
    index_dir:  where the index of the tar is saved, as for ``penstock.open``; False for nowhere
    """

    def __init__(
        self,
        fileobj: Any,
        user: str = "bigdata",
        group: str = "bigdata",
        mode: int = 0o444,
        compress: bool | str | None = None,
        encoder: Any = True,
        keep_meta: bool = False,
        mtime: float | None = 0,
        format: Any = None,  # noqa: A002
        index_dir: str | os.PathLike[str] | Literal[False] | None = None,
    ) -> None:
        self.user, self.group, self.mtime = _text("user", user), _text("group", group), mtime
        self.mode, self.keep_meta = checks.whole("mode", mode, most=0o7777), checks.flag("keep_meta", keep_meta)
        if mtime is not None:
            checks.number("mtime", mtime, expected="seconds since 1970")
        index_dir = checks.path_or_off("index_dir", index_dir)
        self.encoder = make_encoder(encoder)
        self.path = os.fspath(fileobj) if isinstance(fileobj, str | os.PathLike) else None
        if self.path is None and not hasattr(fileobj, "write"):
            raise ConfigError(f"fileobj={checks.shown(fileobj)}: expected a path or a file object")
        packing = _compressor(self.path, compress)
        opener = None if self.path is None else own_opener(self.path)
        if opener is not None:  # an address that a function of the caller's opens
            fileobj, self.path = opener(self.path, "wb", BUFFER_BYTES), None
        elif self.path is not None:
            self.path = _placed(self.path, os.getcwd())
        self._closes = opener is not None or self.path is not None
        self._file: Any = fileobj if self.path is None else _create(self.path)
        self._stream: Any = self._file if packing is None else _COMPRESSORS[packing](self._file)
        self._packs = packing is not None
        self._index_folder = None if self._packs or self.path is None else saved_chunks.folder_of(index_dir)
        self._members = MemberList()
        self._written = 0
        self._open = True
        self._warned = False

    def write(self, sample: Sample) -> int:
        """Write one sample: its fields become members, sorted by name. Returns the number of bytes of the fields."""
        if not self._open:
            raise ConfigError(f"{self.path or 'the tar'} was closed")
        encoded = self.encoder(sample)
        if "__key__" not in encoded:
            raise ConfigError(f"a sample needs a __key__; this one has {', '.join(map(repr, sample))}")
        names = sorted(name for name in encoded if name != "__key__" and (self.keep_meta or not name.startswith("_")))
        contents = [_content(name, encoded[name]) for name in names]  # all, before any is written
        self._check_key(encoded["__key__"])
        for name, content in zip(names, contents, strict=True):
            self._write_member(f"{encoded['__key__']}.{name}", content)
        return sum(map(len, contents))

    def close(self) -> None:
        """Finish the tar; it now appears under its name."""
        if not self._open:
            return
        try:
            self._put(bytes(2 * tarfile.BLOCKSIZE))
            self._put(bytes(-self._written % RECORD))
            with self._explain_errors():
                self._finish()
        except BaseException:
            self.abandon()
            raise
        self._open = False
        if self.path is not None:
            self._save_index(self.path)

    def _finish(self) -> None:
        if self._packs:
            self._stream.close()
        if self.path is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(_partial(self.path), self.path)  # while it is locked, so that nobody takes it for left behind
        if self._closes:
            self._file.close()

    def abandon(self) -> None:
        """Give up: remove what was written so far, and create no file."""
        if self._open and self._closes:
            for each in (self._stream, self._file):
                with contextlib.suppress(OSError, ValueError):  # where the disk is full, what is buffered cannot go
                    each.close()
        if self._open and self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_partial(self.path))
        self._open = False

    def __enter__(self) -> "TarWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def _write_member(self, name: str, content: bytes | memoryview) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), self.mode
        member.uname, member.gname = self.user, self.group
        member.mtime = time.time() if self.mtime is None else self.mtime
        # Plain headers, with an extra one only for names and sizes that do not fit.
        self._put(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        if self._index_folder is not None:
            self._members.add(name.encode("utf-8", "surrogateescape"), self._written, len(content))
        self._put(content)
        self._put(bytes(-len(content) % tarfile.BLOCKSIZE))

    def _put(self, data: bytes | memoryview) -> None:
        with self._explain_errors():
            self._stream.write(data)
        self._written += len(data)

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn an error of the system into one of penstock's."""
        try:
            yield
        except OSError as error:
            raise ConvertFailed(
                f"{self.path or 'the tar'}: writing failed after {self._written:,} bytes ({error.strerror}, errno "
                f"{error.errno}); finished shards are kept. Free some space, and write it again"
            ) from error

    def _save_index(self, path: str) -> None:
        if self._index_folder is None:
            return
        with contextlib.suppress(Corrupt, LimitExceeded):  # opening the shard reports it
            tar_samples.save(self._index_folder, identify(path), tar_samples.group(self._members.table(path)))

    def _check_key(self, key: str) -> None:
        if "." in key.rpartition("/")[2] and not self._warned:
            self._warned = True
            warnings.warn(
                f"key {key!r}: a sample's name ends at its first dot, so that readers will take the rest for a part of "
                f"the field's name; use another character",
                stacklevel=3,
            )


class ShardWriter:
    """Writes samples to shards of at most ``maxcount`` samples and about ``maxsize`` bytes: ``"train-%06d.tar"``.

    post:         a function that is called with the name of each finished shard
    start_shard:  the first number
    opener:       a function from a shard's name to a file object
    """

    def __init__(
        self,
        pattern: str,
        maxcount: int = 100000,
        maxsize: float = 3e9,
        post: Callable[[str], Any] | None = None,
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], Any] | None = None,
        **options: Any,
    ) -> None:
        start_shard = checks.whole("start_shard", start_shard)
        maxcount, maxsize = _limit("maxcount", maxcount), _limit("maxsize", maxsize)
        for name, function in (("post", post), ("opener", opener)):
            if function is not None:
                checks.function(name, function)
        try:
            self.fname = _text("pattern", pattern) % start_shard
        except (TypeError, ValueError):
            raise ConfigError(f"{pattern!r}: expected a place for the shard's number, as in 'train-%06d.tar'") from None
        self._folder = os.getcwd()  # the program may leave it before the last shard
        self.pattern, self.maxcount, self.maxsize = pattern, maxcount, maxsize
        self.post, self.opener, self.options = post, opener, options
        self.shard, self.total, self.count, self.size = start_shard, 0, 0, 0
        self.tarstream: TarWriter | None = None

    def write(self, sample: Sample) -> None:
        """Write one sample, to a new shard if this one is full."""
        if self.tarstream is None or self.count >= self.maxcount or self.size >= self.maxsize:
            self.next_stream()
        assert self.tarstream is not None
        self.size += self.tarstream.write(sample)
        self.count += 1
        self.total += 1

    def next_stream(self) -> None:
        """Finish this shard and start the next."""
        self.finish()
        self.fname = self.pattern % self.shard
        log.info("writing %s, after %d samples", self.fname, self.total)
        self.shard += 1
        self.count = self.size = 0
        goal = self.opener(self.fname) if self.opener else _placed(self.fname, self._folder)
        self.tarstream = TarWriter(goal, **self.options)

    def finish(self) -> None:
        """Finish this shard."""
        if self.tarstream is not None:
            self.tarstream.close()
            self.tarstream = None
            if self.post is not None:
                self.post(self.fname)

    def close(self) -> None:
        """Finish the last shard."""
        self.finish()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        elif self.tarstream is not None:  # the shard at hand is not whole
            self.tarstream.abandon()
            self.tarstream = None


def _content(name: str, value: Any) -> bytes | memoryview:
    if isinstance(value, str):
        value = value.encode("utf-8")
    if isinstance(value, memoryview):
        return value.cast("B")
    if not isinstance(value, bytes | bytearray):
        raise ConfigError(f"field {name!r}: expected bytes after encoding, got {type(value).__name__}")
    return bytes(value)


def _text(argument: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ConfigError(f"{argument}={checks.shown(value)}: expected a text")


def _limit(argument: str, value: Any) -> Any:
    """How much a shard may hold; infinity for no limit."""
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(f"{argument}={checks.shown(value)}: expected a number above 0")


def _placed(path: str, folder: str) -> str:
    """A path of files in a folder; addresses and commands as they are."""
    return path if scheme_of(path) or path.startswith("pipe:") else os.path.join(folder, path)


def _compressor(path: str | None, asked: bool | str | None) -> str | None:
    if asked is False:
        return None
    if asked is True:
        return "gz"
    if asked is None:
        return next((kind for kind in _COMPRESSORS if path is not None and path.endswith(kind)), None)
    if not isinstance(asked, str) or asked not in _COMPRESSORS:
        raise ConfigError(f"compress={asked!r}: expected True, False, {', '.join(map(repr, _COMPRESSORS))}")
    return asked


def _partial(path: str) -> str:
    return f"{path}.{os.getpid()}.partial"


def _remove_left_behind(path: str) -> None:
    """Remove what writers of this shard left behind when they were killed."""
    found = glob.glob(f"{glob.escape(path)}.*.partial")
    remove_abandoned(each for each in found if _PARTIAL.fullmatch(each[len(path) :]))


def _create(path: str) -> Any:
    if path.startswith("pipe:"):
        raise ConfigError(f"{path!r}: commands are not run; open the pipe in your own program and pass the file object")
    try:
        _remove_left_behind(path)
        file = open(_partial(path), "wb")  # noqa: SIM115
        locks.try_lock(file.fileno())
        return file
    except OSError as error:
        raise ConvertFailed(f"{path}: cannot be written ({error.strerror}, errno {error.errno})") from None
