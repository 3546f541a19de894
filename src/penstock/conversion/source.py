"""The dataset that is converted: pieces of it, read into memory that is taken once, and what it was when begun."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from penstock.base import scratch
from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.spec import IN_MEMORY
from penstock.base.urls import is_remote
from penstock.dataset.dataset import Dataset
from penstock.dataset.explain import read_paths
from penstock.dataset.rewrite import select_part
from penstock.dataset.store import Store, as_base, digest
from penstock.errors import Changed
from penstock.read.part import row_part


def block_rows(store: Store) -> int:
    """The most rows that are read together or not at all."""
    blocks = store.blocks
    if blocks is None or not len(blocks):
        return 1
    return int(np.diff(np.append(blocks, len(store))).max())


def chunk_of(store: Store) -> tuple[int, ...]:
    """The part of a row that a chunk of the files holds; empty where that is not known."""
    paths = read_paths(as_base(store))
    return paths[0].chunk if len(paths) and paths[0].spec.shape == next(iter(store.fields.values())).shape else ()


def is_in_memory(store: Store) -> bool:
    """Whether some of it comes from no file, so that other processes would need copies."""
    paths = read_paths(as_base(store))
    return not paths or any(path.checked_by == IN_MEMORY for path in paths)


def index_bytes(ds: Dataset) -> int:
    """What knowing where things lie takes in each process."""
    return ds.store.index_bytes + sum(ds.store.shared_index.values())


def part_store(ds: Dataset, field: str, part: tuple[slice, ...]) -> Store:
    """One field, or part of each of its rows, as it is delivered."""
    store, shape = ds.only(field).delivered, ds.fields[field].shape
    if all(each.stop - each.start == n for each, n in zip(part, shape, strict=True)):
        return store
    return select_part(store, field, row_part(shape, part))


@dataclass
class Reader:
    """Reads pieces of some fields into one buffer each, which the next read uses again."""

    store: Store
    rows_at_once: int

    def __enter__(self) -> "Reader":
        scratch.prepare(self.store.scratch_bytes(self.rows_at_once))
        self._buffers = {
            name: scratch.buffer(self.rows_at_once * spec.row_bytes)
            for name, spec in self.store.fields.items()
            if not spec.is_list
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.clear()
        scratch.release()
        self.store.close()

    def read(self, rows: range) -> dict[str, np.ndarray]:
        """These rows of all fields; the arrays are good until the next read."""
        out = {name: self._array(name, len(rows)) for name in self.store.fields}
        self.store.read_into(np.arange(rows.start, rows.stop), np.arange(len(rows)), out)
        return out

    def _array(self, name: str, rows: int) -> np.ndarray:
        spec = self.store.fields[name]
        if spec.is_list:
            return spec.empty(rows)
        taken = self._buffers[name][: rows * spec.row_bytes]
        return taken.view(spec.dtype).reshape(rows, *spec.shape)


# What the files were.


def files_of(ds: Dataset) -> dict[str, list[int]]:
    """Size and time of each local file that the dataset reads from, as they were when it was opened."""
    found = {id_.path: [id_.size, id_.mtime_ns] for id_ in parts_of(ds.store) if isinstance(id_, FileId)}
    return {path: found[path] for path in sorted(found) if not is_remote(path) and os.path.isfile(path)}


def digest_of_files(files: Mapping[str, list[int]]) -> str:
    """Differs where a file, its size or its time does."""
    return digest(sorted(files.items()))


def parts_of(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """All objects of penstock's that a store is made of, and what they refer to, each once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    if isinstance(value, Mapping):
        inner: Iterable[Any] = list(value.values())
    elif isinstance(value, list | tuple):
        inner = value
    else:
        inner = list(getattr(value, "__dict__", {}).values()) if type(value).__module__.startswith("penstock.") else ()
    for each in inner:
        yield from parts_of(each, seen)


def check_unchanged(before: Mapping[str, list[int]]) -> None:
    """Refuse to finish where a file is not what it was when it was opened."""
    for path, (size, mtime_ns) in before.items():
        try:
            now = os.stat(path)
        except OSError as error:
            raise Changed(f"{path}: disappeared after the conversion began ({error.strerror}); restore it") from None
        if (now.st_size, now.st_mtime_ns) != (size, mtime_ns):
            raise Changed(
                f"{path}: was changed after the conversion began, so that parts of the output may be of the old file "
                f"and parts of the new; convert again with restart=True (--restart)"
            )
