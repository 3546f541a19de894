"""From the name of a shard to a file object that gives its bytes."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from penstock.errors import ConfigError, Missing, Unavailable
from penstock.fileio import Files
from penstock.packing import Readable
from penstock.urls import is_remote, shown
from penstock.webdataset.faults import MissingShard
from penstock.webdataset.names import Once, Shard, check_scheme, scheme_of

BUFFER_BYTES = 256 * 1024

OPENERS: dict[str, Callable[[str], contextlib.AbstractContextManager[Readable]]] = {}
"""How to open what is neither a file nor on a server, by scheme. Nothing in here may start a program."""


@contextlib.contextmanager
def opened(shard: Shard, files: Files) -> Iterator[Readable]:
    """The bytes of a shard, for as long as they are read; files are closed behind it, the caller's own are not."""
    if "stream" in shard:
        stream = shard["stream"]
        yield stream.take() if isinstance(stream, Once) else stream
        return
    url = shard["url"]
    check_scheme(url)
    scheme = scheme_of(url)
    if scheme in OPENERS:
        with OPENERS[scheme](url) as stream:
            yield stream
        return
    if is_remote(url):
        with _from_server(url, files) as stream:
            yield stream
        return
    path = local_path(shard)
    if path is None:
        raise ConfigError(
            f"{shown(url)}: shards of scheme {scheme}: are not opened here; fetch them first, or open them in your own "
            f"program and pass the file objects"
        )
    with _open_file(path) as stream:
        yield stream


@contextlib.contextmanager
def _from_server(url: str, files: Files) -> Iterator[Readable]:
    try:
        with files.stream(files.remote.admit(url)) as stream:
            yield stream
    except Missing as error:
        if type(error) is not Missing:
            raise
        raise MissingShard(str(error)) from error


def local_path(shard: Shard) -> str | None:
    """The path of a shard that is a file here; None for any other."""
    url: str = shard["url"]
    if "stream" in shard:
        return None
    scheme = scheme_of(url)
    if scheme == "file":
        rest = url.partition(":")[2]
        return rest.removeprefix("//localhost").removeprefix("//") or None
    return None if scheme and not os.path.exists(url) else url


def _open_file(path: str) -> Any:
    try:
        return open(path, "rb", buffering=BUFFER_BYTES)
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(path))
        raise MissingShard(f"{path}: no such file (looked in {folder}); check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the shards in it") from None
    except OSError as error:
        raise Unavailable(f"{path}: cannot be opened ({error.strerror}, errno {error.errno})") from None
