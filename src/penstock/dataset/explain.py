"""What a dataset contains and how it will be read, from the files' metadata alone."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from penstock.base import html
from penstock.base.dataclass import dataclass
from penstock.base.sizes import format_size
from penstock.base.spec import IN_MEMORY, ReadPath
from penstock.base.urls import is_remote
from penstock.dataset.store import StoreBase, Wrapper

# Below this shuffle quality, a plan says how to improve it.
GOOD_QUALITY = 0.9


@dataclass(frozen=True, repr=False)
class Inspection:
    """What files contain and how each field will be read: ``print(penstock.inspect(path))``."""

    rows: int
    files: int
    paths: Sequence[ReadPath]
    left_out: Sequence[str]
    """Why files are missing."""
    fields_left_out: Mapping[str, str] = field(default_factory=dict)
    """Fields of the files that cannot be delivered, and why."""

    @property
    def _summary(self) -> str:
        return f"{self.rows:,} rows in {self.files:,} {'file' if self.files == 1 else 'files'}"

    @property
    def _left_out_lines(self) -> list[str]:
        fields = [f"left out: field {name!r}: {why}" for name, why in self.fields_left_out.items()]
        return [*fields, *(f"left out: {why}" for why in self.left_out)]

    def __str__(self) -> str:
        lines = [self._summary]
        for path in self.paths:
            raw = path.rows * path.spec.row_bytes
            ratio = f", compressed {raw / path.stored_bytes:.1f} x" if 0 < path.stored_bytes < 0.95 * raw else ""
            lines += [
                f"{path.field}: {path.spec}, {format_size(raw)} in all{ratio}",
                f"  stored     {path.layout}",
                f"  read       {path.how}{', over the network' if path.is_far else ''}",
            ]
            if path.checked_by not in ("", IN_MEMORY):
                lines.append(f"  checked    by {path.checked_by}")
            if path.amplification > 1.05:
                lines.append(f"  at random  {path.amplification:,.1f} bytes read per byte delivered, row by row")
            if path.missing_chunks:
                lines.append(f"  missing    {path.missing_chunks:,} chunks were never written")
            if path.remedy:
                lines.append(f"  rewriting  {path.remedy} would let each row be read by itself")
        return "\n".join([*lines, *self._left_out_lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (path.field, path.spec, format_size(path.rows * path.spec.row_bytes), path.layout, path.how)
            for path in self.paths
        ]
        text = html.paragraph(self._summary)
        text += html.table(("field", "holds", "in all", "stored", "read"), rows)
        return text + (html.paragraph("\n".join(self._left_out_lines)) if self._left_out_lines else "")

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, sizes in bytes."""
        return {
            "rows": self.rows,
            "files": self.files,
            "fields": {path.field: _as_json(path) for path in self.paths},
            "fields_left_out": dict(self.fields_left_out),
            "files_left_out": list(self.left_out),
        }


def _as_json(path: ReadPath) -> dict[str, Any]:
    spec = path.spec
    return {
        "dtype": spec.holds if spec.is_list else str(spec.dtype), "shape": list(spec.shape),
        "sample_bytes": spec.row_bytes, "delivered_bytes": path.rows * spec.row_bytes,
        "stored_bytes": path.stored_bytes, "layout": path.layout, "read": path.how, "network": path.is_far,
        "checked_by": "" if path.checked_by == IN_MEMORY else path.checked_by, "block_rows": path.block_rows,
        "amplification": path.amplification, "missing_chunks": path.missing_chunks, "remedy": path.remedy,
    }  # fmt: skip


def read_paths(store: StoreBase) -> list[ReadPath]:
    """How each field of a store is read, whatever the store is made of."""
    if not store.branches():
        return list(store.read_paths())
    found: dict[str, list[ReadPath]] = {}
    for child, names in store.branches():
        below = {path.field: path for path in read_paths(child)}
        for new, old in names.items():
            if old in below:
                found.setdefault(new, []).append(replace(below[old], field=new))
    paths = [replace(_merge_paths(parts), rows=len(store)) for parts in found.values()]
    return list(map(store.describe_path, paths)) if isinstance(store, Wrapper) else paths


def epoch_bytes(store: StoreBase) -> dict[str, int]:
    """Bytes read for each field if each block (or row, without blocks) is read once, whatever the store is made of."""
    if not store.branches():
        return dict(store.epoch_bytes())
    rows, found = dict[str, int](), dict[str, int]()
    for child, names in store.branches():
        below = epoch_bytes(child)
        for new, old in names.items():
            if old in below:
                rows[new] = rows.get(new, 0) + len(child)
                found[new] = found.get(new, 0) + below[old]
    return {name: bytes_ * len(store) // max(1, rows[name]) for name, bytes_ in found.items()}


def _merge_paths(paths: Iterable[ReadPath]) -> ReadPath:
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
        is_far=first.is_far or any(other.is_far for other in others),
        mapped_files=first.mapped_files + sum(other.mapped_files for other in others),
        checked_by=first.checked_by if all(other.checked_by for other in others) else "",
    )


def count_files(store: StoreBase) -> int:
    """How many files the rows come from."""
    if store.branches():
        return sum(map(count_files, store.children))
    first = store.origin(0).url if len(store) else ""
    return 1 if is_remote(first) or os.path.exists(first) else 0


def unchecked(paths: Sequence[ReadPath]) -> tuple[str, ...]:
    """Fields without a checksum or a manifest, so that a damaged byte would pass for data."""
    return tuple(path.field for path in paths if not path.checked_by)


def codecs(paths: Sequence[ReadPath]) -> str:
    """The codecs that the chunks of some fields were written with: ``shuffle, deflate``."""
    return "; ".join(dict.fromkeys(path.codecs for path in paths if path.codecs))


def advice(paths: Sequence[ReadPath], *, in_blocks: bool, window_rows: int, quality: float | None) -> list[str]:
    """Advice for layouts in which rows come in blocks, in whole sentences."""
    worst = max(paths, key=lambda path: path.amplification, default=None)
    if worst is None or worst.block_rows < 2:
        return []
    stored = f"{worst.field!r} is stored in chunks of {worst.block_rows:,} rows"
    times = f"{worst.amplification:,.0f} x the bytes that are delivered"
    if not in_blocks:
        again = f"{stored}: this order decodes each chunk again for every row of it, {times}"
        return [f"{again}. shuffle=True reads each chunk once"]
    naive = f"{stored}: reading row by row would decode {times}"
    lines = [f"{naive}. Here each chunk is decoded once per epoch, and rows are mixed in windows of {window_rows:,}"]
    if quality is not None and quality < GOOD_QUALITY:
        remedy = worst.remedy or "a copy with one row per chunk"
        lines.append(
            f"The shuffle quality is {quality:.2f} (1.0 is uniform). A larger window= raises it, and needs more "
            f"memory. {remedy} would make it 1.0, because each row could then be read by itself"
        )
    return lines
