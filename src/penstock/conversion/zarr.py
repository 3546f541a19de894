"""Zarr v3: a group with an array for each field, in shards of compressed chunks. A task writes one shard."""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.conversion.cut import Cut
from penstock.conversion.encode import LEVELS, Shard
from penstock.conversion.source import Reader
from penstock.conversion.work import Output, Work, Written
from penstock.dataset.store import Store


def shard_name(field: str, place: tuple[int, ...]) -> str:
    """Where Zarr looks for a shard."""
    return "/".join([field, "c", *map(str, place)])


def write_shard(output: Output, cut: Cut, store: Store, rows: range, *, compression: str, verify: bool) -> None:
    """One shard: read by read, chunk by chunk."""
    shard = Shard(output, cut.shard_shape, cut.chunk_shape, compression)
    (field,) = store.fields
    with Reader(store, min(cut.read_rows, len(rows))) as reader:
        for read in cut.reads(rows):
            values = reader.read(read)[field]
            first = (read.start - rows.start) // cut.chunk_rows
            for number, begin in enumerate(range(0, len(read), cut.chunk_rows)):
                shard.add(first + number, values[begin : begin + cut.chunk_rows], verify=verify)
    shard.finish()


def write_metadata(
    work: Work, cuts: Mapping[str, Cut], compression: str, attributes: Mapping[str, Any]
) -> list[Written]:
    """``zarr.json`` of the group, of groups in it, and of each array."""
    written = [_json(work, "zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": attributes[""]})]
    groups = {
        "/".join(parts[:depth]) for parts in (field.split("/") for field in cuts) for depth in range(1, len(parts))
    }
    for group in sorted(groups):
        empty = {"zarr_format": 3, "node_type": "group", "attributes": {}}
        written.append(_json(work, f"{group}/zarr.json", empty))
    for field, cut in cuts.items():
        written.append(_json(work, f"{field}/zarr.json", _array(cut, compression, attributes.get(field, {}))))
    return written


def _json(work: Work, name: str, document: Mapping[str, Any]) -> Written:
    with work.whole(f"{os.path.basename(work.goal)}/{name}") as output:
        output.write(json.dumps(document, indent=2).encode())
        return Written(f"{os.path.basename(work.goal)}/{name}", output.size, output.digests())


def _array(cut: Cut, compression: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    packed = [{"name": "zstd", "configuration": {"level": LEVELS["zstd"], "checksum": False}}]
    codecs = [plain, *(packed if compression == "zstd" else []), {"name": "crc32c"}]
    sharding = {
        "chunk_shape": cut.chunk_shape, "codecs": codecs, "index_codecs": [plain, {"name": "crc32c"}],
        "index_location": "end",
    }  # fmt: skip
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": (cut.rows, *cut.shape),
        "data_type": cut.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": cut.shard_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _zero(cut.dtype),
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": attributes,
    }


def _zero(dtype: np.dtype) -> Any:
    return {"b": False, "f": 0.0, "c": [0.0, 0.0]}.get(dtype.kind, 0)
