"""Runs two shuffled epochs over any store in a process of its own, and prints what they held from before ``open``.

python array_child.py '{"path": …, "field": "data", "mask": false, "cast": true, "batch_size": 4, "threads": 2}'

Without "memory" the budget is the smallest that is accepted. Where an epoch is one batch, it is dropped before the next
epoch unless the job says "keep". Libraries are loaded, and have read something, before the
first look.
"""

import json
import sys

import google_crc32c  # noqa: F401
import imagecodecs  # noqa: F401
import numpy as np
import pyarrow.parquet  # noqa: F401
import torch

import penstock as ps
from penstock.errors import BudgetExceeded
from penstock.testing.measure import MemoryWatch


def opened(job: dict) -> ps.Dataset:
    field = job["field"]
    ds = ps.open(job["path"], fields=(field,))
    if job.get("mask"):
        mask = np.zeros(ds.fields[field].shape, bool)
        mask[::2, 3::5] = mask[1::4, :, ::7] = True
        ds = ds.select_within(field, mask)
    return ds.cast(field, "float32", scale=1 / 300) if job.get("cast") else ds


def loader(job: dict, memory: int) -> ps.Loader:
    return ps.Loader(
        opened(job), batch_size=job["batch_size"], memory=memory, threads=job["threads"], shuffle=True,
        columns=(job["field"],),
    )  # fmt: skip


def smallest(job: dict) -> int:
    """The smallest budget that is accepted, as the refusal of one byte names it."""
    try:
        loader(job, 1)
    except BudgetExceeded as error:
        return int(str(error).split("(")[1].split(" bytes")[0].replace(",", ""))
    raise AssertionError("a budget of one byte was accepted")


def main(job: dict) -> None:
    torch.zeros(1000).sum()
    if job.get("first"):
        ps.open(job["first"])[0]
    limit = job.get("memory") or smallest(job)
    with MemoryWatch() as watch:
        made, total, rows, refused = loader(job, limit), 0.0, 0, 0
        try:
            for _ in range(2):
                for (values,) in made:
                    total += float(values.reshape(-1)[0])
                    rows += len(values)
                if len(made) == 1 and not job.get("keep"):
                    del values
        except BudgetExceeded as error:
            refused = error.smallest_bytes or 0
    plan = made.plan
    print(
        json.dumps(
            {
                "limit": plan.limit_bytes,
                "planned": plan.planned_bytes,
                "peak": watch.peak_bytes,
                "samples": watch.samples,
                "batch": plan.batch_bytes,
                "rows": rows,
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
