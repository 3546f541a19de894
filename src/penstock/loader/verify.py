"""Reads and decodes a whole dataset once to find what cannot be read, or compares its files with a manifest.

Fields are read one by one, so that a broken one does not hide another, by a loader in the order of the file, which
leaves out what cannot be read and says why. Where rows come in blocks of many chunks, the first broken chunk hides the
others of its block, so those blocks are read again in small shares.

The work is a list of independent tasks: some rows of one field, or some bytes of one file. They run in this process, in
several, or on any ``concurrent.futures.Executor``.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.base.executors import checked_executor, run
from penstock.base.machine import cores
from penstock.base.sizes import MiB
from penstock.base.spec import row_bytes
from penstock.base.urls import is_remote
from penstock.dataset.dataset import Dataset
from penstock.dataset.lazy import row_edges
from penstock.dataset.store import StoreBase
from penstock.errors import BudgetExceeded, ConfigError, DataError, PenstockError, SourceError
from penstock.files import manifest as manifests
from penstock.files.files import Files
from penstock.formats.open import open, source_of
from penstock.formats.paths import Path, paths_of
from penstock.formats.zip_table import damaged_members, is_zip
from penstock.loader.loader import Loader
from penstock.loader.stats import LeftOut
from penstock.loader.verify_files import PIECE_BYTES, Damage, Engine, Progress, find_damages, no_progress

SMALL_BUDGET = 256 * MiB
BATCH_BYTES = 8 * MiB

# A block with a broken chunk is read in this many shares, so that as many broken chunks can be distinguished.
SHARES = 64
# The most broken blocks that are read in shares, so that verifying a file full of damage still ends.
BLOCKS_LOOKED_INTO = 100


@dataclass(frozen=True)
class Fault:
    """Something that cannot be read, and the samples that need it."""

    field: str
    rows: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        first, last = min(self.rows), max(self.rows)
        which = f"row {first:,}" if len(self.rows) == 1 else f"{len(self.rows):,} rows from {first:,} to {last:,}"
        return f"{self.field}, {which}: {self.why}"


@dataclass(frozen=True)
class Verdict:
    """The result of ``verify``: what is wrong with a dataset, if anything."""

    faults: tuple[Fault, ...]
    unreadable: int
    """Values (one per field and sample) that cannot be read; all are counted, even if not all faults are listed."""
    filled: int
    """Chunks that were never written, and read as their fill value."""
    damages: tuple[Damage, ...] = ()
    """Where files differ from the manifest."""
    unchecked: tuple[str, ...] = ()
    """Fields without checksum or manifest: a damaged byte would pass for data."""

    @property
    def sound(self) -> bool:
        """Whether no fault was found."""
        return not self.faults and not self.damages

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "sound": self.sound,
            "unreadable_values": self.unreadable,
            "faults": [{"field": fault.field, "rows": list(fault.rows), "why": fault.why} for fault in self.faults],
            "filled_chunks": self.filled,
            "damages": [asdict(damage) for damage in self.damages],
            "unchecked_fields": list(self.unchecked),
        }


def verify(
    source: Any,
    *,
    manifest: Path | None = None,
    memory: int | str | None = None,
    executor: Executor | str | None = None,
    workers: int | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> Verdict:
    """Check all of a dataset, or of what ``open(source, **options)`` opens, and report what is wrong.

    Without a manifest every value is read and decoded, which finds what the format's own checksums notice. With one,
    every file is compared with it; if something differs, all samples are read to find those affected.

    memory:    of each worker, as for ``Loader``; 256 MiB if not given and enough
    executor:  "serial" for this process and its threads (the default where ``workers`` is not given), "processes", or
               any ``concurrent.futures.Executor``; all its workers must see the same files
    workers:   tasks that run at a time
    """
    engine, progress = _engine(executor, workers), checks.function("progress", progress)
    if manifest is None:
        ds = source if isinstance(source, Dataset) else open(source, **options)
        return _with_archives(_read_all(ds, memory, engine, progress), source_of(ds))
    if isinstance(source, Dataset):
        raise ConfigError("verify(dataset, manifest=…): expected the files themselves: a path, a pattern, or a list")
    known, files = manifests.load(checks.path("manifest", manifest)), Files()
    paths = paths_of(source, files)
    if is_remote(paths[0]):
        known = known.of_addresses(paths)
    damages = tuple(find_damages(known, paths, engine, progress))
    if not damages:
        return Verdict((), 0, 0)
    try:
        with_manifest = open(source, **{**options, "manifest": manifest, "on_error": "skip"})
    except PenstockError:  # the damaged bytes are needed to open it
        return Verdict((), 0, 0, damages)
    return replace(_read_all(with_manifest, memory, engine, no_progress), damages=damages)


def _engine(executor: Any, workers: int | None) -> Engine:
    chosen = "serial" if executor is None and workers is None else checked_executor(executor)
    if chosen == "serial":
        return chosen, 1
    return chosen, cores() if workers is None else checks.whole("workers", workers, least=1)


def _with_archives(verdict: Verdict, source: Any) -> Verdict:
    """Check members of zip archives by their checksums: reading rows in place does not read whole members."""
    files = Files()
    paths = [] if source is None else [path for path in paths_of(source, files, []) if not is_remote(path)]
    archives = [path for path in paths if os.path.isfile(path) and is_zip(path)]
    damages = tuple(Damage(path, *found) for path in archives for found in damaged_members(path, files))
    return replace(verdict, damages=damages, unchecked=() if archives and archives == paths else verdict.unchecked)


class _Rows(NamedTuple):
    """Some rows of one field."""

    field: str
    begin: int
    end: int


class _RowFaults(NamedTuple):
    """What is wrong with some rows of one field."""

    rows: _Rows
    faults: list[Fault]
    unreadable: int
    filled: int
    unchecked: tuple[str, ...]


def _read_all(ds: Dataset, memory: int | str | None, engine: Engine, progress: Progress) -> Verdict:
    """Read and decode every value of every field."""
    tasks = [piece for field in ds.fields for piece in _row_pieces(ds.only(field), field, whole=engine[0] == "serial")]
    found: dict[_Rows, _RowFaults] = {}
    if engine[0] == "serial":
        for piece in tasks:
            before = sum(each.unreadable for each in found.values())
            found[piece] = _read_piece((ds, memory), piece, partial(_add, progress, before))
    else:
        for each in run(engine[0], _read_alone, (ds, memory), tasks, engine[1]):
            found[each.rows] = each
            progress(each.rows.end - each.rows.begin, sum(done.unreadable for done in found.values()))
    in_order = [found[piece] for piece in tasks]
    unchecked = dict.fromkeys(name for each in in_order for name in each.unchecked)
    return Verdict(
        tuple(_merged(fault for each in in_order for fault in each.faults)), sum(each.unreadable for each in in_order),
        sum(each.filled for each in in_order), (), tuple(unchecked),
    )  # fmt: skip


def _add(progress: Progress, before: int, more: int, bad: int) -> None:
    progress(more, before + bad)


def _row_pieces(ds: Dataset, field: str, *, whole: bool) -> list[_Rows]:
    """All rows, or whole blocks of about as many bytes each."""
    edges = [0, len(ds)] if whole else row_edges(ds, PIECE_BYTES // max(1, row_bytes(ds.fields))).tolist()
    return [_Rows(field, begin, end) for begin, end in pairwise(edges)]


def _merged(faults: Iterable[Fault]) -> Iterator[Fault]:
    """One fault where tasks found the same."""
    rows: dict[tuple[str, str], tuple[int, ...]] = {}
    for fault in faults:
        rows[fault.field, fault.why] = rows.get((fault.field, fault.why), ()) + fault.rows
    return (Fault(field, which, why) for (field, why), which in rows.items())


def _read_alone(job: tuple[Dataset, int | str | None], piece: _Rows) -> _RowFaults:
    """In a worker of many, each of which has one thread."""
    return _read_piece(job, piece, no_progress, threads=1, processes=0)


def _read_piece(job: tuple[Dataset, int | str | None], piece: _Rows, progress: Progress, **options: Any) -> _RowFaults:
    ds, memory = job
    only = ds.only(piece.field)
    if (piece.begin, piece.end) != (0, len(ds)):
        only = only.select(range(piece.begin, piece.end))
    unreadable = 0
    with _loader(only, memory, options) as loader:
        for more, unreadable in _epoch(loader):
            progress(more, unreadable)
        stats = loader.stats()
    faults = list(_looked_into(only, list(_together(piece.field, stats.left_out))))
    only.close()
    moved = [replace(fault, rows=tuple(row + piece.begin for row in fault.rows)) for fault in faults]
    return _RowFaults(piece, moved, unreadable, stats.chunks_filled, tuple(stats.unchecked))


def _loader(ds: Dataset, memory: int | str | None, options: Mapping[str, Any]) -> Loader:
    rows = max(1, BATCH_BYTES // max(1, row_bytes(ds.fields)))
    options = {
        "batch_size": rows, "on_error": "skip", "output": "numpy", "rank": 0, "world_size": 1, **options
    }  # fmt: skip
    try:
        return Loader(ds, memory=SMALL_BUDGET if memory is None else memory, **options)
    except BudgetExceeded:
        if memory is not None:
            raise
    return Loader(ds, **options)


def _epoch(loader: Loader) -> Iterator[tuple[int, int]]:
    """For each batch: how many more rows were checked, and how many could not be read so far."""
    seen = 0
    for _ in loader:
        stats = loader.stats()
        done = stats.samples + stats.left_out_samples
        yield done - seen, stats.left_out_samples
        seen = done
    stats = loader.stats()
    yield stats.samples + stats.left_out_samples - seen, stats.left_out_samples


def _together(field: str, left_out: Iterable[LeftOut]) -> Iterator[Fault]:
    """One fault for all samples that fail for the same reason."""
    rows: dict[str, list[int]] = {}
    for sample in left_out:
        rows.setdefault(sample.why, []).append(sample.row)
    for why, which in rows.items():
        yield Fault(field, tuple(which), why)


def _looked_into(ds: Dataset, faults: list[Fault]) -> Iterator[Fault]:
    store = ds.delivered
    for number, fault in enumerate(faults):
        others = _reasons(store, fault) if number < BLOCKS_LOOKED_INTO else {}
        yield fault
        yield from (replace(fault, why=why) for why in others if why != fault.why)


def _reasons(store: StoreBase, fault: Fault) -> dict[str, None]:
    """Why a row of a broken block cannot be read, share by share."""
    row, at = np.array(fault.rows[:1]), np.array([0])
    out = {name: spec.empty(1) for name, spec in store.fields.items()}
    found: dict[str, None] = {}
    for share in range(SHARES):
        try:
            store.read(row, at, out, (share, SHARES))
        except (DataError, SourceError) as error:
            found[str(error)] = None
    return found
