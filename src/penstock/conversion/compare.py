"""The output, opened as any reader would open it, compared with the source, which is read once more."""

import hashlib
from collections.abc import Iterator

import numpy as np

from penstock.conversion.plan import ALL_FIELDS, Task
from penstock.conversion.rows import add_values, tar_names
from penstock.conversion.source import Reader, part_store
from penstock.conversion.tasks import Job, file_name
from penstock.dataset.dataset import Dataset
from penstock.dataset.store import Store
from penstock.errors import ConvertFailed
from penstock.files.files import Files
from penstock.formats.open import open_quietly
from penstock.formats.parquet import Parquet, TableStore


def compare_task(job: Job, task: Task) -> None:
    """Refuse an output whose rows of one task differ from the source's."""
    cut = job.plan.cuts[task.field]
    rows, part = cut.shard(task.place)
    steps = [rows[begin : begin + cut.read_rows] for begin in range(0, len(rows), cut.read_rows)]
    source: Store
    output: Store
    if task.field == ALL_FIELDS:
        written = _open(job, file_name(job.name, task.place[0]))
        source, output, shift = job.ds.delivered, written.delivered, rows.start
    else:
        written = _open(job, job.name)
        source, output, shift = part_store(job.ds, task.field, part), part_store(written, task.field, part), 0
    moved = [range(step.start - shift, step.stop - shift) for step in steps]
    for step, one, other in zip(steps, list(_digests(source, steps)), _digests(output, moved), strict=True):
        if one != other:
            raise ConvertFailed(
                f"{job.plan.goal}: rows {step.start:,} to {step.stop - 1:,}{f' of {task.field!r}' * bool(task.field)} "
                f"are not those of the source: the disk or the memory is damaged, or the source was changed. The "
                f"output is not used; convert again with restart=True (--restart)"
            )


def _open(job: Job, name: str) -> Dataset:
    """What was written, with the names of the source."""
    path, fields, kind = job.work.data(name), job.ds.fields, job.plan.options.format
    if kind == "npy":
        return open_quietly(path).rename(**{next(iter(fields)): next(iter(open_quietly(path).fields))})
    if kind == "parquet" and not any(spec.is_list for spec in fields.values()):
        return Dataset(TableStore(Parquet(Files().identify(path)), fields))  # a small table would be held in memory
    if kind not in ("tar", "lmdb"):
        return open_quietly(path, fields=tuple(fields))
    names = tar_names(fields)
    lists = {names[name]: spec.holds for name, spec in fields.items() if spec.is_list}
    found = open_quietly(path, fields=tuple(names.values()), index_dir=False, decoders=lists)
    return found.rename(**{name: stored for name, stored in names.items() if name != stored})


def _digests(store: Store, steps: list[range]) -> Iterator[bytes]:
    """Of the values of some rows at a time."""
    with Reader(store, max(map(len, steps))) as reader:
        for step in steps:
            found = hashlib.blake2b(usedforsecurity=False)
            for name, values in sorted(reader.read(step).items()):
                if values.dtype.hasobject:
                    add_values(found, {name: values})
                else:
                    found.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            yield found.digest()
