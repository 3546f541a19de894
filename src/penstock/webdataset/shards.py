"""Which shards are meant (patterns, lists, file objects), and the bytes of each.

A shard is a dict ``{"url": …}``, so that a caller's own splitters can tell shards apart. One with a relative path also
has the ``"folder"`` that it was relative to when it was named; a file object is ``{"url": its name, "stream": it}``.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from penstock.base.file_id import FileId
from penstock.base.urls import check_scheme as refuse_scheme
from penstock.base.urls import is_remote, shown_name
from penstock.errors import ConfigError, Unavailable
from penstock.files.compression import ByteSource
from penstock.files.files import Files
from penstock.files.handles import identify
from penstock.files.retry import open_regular
from penstock.formats.paths import expand_braces
from penstock.webdataset.handlers import MissingShard
from penstock.webdataset.run import here

Shard = dict[str, Any]

MAX_SHARDS = 1_000_000
"""More than this a pattern cannot mean: the list alone would take hundreds of megabytes."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least: C: is a drive


def expand(urls: Any) -> list[Shard]:
    """Every way of naming shards -> the shards, in the order they are named."""
    shards = list(_expand(urls))
    if not shards:
        raise ConfigError("no shards: the list is empty; name one at least, such as 'train-{000..017}.tar'")
    for shard in shards:
        if "stream" not in shard:
            check_scheme(shard["url"])
    return shards


def _expand(urls: Any) -> Iterator[Shard]:
    if isinstance(urls, str):
        yield from map(_named, expand_urls(urls))
    elif isinstance(urls, os.PathLike):
        yield _named(os.fspath(urls))
    elif hasattr(urls, "read"):
        yield _stream(urls, 0)
    elif isinstance(urls, dict) or not isinstance(urls, Iterable):
        raise ConfigError(
            f"urls={urls!r:.100}: expected a pattern such as 'train-{{000..017}}.tar', paths, or a file object"
        )
    else:
        # The names in a list are taken as they are: they may hold braces.
        for number, each in enumerate(urls):
            if isinstance(each, str | os.PathLike):
                yield _named(os.fspath(each))
            elif hasattr(each, "read"):
                yield _stream(each, number)
            elif isinstance(each, dict) and "url" in each:
                yield dict(each)
            else:
                raise ConfigError(f"urls[{number}]={each!r:.100}: expected a path or a file object")


class Once:
    """A file object, which gives its bytes once; a second time it would seem to be empty."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self._taken = False

    def __repr__(self) -> str:
        return f"<file object {self._name}>"

    def take(self) -> Any:
        """The file object, the first time."""
        if self._taken:
            raise Unavailable(
                f"{self._name}: was read already, and a file object gives its bytes once; pass a path, or a new one"
            )
        self._taken = True
        return _standard_input() if self._stream is None else self._stream


def _standard_input() -> Any:
    if here().in_worker:
        raise ConfigError("'-' is standard input, which worker processes do not have: use num_workers=0")
    return sys.stdin.buffer


def _named(url: str) -> Shard:
    if url == "-":
        return {"url": url, "stream": Once(None, url)}
    is_absolute = scheme_of(url) or os.path.isabs(url)
    return {"url": url} if is_absolute else {"url": url, "folder": os.getcwd()}


def _stream(stream: Any, number: int) -> Shard:
    named = getattr(stream, "name", None)
    name = named if isinstance(named, str) else f"<stream {number}>"
    return {"url": name, "stream": Once(stream, name)}


def check_scheme(url: str) -> None:
    """Refuse what would start a program, unless the caller opens such addresses."""
    if url[:5].lower() == "pipe:" and own_opener(url) is None:
        refuse_scheme(url)
    if url.endswith("/"):
        raise ConfigError(f"{url!r:.100}: is a folder; name the shards in it, such as '{url}train-{{000..017}}.tar'")


def scheme_of(url: str) -> str:
    """``http`` of ``http://…``; empty for a path."""
    found = _SCHEME.match(url)
    return found[1].lower() if found else ""


