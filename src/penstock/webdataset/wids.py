"""Tar shards by random access, with the names of the ``wids`` package: ``ShardListDataset`` and its samplers.

A sample is a dict of its fields by extension, with the dot (``.jpg``), and of ``__key__``, ``__index__``,
``__shard__``, ``__shardindex__`` and ``__dataset__``. Nothing is unpickled. ``penstock.open`` gives the same shards to
``Loader``, in batches and within a budget.
"""

import hashlib
import io
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.base import checks
from penstock.base.file_id import FileId
from penstock.base.text_column import decoded
from penstock.base.urls import is_remote
from penstock.errors import ConfigError, Corrupt, DecodeFailed, OutOfRange
from penstock.files.files import Files, remote_files
from penstock.files.handles import Handle, identify
from penstock.formats.tar.samples import split_name
from penstock.formats.tar.walk import walk
from penstock.read import pictures
from penstock.webdataset import shard_index as wids_specs
from penstock.webdataset.decoders import basichandlers, gzfilter
from penstock.webdataset.shard_index import check_shards, load_dsdesc_and_resolve, urldir
from penstock.webdataset.wids_samplers import (
    ChunkedSampler,
    DistributedChunkedSampler,
    ShardedSampler,
    ShardListSampler,
)

__all__ = [
    "ChunkedSampler",
    "DistributedChunkedSampler",
    "IndexedTarSamples",
    "LRUShards",
    "ShardListDataset",
    "ShardListSampler",
    "ShardedSampler",
    "default_decoder",
    "wids",
    "wids_specs",
]

wids = sys.modules[__name__]
"""The package of this name has a module of this name."""

T = TypeVar("T")
Sample = dict[str, Any]
Transformation = Callable[[Any], Any]

_DECODED = frozenset({"txt", "text", "cls", "cls2", "json", "npy", "mp", "pt", "pth", "pickle", "pkl"})
PIECE_BYTES = 1 << 20

_PICTURES = frozenset({"jpg", "png", "ppm", "pgm", "pbm", "pnm"})


class IndexedTarSamples:
    """The samples of one shard, by their number."""

    def __init__(
        self,
        *,
        path: str,
        md5sum: str | None = None,
        expected_size: int | None = None,
        files: Files | None = None,
        **ignored: Any,
    ) -> None:
        self.path = path
        self._files = Files() if files is None else files
        self._file = _found(path, self._files)
        with self._files.lend(self._file) as handle:
            self._members = walk(handle)
            found = md5sum and _md5(handle)
        if found != md5sum:
            raise Corrupt(f"{path}: its md5 is {found}, and {md5sum} was expected; fetch it again")
        self._samples = list(_group(self._members.names))
        if expected_size is not None and expected_size != len(self):
            raise Corrupt(f"{path}: has {len(self):,} samples, and {expected_size:,} were expected")

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> Sample:
        if not -len(self) <= number < len(self):
            raise Corrupt(
                f"{self.path}: sample {number:,} is asked for, and there are {len(self):,}; the list of shards "
                f"(nsamples) does not fit the file"
            )
        key, fields = self._samples[number]
        sample: Sample = {f".{name}": io.BytesIO(self._read(member)) for name, member in fields}
        sample["__key__"] = key
        return sample

    def _read(self, member: int) -> bytes:
        content = np.empty(int(self._members.lengths[member]), np.uint8)
        with self._files.lend(self._file) as handle:
            handle.read_into(int(self._members.offsets[member]), content)
        return content.tobytes()

    def close(self) -> None:
        """Close the file."""
        self._files.close()


def _md5(handle: Handle) -> str:
    digest, piece = hashlib.md5(usedforsecurity=False), np.empty(PIECE_BYTES, np.uint8)
    for offset in range(0, handle.file.size, PIECE_BYTES):
        part = piece[: min(PIECE_BYTES, handle.file.size - offset)]
        handle.read_into(offset, part)
        digest.update(part.data)
    return digest.hexdigest()


def _found(path: str, files: Files) -> FileId:
    if not is_remote(path):
        return identify(path.removeprefix("file://"))
    file = files.find_copied(files.remote.admit(path))
    return files.identify(files.remote.admit(path)) if file is None else file


def _group(names: Any) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Key, and fields with the numbers of their members, of samples whose members follow one another."""
    key, fields = None, list[tuple[str, int]]()
    for number, name in enumerate(names):
        found = split_name(name.encode("utf-8", "surrogateescape"))
        if found is None:
            continue
        if fields and decoded(found[0]) != key:
            yield str(key), fields
            fields = []
        key = decoded(found[0])
        fields.append((decoded(found[1]), number))
    if fields:
        yield str(key), fields


class LRUCache(OrderedDict[str, Any]):
    """The most recently used values, at most ``capacity`` of them."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def use(self, name: str, make: Callable[[], Any]) -> Any:
        """The value of that name, which is made if it is not there."""
        if name not in self:
            self[name] = make()
            while len(self) > self.capacity:
                self.popitem(last=False)
        self.move_to_end(name)
        return self[name]


class LRUShards:
    """The tables of the shards that were used last."""

    def __init__(self, lru_size: int, *, files: Files | None = None, **ignored: Any) -> None:
        self.lru = LRUCache(lru_size)
        self.accesses = self.misses = 0
        self._files = Files() if files is None else files

    def __len__(self) -> int:
        return len(self.lru)

    def get_shard(self, url: str) -> IndexedTarSamples:
        """A shard, which is indexed if it is not among them."""
        self.accesses += 1
        self.misses += url not in self.lru
        found: IndexedTarSamples = self.lru.use(url, lambda: IndexedTarSamples(path=url, files=self._files))
        return found

    def clear(self) -> None:
        """Forget all, and close the files."""
        self.lru.clear()
        self._files.close()


