"""Shard indices, as ``wids`` writes them: JSON with the address and the number of samples of each shard.

    {"wids_version": 1, "shardlist": [{"url": "train-0.tar", "nsamples": 100}, …], "datasets": [{"source_url": …}, …]}

Addresses are relative to ``base``, or to the index. An index is data: it starts no program, and one that comes from a
server names no file of this machine.
"""

import io
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from penstock.base.urls import is_remote, shown_name
from penstock.errors import ConfigError, Corrupt, Unsafe
from penstock.webdataset.interface.gopen import gopen
from penstock.webdataset.shards import scheme_of

ShardEntry = dict[str, Any]

MAX_INDEX_BYTES = 1 << 28
"""A million shards take less."""


def urldir(url: str) -> str:
    """The folder of a path or address."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, os.path.dirname(parts.path), "", ""))


def urlmerge(base: str, url: str) -> str:
    """An address as it is meant where ``base`` is the folder that it is relative to."""
    below, parts = urlsplit(base), urlsplit(url)
    path = parts.path if parts.path.startswith("/") else os.path.normpath(os.path.join(below.path, parts.path))
    return urlunsplit((parts.scheme or below.scheme, parts.netloc or below.netloc, path, parts.query, parts.fragment))


def load_dsdesc_and_resolve(source: Any, *, options: Mapping[str, Any] | None = None, base: str | None = None) -> Any:
    """An index (a path, an address, or an open file) with all its shards in one list, by their whole addresses."""
    found = {**_load(source), **(options or {})}
    if found.get("wids_version") != 1:
        raise Corrupt(f"{_name(source)}: expected an index of wids_version 1, not {found.get('wids_version')!r}")
    base = found.get("base", base)
    shards = _entries(found, base, source)
    for each in shards:
        each.update({name: found[name] for name in ("weight", "name") if name in found and name not in each})
    for part in found.get("datasets", []):
        shards += _part(part, source)
    if not shards:
        raise Corrupt(f"{_name(source)}: the index lists no shards")
    found["shardlist"] = shards
    return found


def _part(part: Mapping[str, Any], source: Any) -> list[ShardEntry]:
    """The shards of another dataset that an index has a part in."""
    address, weight = part.get("source_url"), part.get("weight")
    inner: Mapping[str, Any] = part
    if address is not None:
        _check_reach(address, source)
        inner = _load(address)
        if "source_url" in inner:
            raise Corrupt(f"{_name(address)}: an index within an index refers to a third one; name that one")
    shards = _entries(inner, inner.get("base", urldir(address) if address else None), address or source)
    about = {"weight": weight, "source_url": address, "dataset": inner.get("name")}
    for each in shards:
        each.update({name: value for name, value in about.items() if value is not None and name not in each})
    return shards


def _load(source: Any) -> dict[str, Any]:
    if isinstance(source, str):
        with gopen(source) as stream:
            text = stream.read(MAX_INDEX_BYTES)
    elif hasattr(source, "read"):
        text = source.read(MAX_INDEX_BYTES)
    else:
        raise ConfigError(f"{source!r:.100}: expected the path or address of an index, or an open file")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise Corrupt(f"{_name(source)}: is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise Corrupt(f"{_name(source)}: an index is a JSON object, not {type(found).__name__}")
    return found


def _entries(found: Mapping[str, Any], base: str | None, source: Any) -> list[ShardEntry]:
    shards = check_shards(found.get("shardlist", []), _name(source))
    for each in shards:
        _check_reach(each["url"], source)
        each["url"] = each["url"] if base is None else urlmerge(base, each["url"])
    return shards


def check_shards(shards: Any, where: str = "shards") -> list[ShardEntry]:
    """The entries of a list of shards, if each has an address and a number of samples."""
    if not isinstance(shards, list | tuple):
        raise Corrupt(f"{where}: a list of shards is expected, not {type(shards).__name__}")
    for number, each in enumerate(shards):
        count = each.get("nsamples") if isinstance(each, dict) else None
        if not isinstance(count, int) or isinstance(count, bool) or count < 0 or not isinstance(each.get("url"), str):
            raise Corrupt(f"{where}: shard {number} is {each!r:.100}; expected a dict with a url, and nsamples >= 0")
    return [dict(each) for each in shards]


def _check_reach(url: str, source: Any) -> None:
    """Refuse what an index must not lead to."""
    if url[:5].lower() == "pipe:":
        raise Unsafe(f"{_name(source)}: the index names a command (pipe:…), which is never run; name the file")
    if isinstance(source, str) and is_remote(source) and scheme_of(url) == "file":
        raise Unsafe(f"{_name(source)}: an index on a server names a file of this machine ({url!r:.100}); copy it here")


def _name(source: Any) -> str:
    if isinstance(source, str):
        return shown_name(source)
    return str(getattr(source, "name", "the index")) if isinstance(source, io.IOBase) else "the index"