def expand_urls(text: str) -> list[str]:
    """``a-{0..3}.tar::b.tar`` -> five names; ``${NAME}`` stands for what the environment has as ``WDS_NAME``."""
    found: list[str] = []
    for part in text.split("::"):
        found += islice(expand_braces(with_environment(part)), MAX_SHARDS + 1 - len(found))
        if len(found) > MAX_SHARDS:
            raise ConfigError(f"{text!r:.100}: stands for more than {MAX_SHARDS:,} shards")
    return found


def with_environment(text: str) -> str:
    """A pattern with what the environment has for each ``${NAME}``."""

    def value(found: re.Match[str]) -> str:
        name = f"WDS_{found[1]}"
        if name not in os.environ:
            raise ConfigError(f"{text!r:.100}: for ${{{found[1]}}}, set the environment variable {name}")
        return os.environ[name]

    for _ in range(10):  # a value may name another variable
        replaced = re.sub(r"\$\{(\w+)\}", value, text)
        if replaced == text:
            break
        text = replaced
    return text


BUFFER_BYTES = 256 * 1024

Opener = Callable[..., Any]
"""Takes an address, "rb" or "wb", and a buffer's size; returns a file object."""

OPENERS: dict[str, Opener] = {}
"""How to open addresses, by scheme: programs know it as ``gopen_schemes``, and add functions of their own."""

BUILT_IN: set[Opener] = set()
"""Those of them that are not the caller's."""


def own_opener(url: str) -> Opener | None:
    """The function of the caller's that opens such addresses; None if there is none."""
    opener = OPENERS.get(scheme_of(url))
    return None if opener in BUILT_IN else opener


@contextlib.contextmanager
def opened(shard: Shard, files: Files) -> Iterator[ByteSource]:
    """The bytes of a shard, for as long as they are read; files are closed behind it, the caller's own are not."""
    if "stream" in shard:
        stream = shard["stream"]
        yield stream.take() if isinstance(stream, Once) else stream
        return
    url = shard["url"]
    check_scheme(url)
    opener = own_opener(url)
    if opener is not None:
        with contextlib.closing(opener(url, "rb", BUFFER_BYTES)) as stream:
            yield stream
        return
    if is_remote(url):
        with files.stream(files.remote.admit(url)) as stream:
            yield stream
        return
    path = local_path(shard)
    if path is None:
        raise ConfigError(
            f"{shown_name(url)}: shards of scheme {scheme_of(url)}: are not opened here; fetch them first, or open "
            f"them in your own program and pass the file objects, or a function: gopen_schemes[{scheme_of(url)!r}] = f"
        )
    with open_file(path) as stream:
        yield stream


def local_path(shard: Shard) -> str | None:
    """The path of a shard that is a file here; None for any other."""
    url: str = shard["url"]
    if "stream" in shard:
        return None
    scheme = scheme_of(url)
    if scheme == "file":
        rest = url.partition(":")[2]
        return rest.removeprefix("//localhost").removeprefix("//") or None
    return None if scheme and not os.path.exists(url) else os.path.join(shard.get("folder", ""), url)


def local_file(shard: Shard, files: Files) -> FileId | None:
    """The file here that holds a shard, or a copy of it; None where there is none, and it is read as a stream."""
    if "stream" in shard or own_opener(shard["url"]) is not None:
        return None
    if is_remote(shard["url"]):
        return files.find_copied(files.remote.admit(shard["url"]))
    path = local_path(shard)
    return identify(path) if path is not None and os.path.isfile(path) else None


def open_file(path: str) -> Any:
    """A file here, to be read in order."""
    try:
        return open(path, "rb", buffering=BUFFER_BYTES, opener=open_regular)
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(path))
        raise MissingShard(f"{path}: no such file (looked in {folder}); check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the shards in it") from None
    except OSError as error:
        way_out = ""
        if os.path.exists(path) and not os.path.isfile(path):  # it is for the caller to say that a writer will come
            way_out = "; open it in your own program and pass the file object"
        raise Unavailable(f"{path}: cannot be opened ({error.strerror}, errno {error.errno}){way_out}") from None
