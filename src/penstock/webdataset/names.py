"""Which shards are meant: patterns, lists, file objects -> one dict a shard.

A shard is passed on as ``{"url": …}``, so that a caller's own splitters can tell them apart; a file object as
``{"url": its name, "stream": it}``.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from penstock.errors import ConfigError, Unavailable
from penstock.webdataset.place import here

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
    return {"url": url, "stream": Once(None, url)} if url == "-" else {"url": url}


def _stream(stream: Any, number: int) -> Shard:
    named = getattr(stream, "name", None)
    name = named if isinstance(named, str) else f"<stream {number}>"
    return {"url": name, "stream": Once(stream, name)}


def check_scheme(url: str) -> None:
    """Refuse what would start a program."""
    if url.startswith("pipe:"):
        raise ConfigError(
            f"{url!r:.100}: the scheme pipe: would run a command, which is never done here; open the pipe in your own "
            f"program and pass the file object"
        )
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
        found += islice(expand_braces(_with_environment(part)), MAX_SHARDS + 1 - len(found))
        if len(found) > MAX_SHARDS:
            raise ConfigError(f"{text!r:.100}: stands for more than {MAX_SHARDS:,} shards")
    return found


def _with_environment(text: str) -> str:
    def value(found: re.Match[str]) -> str:
        name = f"WDS_{found[1]}"
        if name not in os.environ:
            raise ConfigError(f"{text!r:.100}: ${{{found[1]}}} stands for the environment's {name}, which is not set")
        return os.environ[name]

    for _ in range(10):  # a value may name another variable
        replaced = re.sub(r"\$\{(\w+)\}", value, text)
        if replaced == text:
            break
        text = replaced
    return text


_NUMBERS = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.(-?[0-9]+))?\Z")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?[0-9]+))?\Z")


def expand_braces(pattern: str) -> Iterator[str]:
    """``a{1,2}b{08..10}`` -> every combination, the last brace changing fastest, as a shell does."""
    inside = _first_braces(pattern)
    if inside is None:
        yield _unescaped(pattern)
        return
    begin, commas, end = inside
    before = _unescaped(pattern[:begin])
    for middle in _alternatives(pattern, begin, commas, end):
        for after in expand_braces(pattern[end + 1 :]):
            yield before + middle + after


def _alternatives(pattern: str, begin: int, commas: list[int], end: int) -> Iterator[str]:
    body = pattern[begin + 1 : end]
    if commas:
        for left, right in zip([begin, *commas], [*commas, end], strict=True):
            yield from expand_braces(pattern[left + 1 : right])
    elif found := _NUMBERS.match(body):
        first, last, step = found.groups()
        padded = any(re.match(r"-?0[0-9]", each) for each in (first, last))
        width = max(len(first), len(last)) if padded else 0
        yield from (f"{number:0{width}d}" for number in _steps(int(first), int(last), step))
    elif found := _LETTERS.match(body):
        first, last, step = found.groups()
        letters = [at for at in _steps(ord(first), ord(last), None) if chr(at).isalpha()]
        yield from (chr(at) for at in letters[:: abs(int(step or 1)) or 1])
    else:  # neither a choice nor a range: plain text
        yield from (f"{{{each}}}" for each in expand_braces(body))


def _steps(first: int, last: int, step: str | None) -> range:
    size = abs(int(step or 1)) or 1
    return range(first, last + 1, size) if first <= last else range(first, last - 1, -size)


def _first_braces(pattern: str) -> tuple[int, list[int], int] | None:
    """Where the first brace opens, the commas directly inside it, and where it closes."""
    depth, begin = 0, -1
    commas: list[int] = []
    for found in re.finditer(r"\\.|[{},]", pattern, re.DOTALL):
        at, mark = found.start(), found[0]
        if mark == "{":
            begin = at if depth == 0 else begin
            depth += 1
        elif mark == "}":
            depth -= 1
            if depth == 0:
                return begin, commas, at
            if depth < 0:
                break
        elif mark == "," and depth == 1:
            commas.append(at)
    if depth:
        raise ConfigError(f"{pattern!r:.100}: a brace without its partner; write \\{{ and \\}} for plain ones")
    return None


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
