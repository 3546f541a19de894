"""What a conversion will do, before it does anything: outputs, tasks, memory. Refuses what cannot fit.

What the output looks like follows from the data, the format and ``memory`` alone. How many tasks run at a time does
not change it, so that one process, four array jobs and a cluster write the same bytes.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, field, replace
from typing import Any

import numpy as np

from penstock.base import policy
from penstock.base.dataclass import dataclass
from penstock.base.machine import cores
from penstock.base.scratch import aligned
from penstock.base.sizes import KiB, MiB, format_size
from penstock.base.spec import Fields, row_bytes
from penstock.base.urls import is_remote
from penstock.conversion import encode, hdf5, rows
from penstock.conversion.compression import MOST_SHARE, compressed_share
from penstock.conversion.cut import SHARD_BYTES, Cut, CutRequest, Overhead, TooLittle, cut_field
from penstock.conversion.ranges import LEAST_RUN_BYTES
from penstock.conversion.source import block_rows, chunk_of, index_bytes, is_in_memory, part_store
from penstock.conversion.values import kind_of_values
from penstock.dataset.dataset import Dataset
from penstock.dataset.memory import MOST_BYTES
from penstock.dataset.store import Store, digest
from penstock.errors import BudgetExceeded, ConfigError
from penstock.read.chunk_files import KEPT_CHUNK_BYTES

SUFFIXES = {
    ".zarr": "zarr", ".npy": "npy", ".h5": "hdf5", ".hdf5": "hdf5", ".tar": "tar", ".parquet": "parquet",
    ".pq": "parquet", ".lmdb": "lmdb", ".mdb": "lmdb",
}  # fmt: skip
COMPRESSIONS = {
    "zarr": ("auto", "zstd", "blosc", "none"), "npy": ("none",), "hdf5": ("none", "zstd", "blosc", "gzip"),
    "tar": ("none",), "parquet": ("zstd",), "lmdb": ("none",),
}  # fmt: skip
"""By format; the first is used where nobody says otherwise. ``auto`` is zstd for fields that it makes much smaller."""

SAMPLE_FORMATS = ("tar", "parquet", "lmdb")
"""Formats whose files hold whole samples."""

NUMBERED = re.compile(r"%0?\d*d")

BASE_BYTES = 40 * MiB
"""Measured: interpreter and libraries 28 MiB; the rest is for tables and what the allocator keeps."""
ARROW_BYTES = 64 * MiB
"""Measured: Arrow's libraries and pools, in each process that uses them."""
ARROW_VALUE_BYTES = 13
"""Measured: what Arrow holds for each value of a row group besides the value: levels, wider integers, pages."""
INDEX_BYTES = {"tar": 128, "parquet": 0, "lmdb": 288}
"""Measured, with a margin: what knowing the place of each value of a file takes when it is read again."""
LMDB_VALUE_BYTES = 8192
"""What LMDB holds for a value until its transaction ends, besides the value: two pages."""
ZARR_BYTES = 16 * MiB
"""Measured: zarr-python, which reads texts."""
WORKER_BYTES = 72 * MiB
"""Estimated: what a process that was started for tasks holds before it has one, and its share of the tracker's."""
LEAST_SHARE = 32 * MiB
"""Processes are started where each task can have this much."""

ROW_CHUNK_BYTES = 2 * KiB
"""From here on, a row that is not compressed is a chunk of its own, whose place and checksum take 20 bytes."""

ALL_FIELDS = ""
"""The name of the cut of formats whose files hold whole samples."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the caller wants of the output."""

    format: str
    compression: str
    rows_per_chunk: int | None = None
    shard_bytes: int = SHARD_BYTES
    verify: bool = True
    """Whether what was written is read again, and compared with what was read."""
    compare: bool = False
    """Whether at the end the whole output is opened as any reader would, and compared with the source."""


