"""What is there, and how it will be read: told from the files' own metadata, before anything is read."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.combine import Columns, Concat, Joined
from penstock.dataset import Dataset
from penstock.opening import open
from penstock.sizes import format_size
from penstock.spec import IN_MEMORY, ReadPath
from penstock.store import Explained, Store
from penstock.urls import is_remote
from penstock.wrap import Wrapper

# Below this, a plan says how the shuffle could be better.
GOOD_QUALITY = 0.9


@dataclass(frozen=True)
class Inspection:
    """``print(penstock.inspect(path))``."""

    rows: int
    files: int
    paths: Sequence[ReadPath]
    left_out: Sequence[str]

    def __str__(self) -> str:
        lines = [f"{self.rows:,} rows in {self.files:,} {'file' if self.files == 1 else 'files'}"]
        for path in self.paths:
            raw = path.rows * path.spec.row_bytes
            ratio = f", compressed {raw / path.stored_bytes:.1f} x" if 0 < path.stored_bytes < 0.95 * raw else ""
            lines += [
                f"{path.field}: {path.spec}, {format_size(raw)} in all{ratio}",
                f"  stored     {path.layout}",
                f"  read       {path.how}{', over the network' if path.far else ''}",
            ]
            if path.checked_by not in ("", IN_MEMORY):
                lines.append(f"  checked    by {path.checked_by}")
            if path.amplification > 1.05:
                lines.append(f"  at random  {path.amplification:,.1f} bytes read for a byte delivered, row by row")
            if path.missing_chunks:
                lines.append(f"  missing    {path.missing_chunks:,} chunks were never written")
            if path.remedy:
                lines.append(f"  rewriting  {path.remedy} would let each row be read by itself")
        return "\n".join([*lines, *(f"left out: {why}" for why in self.left_out)])


def inspect(source: Any, **options: Any) -> Inspection:
    """What ``open(source, **options)`` finds, or what a dataset is made of."""
    ds = source if isinstance(source, Dataset) else open(source, **options)
    paths = read_paths(ds.delivered)
    return Inspection(len(ds), _files(ds.delivered), paths, [str(why) for why in ds.left_out])


def read_paths(store: Store) -> list[ReadPath]:
    """How each field of a store is read, whatever it is made of."""
    if isinstance(store, Columns):
        below = {path.field: path for path in read_paths(store.store)}
        return [replace(below[old], field=new) for new, old in store.names.items() if old in below]
    if isinstance(store, Wrapper):
        return [_for_rows(path, len(store)) for path in read_paths(store.store)]
    if isinstance(store, Concat):
        return [_together(paths) for paths in zip(*map(read_paths, store.stores), strict=True)]
    if isinstance(store, Joined):
        return [
            replace(_for_rows(path, len(store)), field=new)
            for part in store.parts.values()
            for path in read_paths(part.store)
            for new, old in part.names.items()
            if old == path.field
        ]
    return list(store.read_paths()) if isinstance(store, Explained) else []


def _for_rows(path: ReadPath, rows: int) -> ReadPath:
    """The same field in a dataset of fewer rows, or of some rows several times."""
    return replace(path, rows=rows, epoch_bytes=path.epoch_bytes * rows // max(1, path.rows))


def _together(paths: Iterable[ReadPath]) -> ReadPath:
    """One field over several files."""
    first, *others = paths
    several = any((other.layout, other.how) != (first.layout, first.how) for other in others)
    return replace(
        max((first, *others), key=lambda path: path.amplification),
        rows=first.rows + sum(other.rows for other in others),
        layout=f"{first.layout} (other files differ)" if several else first.layout,
        block_rows=max(first.block_rows, *(other.block_rows for other in others)) if others else first.block_rows,
        stored_bytes=first.stored_bytes + sum(other.stored_bytes for other in others),
        missing_chunks=first.missing_chunks + sum(other.missing_chunks for other in others),
        epoch_bytes=first.epoch_bytes + sum(other.epoch_bytes for other in others),
        far=first.far or any(other.far for other in others),
        mapped_files=first.mapped_files + sum(other.mapped_files for other in others),
        checked_by=first.checked_by if all(other.checked_by for other in others) else "",
    )


def _files(store: Store) -> int:
    if isinstance(store, Concat):
        return sum(map(_files, store.stores))
    if isinstance(store, Joined):
        return sum(_files(part.store) for part in store.parts.values())
    if isinstance(store, Wrapper):
        return _files(store.store)
    first = store.origin(0).url if len(store) else ""
    return 1 if is_remote(first) or os.path.exists(first) else 0


def unchecked(paths: Sequence[ReadPath]) -> tuple[str, ...]:
    """Fields of which a damaged byte would pass for data: their format has no checksum, and there is no manifest."""
    return tuple(path.field for path in paths if not path.checked_by)


def codecs(paths: Sequence[ReadPath]) -> str:
    """What the chunks of some fields were written through: ``shuffle, deflate``."""
    return "; ".join(dict.fromkeys(through for path in paths if (through := _through(path.layout))))


def _through(layout: str) -> str:
    """``chunks of 8 rows; shuffle, deflate; a file each`` -> ``shuffle, deflate``."""
    return layout.split("; ")[1] if "; " in layout else ""


def advice(paths: Sequence[ReadPath], *, in_blocks: bool, window_rows: int, quality: float | None) -> list[str]:
    """What a plan has to say about layouts in which rows come in blocks, in whole sentences."""
    worst = max(paths, key=lambda path: path.amplification, default=None)
    if worst is None or worst.block_rows < 2:
        return []
    stored = f"{worst.field!r} is stored {worst.block_rows:,} rows a chunk"
    times = f"{worst.amplification:,.0f} x what is delivered"
    if not in_blocks:
        again = f"{stored}: this order decodes each chunk again for every row of it, {times}"
        return [f"{again}. shuffle=True reads each chunk once"]
    naive = f"{stored}: rows read one by one would decode {times}"
    said = [f"{naive}. Here each chunk is decoded once an epoch, its rows mixed with those of {window_rows:,}"]
    if quality is not None and quality < GOOD_QUALITY:
        remedy = worst.remedy or "a copy with one row a chunk"
        said.append(
            f"The shuffle quality is {quality:.2f} (1.0 is uniform). A larger window= raises it, and takes memory. "
            f"{remedy} would make it 1.0, with each row read by itself; that pays where samples must be well mixed"
        )
    return said
