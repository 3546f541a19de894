"""Prepares a subject, or trains from it, in a process of its own, and prints what that held, sampled every 5 ms.

python child.py '{"root": …, "what": "prepare" | "loader" | "subject", "memory": …, "columns": …, "options": {…}, …}'
"""

import json
import sys

import h5py  # noqa: F401  # libraries are loaded before the first look, as in a program that trains
import nibabel  # noqa: F401
import pandas  # noqa: F401
import scipy.io  # noqa: F401
import torch

from penstock.base.sizes import parse_size
from penstock.errors import BudgetExceeded
from penstock.nsd import NSD
from penstock.testing.measure import MemoryWatch


def smallest(ds) -> int:
    try:
        ds.loader(8, shuffle=True, memory=1)
    except BudgetExceeded as error:
        return error.smallest_bytes
    raise AssertionError("a budget of one byte was accepted")


def whole_subject(job: dict) -> None:
    """One epoch of voxels alone, opening included."""
    rows = 0
    with MemoryWatch() as watch:
        ds = NSD(job["root"], prepared=job["copies"]).dataset(("voxels",), **job["options"])
        with ds.loader(128, shuffle=True, memory=job["memory"], drop_last=True) as loader:
            for (voxels,) in loader:
                rows += len(voxels)
    limit = parse_size(job["memory"], argument="memory")
    print(json.dumps({"peak": watch.peak_bytes, "samples": watch.samples, "limit": limit, "rows": rows}))


def main(job: dict) -> None:
    torch.zeros(1000).sum()
    nsd = NSD(job["root"], prepared=job["copies"])
    if job["what"] == "prepare":
        assert nsd.trials_per_session  # opens a session: the table of its chunks is made here, once for all
        with MemoryWatch() as watch:
            nsd.prepare(None, memory=job["memory"])
        print(json.dumps({"peak": watch.peak_bytes, "samples": watch.samples}))
        return
    if job["what"] == "subject":
        whole_subject(job)
        return
    ds = nsd.dataset(job.get("columns", ("voxels", "coco")), **job["options"])
    limit = smallest(ds)
    with MemoryWatch() as watch, ds.loader(8, shuffle=True, memory=limit) as loader:
        for _ in range(2):
            for batch in loader:
                sum(float(column.reshape(-1)[0]) for column in batch)
    print(json.dumps({"peak": watch.peak_bytes, "samples": watch.samples, "limit": limit}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
