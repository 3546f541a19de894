"""Reads and decodes a whole dataset once to find what cannot be read, or compares its files with a manifest.

Fields are read one by one, so that a broken one does not hide another, by a loader in the order of the file, which
leaves out what cannot be read and says why. Where rows come in blocks of many chunks, the first broken chunk hides the
others of its block, so those blocks are read again in small shares.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from penstock.base.sizes import MiB
from penstock.base.spec import row_bytes
from penstock.base.urls import is_remote
from penstock.dataset.dataset import Dataset
from penstock.dataset.store import StoreBase
from penstock.errors import BudgetExceeded, ConfigError, DataError, PenstockError, SourceError
from penstock.files import manifest as manifests
from penstock.files.files import Files, files_below
from penstock.files.manifest import BLOCK_BYTES, Manifest, digest_of
from penstock.formats.open import open, source_of
from penstock.formats.paths import Path, paths_of
from penstock.formats.zip_table import damaged_members, is_zip
from penstock.loader.loader import Loader
from penstock.loader.stats import LeftOut

SMALL_BUDGET = 256 * MiB
BATCH_BYTES = 8 * MiB

# A block with a broken chunk is read in this many shares, so that as many broken chunks can be told apart.
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
class Damage:
    """Bytes of a file that differ from its manifest, or a file that is missing or not listed."""

    file: str
    begin: int
    end: int
    why: str

    def __str__(self) -> str:
        return self.why


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


Progress = Callable[[int, int], None]
"""Called with the number of values (or bytes, with a manifest) checked since the last call, and of faults so far."""


def _no_progress(more: int, bad: int) -> None:
    """Show nothing."""


def verify(
    source: Any,
    *,
    manifest: Path | None = None,
    memory: int | str | None = None,
    progress: Progress = _no_progress,
    **options: Any,
) -> Verdict:
    """Check all of a dataset, or of what ``open(source, **options)`` opens, and report what is wrong.

    Without a manifest every value is read and decoded, which finds what the format's own checksums notice. With one,
    every file is compared with it; if something differs, all samples are read to find those affected.

    memory:    as for ``Loader``; 256 MiB if not given and enough
    """
    if manifest is None:
        ds = source if isinstance(source, Dataset) else open(source, **options)
        return _with_archives(_read_all(ds, memory, progress), source_of(ds))
    if isinstance(source, Dataset):
        raise ConfigError("verify(dataset, manifest=…): expected the files themselves: a path, a pattern, or a list")
    known, files = manifests.load(manifest), Files()
    paths = paths_of(source, files)
    if is_remote(paths[0]):
        known = known.of_addresses(paths)
    damages = tuple(_damages(known, paths, files, progress))
    if not damages:
        return Verdict((), 0, 0)
    try:
        with_manifest = open(source, **{**options, "manifest": manifest, "on_error": "skip"})
    except PenstockError:  # the damaged bytes are needed to open it
        return Verdict((), 0, 0, damages)
    return replace(_read_all(with_manifest, memory, _no_progress), damages=damages)


def _with_archives(verdict: Verdict, source: Any) -> Verdict:
    """Check members of zip archives by their checksums: reading rows in place does not read whole members."""
    files = Files()
    paths = [] if source is None else [path for path in paths_of(source, files, []) if not is_remote(path)]
    archives = [path for path in paths if os.path.isfile(path) and is_zip(path)]
    damages = tuple(Damage(path, *found) for path in archives for found in damaged_members(path, files))
    return replace(verdict, damages=damages, unchecked=() if archives and archives == paths else verdict.unchecked)


def write_manifest(source: Any, path: Path | None = None, *, progress: Progress = _no_progress) -> str:
    """Write a manifest: sizes and digests of the files that ``open(source)`` opens. Returns its path.

    By default that is ``penstock-manifest.json`` in the folder that contains all of them; ``path`` chooses another.
    Names in it are relative to its folder, which must therefore contain all files.
    """
    files = Files()
    paths = paths_of(source, files)
    goal = os.fspath(path) if path is not None else default_manifest(paths)
    remote = is_remote(paths[0])

    def digested() -> Iterator[tuple[str, int, bytes]]:
        for each in _all_files(paths, goal):
            file = files.identify(each)
            digests = []
            with files.lend(file) as handle:
                for begin in range(0, file.size, BLOCK_BYTES):
                    end = min(begin + BLOCK_BYTES, file.size)
                    digests.append(digest_of(handle.fill, begin, end))
                    progress(end - begin, 0)
            yield each, file.size, b"".join(digests)

    try:
        manifests.write(manifests.new(goal, paths if remote else ()), digested())
    finally:
        files.close()
    return goal


def default_manifest(paths: Iterable[str]) -> str:
    """Where a manifest of these files or folders is expected: in the folder that contains all of them."""
    folders = [os.path.dirname(os.path.abspath(path.rstrip("/"))) for path in paths if not is_remote(path)]
    return os.path.join(os.path.commonpath(folders) if folders else "", manifests.NAME)


def bytes_of(source: Any) -> int:
    """Bytes that a manifest of these files would cover."""
    files = Files()
    paths = paths_of(source, files)
    try:
        return sum(files.identify(each).size for each in _all_files(paths, ""))
    finally:
        files.close()


def _all_files(paths: Iterable[str], besides: str) -> Iterator[str]:
    for path in paths:
        if is_remote(path):
            yield path
        else:
            yield from (each for each in files_below(path) if not _is_same(each, besides))


def _is_same(path: str, other: str) -> bool:
    return os.path.basename(path) == os.path.basename(other) and os.path.abspath(path) == os.path.abspath(other)


def _damages(known: Manifest, paths: Iterable[str], files: Files, progress: Progress) -> Iterator[Damage]:
    bad = 0
    for path in paths:
        for name in known.below(path):
            whole = f"{known.folder}/{name}" if is_remote(path) else os.path.join(known.folder, name)
            if not is_remote(path) and not os.path.exists(whole):
                bad += 1
                why = f"{whole}: the manifest {known.path} lists it, and it is not there; restore it"
                yield Damage(whole, 0, known.sizes[name], why)
        for each in _all_files([path], known.path):
            for found in _compared(known, each, files):
                if isinstance(found, Damage):
                    bad += 1
                    yield found
                else:
                    progress(found, bad)
    files.close()


def _compared(known: Manifest, path: str, files: Files) -> Iterator[Damage | int]:
    """What is wrong with a file, and how many bytes were checked."""
    try:
        file = files.identify(path)
        known.check_size(path, file.size)
    except (DataError, SourceError) as error:
        yield Damage(path, 0, known.sizes.get(known.name_of(path), 0), str(error))
        return
    with files.lend(file) as handle:
        for number, begin, end in known.blocks(known.span(path)):
            try:
                known.compare_block(path, handle.fill, number, begin, end)
            except (DataError, SourceError) as error:
                yield Damage(path, begin, end, str(error))
            yield end - begin


def _read_all(ds: Dataset, memory: int | str | None, progress: Progress) -> Verdict:
    """Read and decode every value of every field."""
    faults: list[Fault] = []
    unreadable = filled = 0
    unchecked: tuple[str, ...] = ()
    for field in ds.fields:
        only, before = ds.only(field), unreadable
        with _loader(only, memory) as loader:
            for more, bad in _epoch(loader):
                unreadable = before + bad
                progress(more, unreadable)
            stats = loader.stats()
            found = list(_together(field, stats.left_out))
            filled += stats.chunks_filled
            unchecked += tuple(stats.unchecked)
        faults += _looked_into(only, found)
        only.close()
    return Verdict(tuple(faults), unreadable, filled, (), unchecked)


def _loader(ds: Dataset, memory: int | str | None) -> Loader:
    rows = max(1, BATCH_BYTES // max(1, row_bytes(ds.fields)))
    options: dict[str, Any] = {
        "batch_size": rows, "on_error": "skip", "output": "numpy", "rank": 0, "world_size": 1
    }  # fmt: skip
    try:
        return Loader(ds, memory=memory or SMALL_BUDGET, **options)
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
