"""Runs two shuffled epochs of several datasets in a process of its own and prints what they held, from before ``open``.

python multi_child.py '{"folder": …, "mode": "together", "batch_size": 4, "memory": null, "threads": 2, "pad": false}'

``memory`` null takes the smallest budget that is accepted.
"""

import json
import sys
from pathlib import Path
from typing import Any

import h5py  # noqa: F401  # libraries are loaded before the first look, as in a program that trains
import numpy as np
import torch

import penstock as ps
from penstock.errors import BudgetExceeded
from penstock.testing.measure import MemoryWatch


def subjects(job: dict) -> dict[str, ps.Dataset]:
    stimuli = ps.open(Path(job["folder"]) / "stimuli.hdf5")
    found = {}
    for path in sorted(Path(job["folder"]).glob("subj*")):
        betas = ps.open(path).cast("betas", "float32", scale=1 / 300)
        if job["pad"]:
            betas = betas.pad("betas", to=700_000)
        rows = np.random.default_rng(0).integers(0, len(stimuli), len(betas))
        found[path.stem] = ps.join(voxels=betas, images=(stimuli, rows), coco=rows)
    return found


def make(job: dict, memory: int) -> Any:
    options = {"batch_size": job["batch_size"], "memory": memory, "threads": job["threads"], "shuffle": True}
    if job["pad"]:
        return ps.Loader(ps.concat(subjects(job).values()), **options)
    return ps.MultiLoader(subjects(job), mode=job["mode"], samples=job["samples"], **options)


def smallest(job: dict) -> int:
    """The smallest budget that is accepted, as the refusal of one byte names it."""
    try:
        make(job, 1)
    except BudgetExceeded as error:
        return int(str(error).split("(")[1].split(" bytes")[0].replace(",", ""))
    raise AssertionError("a budget of one byte was accepted")


def main(job: dict) -> None:
    torch.zeros(1000).sum()
    limit = job["memory"] or smallest(job)
    total, rows = 0.0, 0
    with MemoryWatch() as watch:
        loader = make(job, limit)
        for _ in range(2):
            for step in loader:
                batches = [step] if job["pad"] else step.values() if job["mode"] == "together" else [step[1]]
                for batch in batches:
                    total += float(batch["voxels"].sum()) + float(batch["images"][-1, 0, 0, 0])
                    rows += len(batch["coco"])
    plan = loader.plan
    batch = plan.batch_bytes if job["pad"] else sum(each.batch_bytes for each in plan.plans.values())
    held = {"limit": plan.limit_bytes, "planned": plan.planned_bytes, "peak": watch.peak_bytes}
    print(json.dumps(held | {"samples": watch.samples, "batch": batch, "rows": rows, "threads": plan.threads}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
