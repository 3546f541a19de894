"""Compares files with a manifest, and writes one. The work is a list of tasks: some bytes of one file each."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import closing
from typing import Any, NamedTuple

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.base.executors import run
from penstock.base.sizes import MiB
from penstock.base.urls import is_remote
from penstock.errors import DataError, SourceError
from penstock.files import manifest as manifests
from penstock.files.files import Files, files_below
from penstock.files.manifest import BLOCK_BYTES, Manifest, digest_of
from penstock.formats.paths import Path, paths_of

# About what one task reads.
PIECE_BYTES = 64 * MiB

Engine = tuple[Executor | str, int]
"""Where tasks run, and how many at a time."""

Progress = Callable[[int, int], None]
"""Called with the number of values (or bytes, with a manifest) checked since the last call, and of faults so far."""


def no_progress(more: int, bad: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Damage:
    """Bytes of a file that differ from its manifest, or a file that is missing or not listed."""

    file: str
    begin: int
    end: int
    why: str

    def __str__(self) -> str:
        return self.why


def find_damages(known: Manifest, paths: Iterable[str], engine: Engine, progress: Progress) -> list[Damage]:
    """What differs from the manifest, in the order of the files."""
    damages = [_gone(known, name) for path in paths for name in known.below(path) if _is_gone(known, path, name)]
    tasks = [piece for each in _all_files(paths, known.path) for piece in _file_pieces(known, each)]
    found: dict[_FilePiece, list[Damage]] = {}
    for piece, wrong in run(engine[0], _compare_piece, known, tasks, engine[1]):
        found[piece] = wrong
        progress(piece.end - piece.begin, len(damages) + sum(map(len, found.values())))
    return [*damages, *(damage for piece in tasks for damage in found[piece])]


def _is_gone(known: Manifest, path: str, name: str) -> bool:
    return not is_remote(path) and not os.path.exists(os.path.join(known.folder, name))


def _gone(known: Manifest, name: str) -> Damage:
    whole = os.path.join(known.folder, name)
    why = f"{whole}: the manifest {known.path} lists it, but it does not exist; restore it"
    return Damage(whole, 0, known.sizes[name], why)


class _FilePiece(NamedTuple):
    """Some bytes of a file that a manifest may list."""

    path: str
    begin: int
    end: int


def _file_pieces(known: Manifest, path: str) -> list[_FilePiece]:
    size, step = known.sizes.get(known.name_of(path), 0), max(1, PIECE_BYTES // known.block_bytes) * known.block_bytes
    return [_FilePiece(path, begin, min(begin + step, size)) for begin in range(0, max(1, size), step)]


def _compare_piece(known: Manifest, piece: _FilePiece) -> tuple[_FilePiece, list[Damage]]:
    """What is wrong with some bytes of a file; an error of the whole file is reported for its first bytes."""
    path, files = piece.path, Files()
    damages: list[Damage] = []
    try:
        file = files.identify(path)
        known.check_size(path, file.size)
    except (DataError, SourceError) as error:
        wrong = Damage(path, 0, known.sizes.get(known.name_of(path), 0), str(error))
        return piece, [] if piece.begin else [wrong]
    with closing(files), files.lend(file) as handle:
        for number, begin, end in known.blocks(known.span(path), piece.begin, piece.end):
            try:
                known.compare_block(path, handle.fill, number, begin, end)
            except (DataError, SourceError) as error:
                damages.append(Damage(path, begin, end, str(error)))
    return piece, damages


def write_manifest(source: Any, path: Path | None = None, *, progress: Progress = no_progress) -> str:
    """Write a manifest: sizes and digests of the files that ``open(source)`` opens. Returns its path.

    By default that is ``penstock-manifest.json`` in the folder that contains all of them; ``path`` chooses another.
    Names in it are relative to its folder, which must therefore contain all files.
    """
    files, progress = Files(), checks.function("progress", progress)
    paths = paths_of(source, files)
    goal = checks.path("path", path) if path is not None else default_manifest(paths)
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