@dataclass(frozen=True)
class Task:
    """One output, or one part of an output, that nobody else writes."""

    number: int
    field: str
    place: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """What a conversion will do; printed, it says so."""

    goal: str
    options: Options
    cuts: Mapping[str, Cut]
    fingerprint: str
    limit_bytes: int
    base_bytes: int
    """Held besides tasks."""
    workers: int
    """Tasks that run at a time, each in a process of its own; 1 runs them here."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """How large a sample of a field is by zstd, as a share of its values, where that decided its compression."""

    @property
    def need_bytes(self) -> int:
        """What one task holds."""
        return max(cut.need_bytes for cut in self.cuts.values())

    @property
    def planned_bytes(self) -> int:
        """The most that is held, all processes together."""
        each = self.need_bytes + (WORKER_BYTES + self.base_bytes - BASE_BYTES if self.workers > 1 else 0)
        return self.base_bytes + self.workers * each

    @property
    def bytes(self) -> int:
        """Of all values, uncompressed."""
        return sum(cut.bytes for cut in self.cuts.values())

    @property
    def tasks(self) -> int:
        return sum(int(np.prod(cut.grid)) for cut in self.cuts.values())

    @property
    def key(self) -> str:
        """A digest that differs if the output would differ."""
        cuts = [(name, *map(str, asdict(cut).values())) for name, cut in self.cuts.items()]
        chosen = (self.options.format, self.options.compression)
        return digest(self.fingerprint, os.path.basename(self.goal), chosen, cuts)

    def all_tasks(self) -> Iterator[Task]:
        """In the order in which they are begun."""
        places = ((field, place) for field, cut in self.cuts.items() for place in np.ndindex(*cut.grid))
        return (Task(number, field, place) for number, (field, place) in enumerate(places))

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        fields = {
            name: {
                "rows": cut.rows, "shape": list(cut.shape), "dtype": cut.dtype.name, "part_of_row": list(cut.box),
                "rows_per_chunk": cut.chunk_rows, "rows_per_read": cut.read_rows, "rows_per_shard": cut.shard_rows,
                "shards": int(np.prod(cut.grid)), "bytes": cut.bytes, "task_bytes": cut.need_bytes,
                "compression": cut.compression,
                **({"zstd_share": round(self.shares[name], 3)} if name in self.shares else {}),
            }
            for name, cut in self.cuts.items()
        }  # fmt: skip
        return {
            "to": self.goal, "format": self.options.format, "compression": self.options.compression,
            "bytes": self.bytes, "tasks": self.tasks, "workers": self.workers, "memory_limit_bytes": self.limit_bytes,
            "planned_bytes": self.planned_bytes, "task_bytes": self.need_bytes, "key": self.key, "fields": fields,
        }  # fmt: skip

    def __str__(self) -> str:
        kind = f"{self.options.format}, {format_size(self.bytes)} of values in {self.tasks:,} tasks"
        lines = [f"{self.goal}: {kind}"]
        for name, cut in self.cuts.items():
            share = self.shares.get(name)
            why = "" if share is None else _why(cut.compression, share)
            lines.append(f"  {name or 'samples'}: {_describe(cut)}; compression: {cut.compression}{why}")
        where = "in this process" if self.workers == 1 else f"in {self.workers} processes"
        lines.append(
            f"  memory: {format_size(self.planned_bytes)} of {format_size(self.limit_bytes)}: tasks of "
            f"{format_size(self.need_bytes)}, {where}"
        )
        return "\n".join(lines)


def _describe(cut: Cut) -> str:
    part = "" if cut.box == cut.shape else f", {cut.box} of each row"
    return (
        f"{cut.rows:,} rows, {int(np.prod(cut.grid)):,} shards of {cut.shard_rows:,} rows{part}; read "
        f"{cut.read_rows:,} rows at a time, chunks of {cut.chunk_rows:,}"
    )


def _why(compression: str, share: float) -> str:
    """Why a field is compressed, or not."""
    saved = f"zstd makes a sample of it {share:.0%} as large"
    return f" ({saved})" if compression == "zstd" else f" ({saved}, and reading it from memory several times as slow)"


def format_of_goal(goal: str) -> str:
    """The format that a name asks for."""
    if is_remote(goal):
        raise ConfigError(f"{goal}: conversions are written to this machine's disks; convert to a folder, then upload")
    found = SUFFIXES.get(os.path.splitext(goal.rstrip("/"))[1].lower())
    if found is None:
        raise ConfigError(f"{goal}: no format that can be written; expected a name that ends in {', '.join(SUFFIXES)}")
    return found


def make_plan(ds: Dataset, goal: str, options: Options, limit_bytes: int, workers: int | None) -> ConversionPlan:
    """Cut the data so that tasks fit; as many at a time as fit, and at most ``workers``."""
    _check(ds, goal, options)
    base = BASE_BYTES + index_bytes(ds) + (ARROW_BYTES if options.format == "parquet" else 0)
    base += _compare_bytes(ds, options)
    room = limit_bytes - base
    half = room // 2 - WORKER_BYTES - (base - BASE_BYTES)
    share = half if half >= LEAST_SHARE else room
    try:
        cuts = _cuts(ds, goal, options, share)
    except TooLittle:
        share, cuts = room, _cuts_or_refuse(ds, goal, options, limit_bytes, base)
    shares = _compressed_shares(ds, cuts) if options.compression == "auto" else {}
    cuts = {name: replace(cut, compression=_chosen(options, shares.get(name))) for name, cut in cuts.items()}
    if options.format == "zarr":
        cuts = {name: _by_row(ds, name, cut, options, share) for name, cut in cuts.items()}
    need = max(cut.need_bytes for cut in cuts.values())
    tasks = sum(int(np.prod(cut.grid)) for cut in cuts.values())
    fit = room // (need + WORKER_BYTES + base - BASE_BYTES)
    most = 1 if is_in_memory(ds.delivered) else workers or cores()  # other processes would need copies
    return ConversionPlan(
        goal=goal, options=options, cuts=cuts, fingerprint=ds.fingerprint, limit_bytes=limit_bytes, base_bytes=base,
        workers=max(1, min(fit, tasks, most)), shares=shares,
    )  # fmt: skip


def _compare_bytes(ds: Dataset, options: Options) -> int:
    """What opening the output holds at most where values of no fixed size are held in memory; twice while it opens."""
    lists = [spec for spec in ds.fields.values() if spec.is_list]
    if not options.compare or options.format in ("tar", "lmdb") or not lists:
        return 0
    return ZARR_BYTES + sum(2 * min(MOST_BYTES, len(ds) * (spec.most_bytes + 8)) for spec in lists)


def _by_row(ds: Dataset, name: str, cut: Cut, options: Options, room: int) -> Cut:
    """In chunks of one row, where that pays: a shuffled epoch then reads rows as it does from an npy file.

    It does as long as a reader can keep the places of all rows in memory.
    """
    row_bytes, kept_rows = ds.fields[name].row_bytes, policy.DEFAULT.kept_shard_index_bytes // KEPT_CHUNK_BYTES
    pays = cut.compression == "none" and row_bytes >= ROW_CHUNK_BYTES and cut.rows <= kept_rows
    if cut.values or cut.chunk_rows == 1 or options.rows_per_chunk is not None or not pays:
        return cut
    return replace(cut_array(ds, name, replace(options, rows_per_chunk=1), room), compression=cut.compression)


def _compressed_shares(ds: Dataset, cuts: Mapping[str, Cut]) -> dict[str, float]:
    return {name: compressed_share(ds, name, cut) for name, cut in cuts.items() if cut.values is None}


def _chosen(options: Options, share: float | None) -> str:
    if share is None:
        return "zstd" if options.compression == "auto" else options.compression
    return "zstd" if share <= MOST_SHARE else "none"


def _cuts_or_refuse(ds: Dataset, goal: str, options: Options, limit_bytes: int, base: int) -> dict[str, Cut]:
    try:
        return _cuts(ds, goal, options, limit_bytes - base)
    except TooLittle as found:
        least = found.need_bytes + base
        why = ""
        if options.format in SAMPLE_FORMATS:
            why += ". Samples are written whole to this format: .zarr, .npy and .h5 take less"
        if held := _compare_bytes(ds, options):
            why += (
                f". To compare the output with the source (verify='source', --verify), texts of {options.format} are "
                f"held in memory: up to {format_size(held)}. A .tar needs nothing for that"
            )
        raise BudgetExceeded(
            f"memory={format_size(limit_bytes)} is too small for this conversion: the smallest that works is "
            f"{format_size(least)} ({least:,} bytes){why}",
            smallest_bytes=least,
        ) from None


def _check(ds: Dataset, goal: str, options: Options) -> None:
    if not len(ds):
        raise ConfigError(f"{goal}: the dataset has no rows, so that there is nothing to write")
    for name, spec in ds.fields.items():
        if spec.is_list:
            kind_of_values(name, spec, ds.only(name)[:1][name], options.format)
    if options.format == "parquet":
        rows.check_parquet(ds.fields)
    if options.format in ("tar", "lmdb"):
        rows.check_tar_names(ds.fields)
    if options.format in SAMPLE_FORMATS:
        return
    if options.format == "hdf5":
        hdf5.check_libraries(options.compression)
    for name, spec in ds.fields.items():
        if not spec.is_list and spec.dtype.kind not in "biufc":
            raise ConfigError(f"field {name!r} is {spec}: {options.format} takes numbers. Leave it out with ds.only(…)")
        if any(part in ("", ".", "..", "zarr.json", "c") for part in name.split("/")):
            raise ConfigError(f"field {name!r}: {options.format} cannot have an array of that name; use ds.rename(…)")
        if not all(spec.shape):
            raise ConfigError(f"field {name!r} is {spec}: there is nothing in a row to write")
    if options.format == "npy" and len(ds.fields) > 1:
        raise ConfigError(
            f"{goal}: an npy file has one array, and there are {len(ds.fields)} fields ({', '.join(ds.fields)}): "
            f"choose one with ds.only(…) (--fields), or write .zarr or .h5"
        )
    if options.format != "npy" and NUMBERED.search(os.path.basename(goal)):
        raise ConfigError(f"{goal}: numbered files are for .tar, .parquet and .lmdb; {options.format} has one name")


def _cuts(ds: Dataset, goal: str, options: Options, room: int) -> dict[str, Cut]:
    if options.format in SAMPLE_FORMATS:
        return {ALL_FIELDS: _cut_samples(ds, goal, options, room)}
    cuts: dict[str, Cut] = {}
    least = 0
    for name in ds.fields:
        try:
            cuts[name] = cut_array(ds, name, options, room)
        except TooLittle as found:
            least = max(least, found.need_bytes)
    if least:
        raise TooLittle(max([least, *(cut.need_bytes for cut in cuts.values() if cut.need_bytes > room)]))
    return cuts


def cut_array(ds: Dataset, name: str, options: Options, room: int) -> Cut:
    """One field of an array format, in tasks of at most ``room`` bytes."""
    spec, store = ds.fields[name], ds.only(name).delivered
    packs = not has_fixed_places(options, ds.fields)
    dtype = np.dtype((np.void, spec.row_bytes)) if spec.is_list else spec.dtype
    request = CutRequest(
        rows=len(ds), shape=spec.shape, dtype=dtype, block_rows=block_rows(store), source_chunk=chunk_of(store),
        chunk_rows=options.rows_per_chunk if packs else 1, shard_bytes=options.shard_bytes,
        least_run_bytes=0 if packs else LEAST_RUN_BYTES,
        largest_row_bytes=max(each.row_bytes for each in ds.fields.values()),
    )  # fmt: skip

    def overhead(box: tuple[int, ...], read_rows: int, chunk_rows: int) -> int:
        part = part_store(ds, name, tuple(slice(0, n) for n in box))
        chunk_bytes = chunk_rows * int(np.prod(box, dtype=np.int64)) * dtype.itemsize
        writing = encode.overhead_bytes(chunk_bytes) if packs else 2 * MiB
        return aligned(part.scratch_bytes(min(read_rows, len(ds)))) + writing

    cut = cut_field(request, room, overhead)
    if not spec.is_list:
        return cut
    return replace(cut, values=kind_of_values(name, spec, ds.only(name)[:1][name], options.format))


def has_fixed_places(options: Options, fields: Fields) -> bool:
    """Whether every value has a known place in one file, so that tasks fill places of it."""
    if options.format == "npy":
        return True
    no_lists = not any(spec.is_list for spec in fields.values())
    return options.format == "hdf5" and options.compression == "none" and no_lists


def _cut_samples(ds: Dataset, goal: str, options: Options, room: int) -> Cut:
    store, each = ds.delivered, row_bytes(ds.fields)
    several = NUMBERED.search(os.path.basename(goal)) is not None
    request = CutRequest(
        rows=len(ds), shape=(), dtype=np.dtype((np.void, max(1, each))), block_rows=block_rows(store), source_chunk=(),
        chunk_rows=1, shard_bytes=options.shard_bytes if several else max(1, each) * (len(ds) + 1) * 2,
    )  # fmt: skip
    rows_per_file = min(len(ds), request.shard_bytes // max(1, each))
    return cut_field(request, room, _sample_overhead(store, options.format, rows_per_file))


def _sample_overhead(store: Store, kind: str, rows_per_file: int) -> Overhead:
    """Besides a read: the encoded sample in a tar; a table, its columns and their compressed pages in Parquet; all
    values encoded, and the pages of a transaction, in LMDB. And the index of a file that is read again."""
    each, length = row_bytes(store.fields), len(store)
    index = INDEX_BYTES[kind] * len(store.fields) * rows_per_file
    values = sum(spec.most_bytes or int(np.prod(spec.shape)) for spec in store.fields.values())

    def overhead(box: tuple[int, ...], read_rows: int, chunk_rows: int) -> int:
        rows_ = min(read_rows, length)
        copies = {
            "tar": 4 * each,
            "parquet": (2 * each + ARROW_VALUE_BYTES * values) * rows_,
            "lmdb": (2 * each + LMDB_VALUE_BYTES * len(store.fields)) * rows_,
        }[kind]
        return store.scratch_bytes(rows_) + copies + index + encode.CODEC_BYTES

    return overhead
