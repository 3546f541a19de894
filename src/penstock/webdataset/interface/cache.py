"""The names of ``webdataset.cache``: whole copies of shards in a folder, under the names of their addresses.

``WebDataset(cache_dir=…)`` keeps copies too, of one address and version each, shared by processes and bounded.
"""

import logging
import os
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

from penstock.base.urls import shown_name
from penstock.errors import ConfigError, Corrupt
from penstock.files.compression import name_compression
from penstock.files.retry import open_for_parser
from penstock.webdataset.handlers import Handler, reraise_exception
from penstock.webdataset.interface.gopen import gopen
from penstock.webdataset.shards import local_path

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
_BY_PATH = frozenset({"", "file", "http", "https", "ftp", "ftps", "gs", "s3", "ais"})


def islocal(url: str) -> bool:
    """Whether it is a file here."""
    return urllib.parse.urlparse(url).scheme in ("", "file")


def magic_filetype(fname: str) -> str:
    """What the first bytes of a file say that it is."""
    with open_for_parser(fname) as file:
        header = file.read(512)
    packed = name_compression(header)
    if packed:
        return f"{fname}: {packed} compressed data"
    return f"{fname}: {'POSIX tar archive' if header[257:262] == b'ustar' else 'data'}"


get_filetype = magic_filetype


def check_tar_format(fname: str) -> bool:
    """Whether a file begins as a tar, or as a compressed one."""
    return any(word in magic_filetype(fname) for word in ("tar archive", "compressed"))


def pipe_cleaner(spec: str) -> str:
    """The address that a command after ``pipe:`` names; anything else as it is."""
    words = spec[5:].split() if spec.startswith("pipe:") else []
    return next((word for word in words if re.match(r"(https?|hdfs|gs|ais|s3):", word)), spec)


def url_to_cache_name(url: str, ndir: int = 0) -> str:
    """The last part of an address, with ``ndir`` folders before it."""
    assert isinstance(url, str), f"an address is a text, not {type(url).__name__}"
    parsed = urllib.parse.urlparse(url)
    if parsed.scheme not in _BY_PATH:
        return urllib.parse.quote(url, safe="_+{}*,-")[-128:]
    return "/".join(parsed.path.lstrip("/").split("/")[-1 - ndir :])


class LRUCleanup:
    """Removes the oldest files of a folder when it holds more than ``cache_size`` bytes."""

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_size: float = 1e12,
        keyfn: Callable[[str], float] = os.path.getctime,
        verbose: bool = False,
        interval: float | None = 30,
    ) -> None:
        self.cache_dir, self.cache_size, self.keyfn = cache_dir, cache_size, keyfn
        self.verbose, self.interval = verbose, interval
        self.last_run = -1e12

    def set_cache_dir(self, cache_dir: str | os.PathLike[str]) -> None:
        """Another folder."""
        self.cache_dir = cache_dir

    def cleanup(self) -> None:
        """Remove what is too much, unless that was done less than ``interval`` seconds ago."""
        if self.cache_dir is None or (self.interval is not None and monotonic() - self.last_run < self.interval):
            return
        self.last_run = monotonic()
        found = []
        for folder, _, names in os.walk(self.cache_dir):
            for path in (os.path.join(folder, name) for name in names):
                with suppress(FileNotFoundError):  # another process removed it
                    found.append((self.keyfn(path), os.path.getsize(path), path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.cache_size:
                return
            with suppress(FileNotFoundError):
                os.remove(path)
            total -= size


def download(url: str, dest: str, chunk_size: int = PIECE_BYTES, verbose: bool = False) -> None:
    """Copy a file to a path, where it appears when it is whole."""
    partial = f"{dest}.temp{os.getpid()}"
    try:
        with gopen(url) as stream, open(partial, "wb") as file:
            while piece := stream.read(chunk_size):
                file.write(piece)
        os.replace(partial, dest)
    finally:
        with suppress(FileNotFoundError):
            os.remove(partial)


def _url_of(shard: Any) -> str:
    return str(shard["url"] if isinstance(shard, dict) else shard)


def _opened(
    shards: Iterable[Any], open_shard: Callable[[str], dict[str, Any]], handler: Handler
) -> Iterator[dict[str, Any]]:
    """Each shard with its stream; where opening fails, the handler decides."""
    for shard in shards:
        about = shard if isinstance(shard, dict) else {}
        try:
            found = {**about, "url": _url_of(shard), **open_shard(_url_of(shard))}
        except Exception as error:
            if handler(error):
                continue
            return
        yield found


class StreamingOpen:
    """Shards -> shards with a ``stream``, and a ``local_path`` if they are files here."""

    def __init__(self, verbose: bool = False, handler: Handler = reraise_exception) -> None:
        self.verbose, self.handler = verbose, handler

    def __call__(self, urls: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Open one after another."""
        return _opened(urls, self._open, self.handler)

    def _open(self, url: str) -> dict[str, Any]:
        path = {"local_path": local_path({"url": url})} if islocal(url) else {}
        return {"stream": gopen(url), **path}


class FileCache:
    """Shards -> shards with the ``stream`` and ``local_path`` of a copy in a folder."""

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        url_to_name: Callable[[str], str] = url_to_cache_name,
        verbose: bool = False,
        validator: Callable[[str], bool] | None = check_tar_format,
        handler: Handler = reraise_exception,
        cache_size: float = -1,
        cache_cleanup_interval: float = 30,
    ) -> None:
        self.cache_dir = "./_cache" if cache_dir is None else os.fspath(cache_dir)
        self.url_to_name, self.validator, self.handler, self.verbose = url_to_name, validator, handler, verbose
        self.cleaner = None
        if cache_size > 0:
            self.cleaner = LRUCleanup(self.cache_dir, cache_size, interval=cache_cleanup_interval)

    def get_file(self, url: str) -> str:
        """The path of a file here, or of its copy, which is made if there is none."""
        if islocal(url):
            return local_path({"url": url}) or url
        name = self.url_to_name(url)
        path = os.path.join(self.cache_dir, name)
        if not name or os.path.relpath(path, self.cache_dir).startswith(os.pardir):
            raise ConfigError(f"{url}: url_to_name gives {name!r}, which is not a file name in the folder of copies")
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if self.cleaner is not None:
                self.cleaner.cleanup()
            if self.verbose:
                log.warning("downloading %s to %s", shown_name(url), path)
            download(url, path)
            self._check(url, path)
        return path

    def _check(self, url: str, path: str) -> None:
        if self.validator is not None and not self.validator(path):
            found = magic_filetype(path)
            os.remove(path)
            raise Corrupt(f"{url}: is not a tar ({found}); the copy was removed")

    def __call__(self, urls: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Open one after another."""
        return _opened(urls, self._open, self.handler)

    def _open(self, url: str) -> dict[str, Any]:
        path = self.get_file(url)
        return {"stream": gopen(path), "local_path": path}
