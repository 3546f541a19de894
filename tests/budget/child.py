"""Runs two shuffled epochs in a process of its own and prints what they held, sampled every 5 ms from before ``open``.

python child.py '{"betas": …, "stimuli": …, "batch_size": 8, "memory": null, "threads": 2}'

``memory`` null takes the smallest budget that is accepted.
"""

import json
import sys

import h5py  # noqa: F401  # libraries are loaded before the first look, as in a program that trains
import numpy as np
import torch

import penstock as ps
from penstock.errors import BudgetExceeded
from penstock.loader.loader import runtime_of
from penstock.testing.measure import MemoryWatch


def joined(job: dict) -> ps.Dataset:
    betas = ps.open(job["betas"])
    if job.get("mask"):
        mask = np.zeros(betas.fields["betas"].shape, bool)
        mask[::2, 3::5] = mask[1::4, :, ::7] = True
        betas = betas.select_within("betas", mask)
    if job.get("map") == "arrays":
        betas = betas.map(standardised)
    elif job.get("map") == "tensors":
        betas = betas.map_each(standardised_tensors)
    else:
        betas = betas.cast("betas", "float32", scale=1 / 300)
    stimuli = ps.open(job["stimuli"])
    rows = np.random.default_rng(0).integers(0, len(stimuli), len(betas))
    return ps.join(voxels=betas, images=(stimuli, rows), coco=rows)


def standardised(batch: dict) -> dict:
    """As people write it: several copies of the batch at once."""
    values = batch["betas"].astype(np.float32) / 300
    mean, spread = values.mean(axis=(1, 2, 3), keepdims=True), values.std(axis=(1, 2, 3), keepdims=True)
    return {"betas": (values - mean) / (spread + 1e-6)}


def standardised_tensors(sample: dict, rng: np.random.Generator) -> dict:
    """The same with torch, whose memory Python's tools do not see."""
    values = torch.from_numpy(sample["betas"]).float() / 300
    return {"betas": (values - values.mean()) / (values.std() + 1e-6)}


def smallest(job: dict) -> int:
    """The smallest budget that is accepted, as the refusal of one byte names it."""
    try:
        ps.Loader(
            joined(job), batch_size=job["batch_size"], memory=1, threads=job["threads"], shuffle=True,
            processes=job.get("processes", "auto"),
        )  # fmt: skip
    except BudgetExceeded as error:
        return int(str(error).split("(")[1].split(" bytes")[0].replace(",", ""))
    raise AssertionError("a budget of one byte was accepted")


def main(job: dict) -> None:
    torch.zeros(1000).sum()
    limit = job["memory"] or smallest(job)
    with MemoryWatch() as watch:
        loader = ps.Loader(
            joined(job), batch_size=job["batch_size"], memory=limit, threads=job["threads"], shuffle=True,
            columns=("voxels", "images", "coco"), processes=job.get("processes", "auto"),
        )  # fmt: skip
        runtime = runtime_of(loader)
        runtime.start_processes(60)
        total = 0.0
        for _ in range(2):
            for voxels, images, coco in loader:
                total += float(voxels.reshape(-1)[0]) + float(images[-1, 0, 0, 0]) + float(coco[0])
    plan, stats = loader.plan, loader.stats()
    held = {
        "processes": stats.processes, "seen": stats.peak_bytes,
        "limit": plan.limit_bytes,
        "planned": plan.planned_bytes,
        "peak": watch.peak_bytes,
        "samples": watch.samples,
    }  # fmt: skip
    used = {"batch": plan.batch_bytes, "slots": plan.slots, "threads": plan.threads, "reading": plan.holders["reading"]}
    print(json.dumps(held | used))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
