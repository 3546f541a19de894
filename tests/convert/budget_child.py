"""Converts in a process of its own and prints what the process tree held, sampled every 5 ms.

python budget_child.py '{"source": …, "row_axis": 1, "goal": …, "memory": null, "options": {}}'

``memory`` null takes the smallest budget that is accepted.
"""

import json
import sys

import h5py  # noqa: F401  # libraries are loaded before the first look, as in a program that trains
import numpy as np  # noqa: F401

import penstock as ps
from penstock.errors import BudgetExceeded
from penstock.testing.measure import MemoryWatch


def smallest(ds: ps.Dataset, job: dict) -> int:
    """The smallest budget that is accepted, as the refusal of one byte names it."""
    try:
        ps.convert(ds, job["goal"], memory=1, dry_run=True, **job["options"])
    except BudgetExceeded as error:
        return int(str(error).split("(")[1].split(" bytes")[0].replace(",", ""))
    raise AssertionError("a budget of one byte was accepted")


def main(job: dict) -> None:
    limit = job["memory"] or smallest(ps.open(job["source"], row_axis=job["row_axis"]), job)
    with MemoryWatch() as watch:
        ds = ps.open(job["source"], row_axis=job["row_axis"])
        done = ps.convert(ds, job["goal"], memory=limit, **job["options"])
    print(
        json.dumps({"limit": limit, "peak": watch.peak_bytes, "workers": done.plan.workers, "tasks": done.plan.tasks})
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
