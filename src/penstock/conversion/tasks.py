"""One task, from reading to the note that it is done: what an engine runs, here or on another machine."""

import os
from dataclasses import field
from typing import Any

from penstock.base import counters
from penstock.base.dataclass import dataclass
from penstock.conversion import hdf5, lmdb, ranges, rows, zarr
from penstock.conversion.plan import ALL_FIELDS, NUMBERED, ConversionPlan, Task, has_fixed_places
from penstock.conversion.source import part_store
from penstock.conversion.work import Work, Written, boot_id, writing
from penstock.dataset.dataset import Dataset


@dataclass(frozen=True)
class Job:
    """A dataset, and what becomes of it. It pickles, so that any engine can run tasks of it."""

    ds: Dataset
    plan: ConversionPlan
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of arrays, by field; of the whole under the empty name."""
    is_spread: bool = False
    """Whether other machines may run tasks of it."""

    @property
    def work(self) -> Work:
        return Work(self.plan.goal)

    @property
    def name(self) -> str:
        """The file name of the output, in its folder."""
        return os.path.basename(os.path.abspath(self.plan.goal))

    @property
    def has_fixed_places(self) -> bool:
        """Whether tasks fill places of one file."""
        return has_fixed_places(self.plan.options, self.ds.fields)


def prepare_outputs(job: Job) -> None:
    """Make the files that tasks fill, unless they are there."""
    plan, work = job.plan, job.work
    if plan.options.format == "npy":
        (cut,) = plan.cuts.values()
        ranges.make_npy(work, job.name, cut)
    elif job.has_fixed_places:
        hdf5.make_plain(work, job.name, plan.cuts, job.attributes)


@dataclass(frozen=True)
class Done:
    """What a task did."""

    number: int
    value_bytes: int
    bytes_read: int
    bytes_written: int


def run_task(job: Job, task: Task) -> Done:
    """Write one output, verify it, and note that it is done."""
    counters.collect()
    write = _write_samples if task.field == ALL_FIELDS else _fill_places if job.has_fixed_places else _write_shard
    files, written, value_bytes = write(job, task)
    read = counters.collect().bytes_read
    boot = "" if files or job.is_spread else boot_id()
    job.work.note(task.number, files, {"bytes_read": read, "bytes_written": written, "boot": boot})
    return Done(task.number, value_bytes, read, written)


WRITERS = {"tar": rows.write_tar, "parquet": rows.write_parquet, "lmdb": lmdb.write_lmdb}

_Wrote = tuple[list[Written], int, int]


def _write_shard(job: Job, task: Task) -> _Wrote:
    cut, options = job.plan.cuts[task.field], job.plan.options
    rows_, part = cut.shard(task.place)
    store = part_store(job.ds, task.field, part)
    if options.format == "zarr":
        name = f"{job.name}/{zarr.shard_name(task.field, task.place)}"
    else:
        name = hdf5.piece_name(task.field, task.place)
    with job.work.whole(name) as output:
        zarr.write_shard(output, cut, store, rows_, verify=options.verify)
        found = Written(name, output.size, output.digests())
    values = len(rows_) * sum(spec.row_bytes for spec in store.fields.values())
    return [found], found.size, values


def _fill_places(job: Job, task: Task) -> _Wrote:
    cut, options = job.plan.cuts[task.field], job.plan.options
    rows_, part = cut.shard(task.place)
    path = job.work.data(job.name)
    offset = len(ranges.npy_header(cut)) if options.format == "npy" else hdf5.offset_of(path, task.field)
    store = part_store(job.ds, task.field, part)
    places = ranges.Places(path, offset, options.verify, job.is_spread)
    written = ranges.fill(places, cut, store, rows_, part)
    return [], written, written


def _write_samples(job: Job, task: Task) -> _Wrote:
    cut, options, work = job.plan.cuts[task.field], job.plan.options, job.work
    rows_, _ = cut.shard(task.place)
    name = file_name(job.name, task.place[0])
    partial = work.partial(str(task.number), f".{options.format}")
    store = job.ds.delivered
    write = WRITERS[options.format]
    with writing(work.goal):
        try:
            values = write(partial, cut, store, rows_)
            if options.verify:
                read = counters.collect()
                rows.CHECKS[options.format](partial, values, job.ds.fields, cut.read_rows)
                counters.collect()
                counters.mine().add(read)  # what comes from the source is what counts
            found = Written(name, os.path.getsize(partial), rows.digests_of(partial))
            with open(partial, "r+b") as file:
                os.fsync(file.fileno())
            os.replace(partial, work.data(name))
        finally:
            if os.path.exists(partial):
                os.unlink(partial)
    return [found], found.size, len(rows_) * cut.dtype.itemsize


def file_name(goal: str, number: int) -> str:
    """``train-%06d.tar`` -> ``train-000007.tar``; other names stay."""
    return NUMBERED.sub(lambda found: found[0] % number, goal, count=1)
