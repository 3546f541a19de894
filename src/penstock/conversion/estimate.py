"""How long a conversion takes and how large its output becomes: a part of the data is converted, and thrown away."""

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.base.dataclass import dataclass
from penstock.base.sizes import KiB, MiB, format_size
from penstock.base.spec import row_bytes
from penstock.conversion.attempt import Attempt
from penstock.conversion.compression import small_box
from penstock.conversion.plan import ConversionPlan, make_plan
from penstock.conversion.source import chunk_of
from penstock.conversion.tasks import Job
from penstock.conversion.work import writing
from penstock.dataset.dataset import Dataset
from penstock.dataset.explain import read_paths
from penstock.dataset.lazy import row_edges
from penstock.dataset.store import as_base
from penstock.errors import ConfigError
from penstock.loader.forecast import format_seconds

TRIAL_BYTES = (2 * MiB, 16 * MiB)
"""What is converted: a little for what every conversion takes, and more for what each byte takes."""
LEAST_CHUNK_BYTES = 64 * KiB
"""Smaller rows are advised to lie one after another, without compression: decoding them one by one takes several times
as long."""
PROCESS_S = 1.0
"""Measured: until processes that were started for tasks have imported what they need."""


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


class _Took(NamedTuple):
    """What a trial took."""

    bytes: int
    """Of values."""
    seconds: float
    cpu_s: float
    stored: int


def estimate(ds: Dataset, plan: ConversionPlan) -> Estimate:
    """By trials in this process, in the folder of the output; nothing is left there."""
    fields = [ds.only(name) for name in plan.cuts if name] if _is_cut(plan) else [ds]
    total = Estimate(PROCESS_S if plan.workers > 1 else 0.0, 0)
    for each in fields:
        found = _estimate(each, plan)
        total = Estimate(total.seconds + found.seconds, total.bytes + found.bytes)
    return total


def _is_cut(plan: ConversionPlan) -> bool:
    """Whether tasks convert part of each row."""
    return any(cut.box != cut.shape for cut in plan.cuts.values())


def _estimate(ds: Dataset, plan: ConversionPlan) -> Estimate:
    little, more = (_try(_part(ds, plan, size), plan) for size in TRIAL_BYTES)
    whole = len(ds) * row_bytes(ds.fields)
    stored = more.stored * whole // more.bytes
    each_s = more.seconds / more.bytes
    if more.bytes > little.bytes:
        each_s = max(each_s / 2, (more.seconds - little.seconds) / (more.bytes - little.bytes))
    on_cores = min(1.0, more.cpu_s / more.seconds)
    rest_s = each_s * (whole - more.bytes) * (on_cores / plan.workers + 1 - on_cores)
    return Estimate(more.seconds + rest_s, stored)


def _part(ds: Dataset, plan: ConversionPlan, size: int) -> Dataset:
    """About so many bytes of it: some rows, or where rows are cut, a part of each."""
    rows = int(row_edges(ds, size // max(1, row_bytes(ds.fields)))[1])
    some = ds if rows == len(ds) else ds.select(range(rows))
    name = next(iter(ds.fields))
    if not _is_cut(plan) or name in ds.axes:
        return some
    box = small_box(replace(plan.cuts[name], box=plan.cuts[name].shape), chunk_of(ds.delivered), rows, size)
    return some.select_within(name, tuple(slice(0, n) for n in box))


def _try(ds: Dataset, plan: ConversionPlan) -> _Took:
    """Convert a dataset beside the output, in this process."""
    folder, name = os.path.split(plan.goal)
    with writing(folder), tempfile.TemporaryDirectory(prefix=".penstock-trial-", dir=folder) as room:
        goal = os.path.join(room, name)
        job = Job(ds, make_plan(ds, goal, plan.options, plan.limit_bytes, 1), {"": {}})
        attempt = Attempt(job, ds, overwrite=False, restart=False)
        began, cpu = time.perf_counter(), time.process_time()
        attempt.run("serial", lambda done, total: None)
        took, on_cores = time.perf_counter() - began, time.process_time() - cpu
        sizes = (
            os.path.getsize(path) for path in _files(room) if not path.endswith((".manifest.json", ".provenance.json"))
        )
        return _Took(len(ds) * row_bytes(ds.fields), took, on_cores, sum(sizes))


def _files(folder: str) -> Iterator[str]:
    return (os.path.join(where, name) for where, _, names in os.walk(folder) for name in names)


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
