"""How long a conversion takes and how large its output becomes, by a trial: one read, a few chunks, a small write."""

import os
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

from penstock.base.sizes import KiB, MiB, format_size
from penstock.conversion.cut import Cut
from penstock.conversion.encode import coder
from penstock.conversion.plan import ALL_FIELDS, COMPRESSIONS, ConversionPlan, part_store
from penstock.conversion.source import Reader
from penstock.conversion.work import writing
from penstock.dataset.dataset import Dataset
from penstock.dataset.explain import read_paths
from penstock.dataset.store import as_base
from penstock.errors import ConfigError
from penstock.loader.forecast import format_seconds

TRIAL_BYTES = 16 * MiB
"""What is compressed, and what is written, for a trial."""
NO_GAIN = 0.95
"""Values that stay larger than this share of themselves are not worth compressing."""
LEAST_CHUNK_BYTES = 4 * KiB
"""Smaller rows get no chunk of their own: they are advised to lie one after another, without compression."""
TAR_BYTES = 1536
"""Headers and padding of one field of one sample in a tar."""


@dataclass(frozen=True)
class Estimate:
    """What a conversion is expected to take."""

    seconds: float
    bytes: int
    """Of the output on disk."""

    def as_json(self) -> dict[str, Any]:
        return {"seconds": round(self.seconds, 3), "bytes": self.bytes}

    def __str__(self) -> str:
        return f"about {format_seconds(self.seconds)}, {format_size(self.bytes)} on disk"


@dataclass(frozen=True)
class _Rates:
    """Of one field."""

    read_s: float
    """Seconds to read all of it."""
    encode_s: float
    share: float
    """Bytes stored per byte of values."""


def estimate(ds: Dataset, plan: ConversionPlan) -> Estimate:
    """By a trial in this process, in the folder of the output; nothing is left there."""
    found = {name: _try_field(ds, plan, name, cut) for name, cut in plan.cuts.items()}
    stored = sum(int(plan.cuts[name].bytes * rates.share) for name, rates in found.items())
    if plan.options.format == "tar":
        stored += len(ds) * len(ds.fields) * TAR_BYTES
    work_s = sum(rates.read_s + rates.encode_s for rates in found.values()) / plan.workers
    return Estimate(work_s + stored / _write_rate(os.path.dirname(plan.goal)), stored)


def advised_name(ds: Dataset, name: str) -> str:
    """What to write: a name without an ending gets that of the format in which each row is read by itself.

    Refused where the plan says to keep the files.
    """
    if not any(path.block_rows > 1 for path in read_paths(as_base(ds.delivered))):
        raise ConfigError(
            'like="plan": the plan advises to keep these files as they are: each row is read by itself, so that a '
            "shuffled epoch reads every byte once. To convert them anyway, leave like= (--like) out"
        )
    if os.path.splitext(name.rstrip("/"))[1]:
        return name
    if any(spec.is_list for spec in ds.fields.values()):
        return f"{name.rstrip('/')}.tar"
    return f"{name.rstrip('/')}{'.zarr' if advised_rows(ds) == 1 else '.h5'}"


def advised_rows(ds: Dataset) -> int | None:
    """Rows per chunk: one, so that each is read by itself; None for rows that are too small for chunks of their own."""
    return 1 if max(spec.row_bytes for spec in ds.fields.values()) >= LEAST_CHUNK_BYTES else None


def advise(ds: Dataset, plan: ConversionPlan, *, keep_compression: bool) -> tuple[ConversionPlan, Estimate]:
    """The plan, without compression where that gains nothing, and what it is expected to take."""
    expected = estimate(ds, plan)
    if keep_compression or "none" not in COMPRESSIONS[plan.options.format] or expected.bytes < NO_GAIN * plan.bytes:
        return plan, expected
    plain = replace(plan, options=replace(plan.options, compression="none"))
    return plain, estimate(ds, plain)


def _try_field(ds: Dataset, plan: ConversionPlan, name: str, cut: Cut) -> _Rates:
    rows, part = cut.shard((0,) * len(cut.grid))
    read = next(cut.reads(rows))
    store = ds.delivered if name == ALL_FIELDS else part_store(ds, name, part)
    with Reader(store, len(read)) as reader:
        began = time.perf_counter()
        values = reader.read(read)
        read_s = time.perf_counter() - began
        if name == ALL_FIELDS:
            size = len(read) * max(1, cut.dtype.itemsize)
            return _Rates(read_s * cut.bytes / size, 0.0, 1.0)
        whole = values[name]
        sample = whole.reshape(-1)[: max(1, TRIAL_BYTES // whole.dtype.itemsize)].view("u1").data
        encode, _ = coder(plan.options.compression)
        began = time.perf_counter()
        step = max(1, cut.chunk_rows * cut.box_bytes)
        stored = sum(len(encode(sample[at : at + step])) for at in range(0, len(sample), step))
        encode_s = time.perf_counter() - began
        return _Rates(read_s * cut.bytes / whole.nbytes, encode_s * cut.bytes / len(sample), stored / len(sample))


def _write_rate(folder: str) -> float:
    """Bytes per second, on the disk and not only in memory."""
    with writing(folder), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        block = os.urandom(1 * MiB)
        began = time.perf_counter()
        for _ in range(TRIAL_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        return TRIAL_BYTES / (time.perf_counter() - began)
