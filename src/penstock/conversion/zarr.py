"""Zarr v3: a group with an array for each field, in shards of compressed chunks. A task writes one shard."""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.conversion.attributes import for_json
from penstock.conversion.cut import Cut
from penstock.conversion.encode import BLOSC, LEVELS, Shard, shuffled_bytes
from penstock.conversion.source import Reader
from penstock.conversion.work import OutputFile, Work, Written
from penstock.dataset.held_values import HOLDS
from penstock.dataset.store import Store


def shard_name(field: str, place: tuple[int, ...]) -> str:
    """Where Zarr looks for a shard."""
    return "/".join([field, "c", *map(str, place)])


def write_shard(output: OutputFile, cut: Cut, store: Store, rows: range, *, verify: bool) -> None:
    """One shard: read by read, chunk by chunk."""
    shard = Shard(output, cut)
    (field,) = store.fields
    with Reader(store, min(cut.read_rows, len(rows))) as reader:
        for read in cut.reads(rows):
            first = (read.start - rows.start) // cut.chunk_rows
            shard.add(first, reader.read(read)[field], verify=verify)
    shard.finish()


def write_metadata(work: Work, cuts: Mapping[str, Cut], attributes: Mapping[str, Any]) -> list[Written]:
    """``zarr.json`` of the group, of groups in it, and of each array."""
    written = [_json(work, "zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": attributes[""]})]
    groups = {
        "/".join(parts[:depth]) for parts in (field.split("/") for field in cuts) for depth in range(1, len(parts))
    }
    for group in sorted(groups):
        empty = {"zarr_format": 3, "node_type": "group", "attributes": {}}
        written.append(_json(work, f"{group}/zarr.json", empty))
    for field, cut in cuts.items():
        written.append(_json(work, f"{field}/zarr.json", _array(cut, attributes.get(field, {}))))
    return written


def _json(work: Work, name: str, document: Mapping[str, Any]) -> Written:
    with work.whole(f"{os.path.basename(work.goal)}/{name}") as output:
        output.write(json.dumps(document, indent=2, default=for_json).encode())
        return Written(f"{os.path.basename(work.goal)}/{name}", output.size, output.digests())


def _array(cut: Cut, attributes: Mapping[str, Any]) -> dict[str, Any]:
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    first = plain if cut.values is None else {"name": "vlen-utf8", "configuration": {}}
    codecs = [first, *_compressor(cut), {"name": "crc32c"}]
    sharding = {
        "chunk_shape": cut.chunk_shape, "codecs": codecs, "index_codecs": [plain, {"name": "crc32c"}],
        "index_location": "end",
    }  # fmt: skip
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": (cut.rows, *cut.shape),
        "data_type": cut.dtype.name if cut.values is None else "string",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": cut.shard_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _zero(cut.dtype) if cut.values is None else "",
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": dict(attributes) | ({} if cut.values is None else {HOLDS: cut.values.holds}),
    }


def _compressor(cut: Cut) -> list[dict[str, Any]]:
    if cut.compression == "none":
        return []
    level = LEVELS[cut.compression]
    if cut.compression == "zstd":
        return [{"name": "zstd", "configuration": {"level": level, "checksum": False}}]
    how = {
        "cname": BLOSC["compressor"], "clevel": level, "shuffle": "bitshuffle", "blocksize": 0,
        "typesize": 1 if cut.values else shuffled_bytes(cut.dtype.itemsize),
    }  # fmt: skip
    return [{"name": "blosc", "configuration": how}]


def _zero(dtype: np.dtype) -> Any:
    return {"b": False, "f": 0.0, "c": [0.0, 0.0]}.get(dtype.kind, 0)
