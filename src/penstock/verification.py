"""Everything there is, read and decoded once, to find what cannot be; or held, block by block, against a manifest.

Field by field, so that one that is broken does not hide another, by a loader in the order of the file, which leaves out
what cannot be read and says why. Where rows come in blocks of many chunks, the first broken one keeps all others of its
block from being looked at, so those blocks are then read in small shares.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock import manifest as manifests
from penstock.dataset import Dataset
from penstock.errors import BudgetExceeded, ConfigError, DataError, PenstockError, SourceError
from penstock.fileio import Files, files_below
from penstock.loader import Loader
from penstock.manifest import BLOCK_BYTES, Manifest, digest_of
from penstock.opening import open
from penstock.paths import Path, paths_of
from penstock.sizes import MiB
from penstock.spec import row_bytes
from penstock.stats import LeftOut
from penstock.store import Sharing, Store
from penstock.urls import is_remote

SMALL_BUDGET = 256 * MiB
BATCH_BYTES = 8 * MiB

# A block with a broken chunk is looked at in so many shares: as many broken chunks of it can be told apart.
SHARES = 64
# Of so many broken blocks; whoever has more has other worries.
BLOCKS_LOOKED_INTO = 100


@dataclass(frozen=True)
class Fault:
    """Something that cannot be read, and the samples that suffer from it."""

    field: str
    rows: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        first, last = min(self.rows), max(self.rows)
        which = f"row {first:,}" if len(self.rows) == 1 else f"{len(self.rows):,} rows from {first:,} to {last:,}"
        return f"{self.field}, {which}: {self.why}"


@dataclass(frozen=True)
class Damage:
    """Bytes of a file that are not those that the manifest tells of, or a file that is not there, or not listed."""

    file: str
    begin: int
    end: int
    why: str

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a dataset."""

    faults: tuple[Fault, ...]
    unreadable: int
    """Values (a field of a sample each) that cannot be read; all are counted, also where not all faults are listed."""
    filled: int
    """Chunks that were never written, and stand for their fill value."""
    damages: tuple[Damage, ...] = ()
    """Where files are not what the manifest tells of."""
    unchecked: tuple[str, ...] = ()
    """Fields of which a damaged byte would pass for data: no checksum in the format, and no manifest."""

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong, as far as can be told."""
        return not self.faults and not self.damages


Progress = Callable[[int, int], None]
"""Called with how many more values (or bytes, with a manifest) were looked at, and how many are wrong so far."""


def _no_progress(more: int, bad: int) -> None:
    """Nobody wants to know."""


def verify(
    source: Any,
    *,
    manifest: Path | None = None,
    memory: int | str | None = None,
    progress: Progress = _no_progress,
    **options: Any,
) -> Verdict:
    """Look at all of a dataset, or of what ``open(source, **options)`` opens, and say what is wrong.

    Without a manifest every value is read and decoded, which finds what the format's own checksums notice. With one,
    every file is held against it; if something differs, the samples that suffer are found by reading them all.

    memory:    as for ``Loader``; little if not given
    """
    if manifest is None:
        return _read_all(source if isinstance(source, Dataset) else open(source, **options), memory, progress)
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
    except PenstockError:  # what is damaged is needed to open it
        return Verdict((), 0, 0, damages)
    return replace(_read_all(with_manifest, memory, _no_progress), damages=damages)


def write_manifest(source: Any, path: Path | None = None, *, progress: Progress = _no_progress) -> str:
    """Write sizes and digests of the files that ``open(source)`` opens; return where to.

    That is ``penstock-manifest.json`` in the folder that they, or the folders opened, are in, unless ``path`` says
    otherwise. Names in it are relative to its folder, so it must not lie below.
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
    """Where a manifest of these files or folders is looked for: in the folder that all of them are in."""
    folders = [os.path.dirname(os.path.abspath(path.rstrip("/"))) for path in paths if not is_remote(path)]
    return os.path.join(os.path.commonpath(folders) if folders else "", manifests.NAME)


def bytes_of(source: Any) -> int:
    """What a manifest of these files will tell of."""
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
    """What is wrong with a file, and how many bytes were looked at."""
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
    try:
        return Loader(ds, batch_size=rows, memory=memory or SMALL_BUDGET, on_error="skip", output="numpy")
    except BudgetExceeded:
        if memory is not None:
            raise
    return Loader(ds, batch_size=rows, on_error="skip", output="numpy")


def _epoch(loader: Loader) -> Iterator[tuple[int, int]]:
    """For each batch: how many more rows were looked at, and how many could not be read so far."""
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
    several_chunks = isinstance(store, Sharing)
    for number, fault in enumerate(faults):
        others = _reasons(store, fault) if several_chunks and number < BLOCKS_LOOKED_INTO else {}
        yield fault
        yield from (replace(fault, why=why) for why in others if why != fault.why)


def _reasons(store: Store, fault: Fault) -> dict[str, None]:
    """Why a row of a broken block cannot be read, share by share."""
    assert isinstance(store, Sharing)
    row, at = np.array(fault.rows[:1]), np.array([0])
    out = {name: spec.empty(1) for name, spec in store.fields.items()}
    found: dict[str, None] = {}
    for share in range(SHARES):
        try:
            store.read_share(row, at, out, (share, SHARES))
        except (DataError, SourceError) as error:
            found[str(error)] = None
    return found