class ShardListDataset(Generic[T]):
    """The samples of shards by their number over all of them.

    shards:    the path or address of an index, or a list of ``{"url": …, "nsamples": …}``
    cache_dir: a folder for whole copies of shards on servers; without one they are read in ranges
    cache_size: bytes that this folder may hold
    lru_size:  shards whose tables are kept in memory
    transformations: functions of a sample, one after another; ``"PIL"`` and ``"numpy"`` stand for decoders
    base:      what the addresses of an index are relative to, instead of its own folder
    options:   entries that replace those of an index
    """

    def __init__(
        self,
        shards: Any,
        *,
        cache_size: float = 1e12,
        cache_dir: str | os.PathLike[str] | None = None,
        lru_size: int = 10,
        dataset_name: str | None = None,
        localname: Any = None,
        transformations: Any = "PIL",
        keep: bool = False,
        base: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.base, self.spec = base, dict(options or {})
        if isinstance(shards, str | os.PathLike) or hasattr(shards, "read"):
            source = os.fspath(shards) if isinstance(shards, os.PathLike) else shards
            self.base = urldir(source) if base is None and isinstance(source, str) else base
            self.spec = load_dsdesc_and_resolve(source, options=options, base=self.base)
            shards = self.spec["shardlist"]
        self.shards = check_shards(shards)
        self.dataset_name = self.spec.get("name") or dataset_name
        self.lengths: list[int] = [each["nsamples"] for each in self.shards]
        self.cum_lengths = np.array([*accumulate(self.lengths)], np.int64)
        self.total_length = sum(self.lengths)
        self.cache_dir = cache_dir
        self.transformations = interpret_transformations(transformations)
        files = remote_files(cache_dir, None if cache_dir is None else int(cache_size), None)
        self.cache = LRUShards(checks.whole("lru_size", lru_size, least=1), files=files)

    def __len__(self) -> int:
        return self.total_length

    def __getitem__(self, index: int) -> Any:
        shard, inner, entry = self.get_shard(index)
        sample = shard[inner]
        about = {"__dataset__": entry.get("dataset"), "__index__": index, "__shard__": entry["url"]}
        sample.update(about, __shardindex__=inner)
        for transform in self.transformations:
            sample = transform(sample)
        return sample

    def get_shard(self, index: int) -> tuple[IndexedTarSamples, int, dict[str, Any]]:
        """The shard of a sample, the sample's number in it, and the shard's entry in the list."""
        number = checks.whole("index", index, least=None)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise OutOfRange(f"index={index}: there are {len(self):,} samples")
        which = int(np.searchsorted(self.cum_lengths, number, side="right"))
        inner = number - (int(self.cum_lengths[which - 1]) if which else 0)
        entry = self.shards[which]
        return self.cache.get_shard(entry["url"]), inner, entry

    def add_transform(self, transform: Transformation) -> "ShardListDataset[T]":
        """Add a function that is applied to each sample."""
        self.transformations.append(transform)
        return self

    def get_stats(self) -> tuple[int, int]:
        """How often a shard was asked for, and how often it had to be indexed."""
        return self.cache.accesses, self.cache.misses

    def check_cache_misses(self) -> None:
        """Warn if shards are indexed again and again."""
        accesses, misses = self.get_stats()
        if accesses > 100 and misses > 0.3 * accesses:
            warnings.warn(
                f"{misses:,} of {accesses:,} samples needed a shard to be indexed anew; use a larger lru_size=, or a "
                f"sampler that goes shard by shard",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the files."""
        self.cache.clear()


def interpret_transformations(transformations: Any) -> list[Transformation]:
    """Functions of a sample; ``"PIL"`` and ``"numpy"`` stand for decoders."""
    given = transformations if isinstance(transformations, list | tuple) else [transformations]
    return [_transformation(each) for each in given]


def _transformation(given: Any) -> Transformation:
    if isinstance(given, str):
        return partial(default_decoder, format=checks.one_of("transformations", given, ("PIL", "numpy")))
    if not callable(given):
        raise ConfigError(f"transformations: {given!r:.100} is no function of a sample")
    checked: Transformation = given
    return checked


def default_decoder(sample: Sample, format: str = "PIL") -> Sample:  # noqa: A002
    """A sample with text, numbers, JSON, arrays and pictures in the place of streams; other fields stay streams."""
    return {name: value if name.startswith("__") else _decoded(name, value, format) for name, value in sample.items()}


def _decoded(name: str, value: Any, form: str) -> Any:
    data = value if isinstance(value, bytes) else value.getvalue()
    plain = name
    unpacked = gzfilter(name, data) if name.count(".") > 1 else None
    if unpacked is not None:
        plain, data = unpacked.key, unpacked.data
    extension = plain.rpartition(".")[2].lower()
    try:
        if extension in _PICTURES:
            return _picture(data, form)
        if extension in _DECODED:
            return basichandlers(f".{'pth' if extension == 'pt' else extension}", data)
    except (ValueError, OSError) as error:
        raise DecodeFailed(f"field {name!r}: {error}") from error
    return io.BytesIO(data)


def _picture(data: bytes, form: str) -> Any:
    picture = pictures.decode_with_pillow(data, None)
    return picture if form.lower() == "pil" else np.asarray(picture)
