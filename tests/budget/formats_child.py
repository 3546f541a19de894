"""Runs two shuffled epochs over any dataset in a process of its own, and prints what they held from before ``open``.

python formats_child.py '{"path": …, "options": {}, "cast": ["image"], "batch_size": 8, "memory": null, "threads": 2}'

``memory`` null takes the smallest budget that is accepted.
"""

import json
import sys

import imagecodecs  # libraries are loaded before the first look, as in a program that trains
import numpy as np

import penstock as ps
import tiledb
from penstock.errors import BudgetExceeded
from penstock.measure import MemoryWatch


def made(job: dict, memory: int) -> ps.Loader:
    options = job.get("options", {})
    if "decoders" in options:
        options["decoders"] = {name: (dtype, tuple(shape)) for name, (dtype, shape) in options["decoders"].items()}
    ds = ps.open(job["path"], **options)
    for field in job.get("cast", ()):
        ds = ds.cast(field, "float32", scale=1 / 255)
    return ps.Loader(
        ds, memory=memory, shuffle=True, batch_size=job["batch_size"], threads=job["threads"], output="numpy"
    )


def smallest(job: dict) -> int:
    """The smallest budget that is accepted, as the refusal of one byte names it."""
    try:
        made(job, 1)
    except BudgetExceeded as error:
        return int(str(error).split("(")[1].split(" bytes")[0].replace(",", ""))
    raise AssertionError("a budget of one byte was accepted")


def main(job: dict) -> None:
    imagecodecs.jpeg8_decode(imagecodecs.jpeg8_encode(np.zeros((8, 8, 3), np.uint8)))
    assert tiledb.Ctx  # its contexts are the loader's to count
    limit = job["memory"] or smallest(job)
    total, rows = 0.0, 0
    with MemoryWatch() as watch:
        loader = made(job, limit)
        for _ in range(2):
            for batch in loader:
                total += sum(float(values.reshape(-1)[0]) for values in batch.values())
                rows += len(next(iter(batch.values())))
    plan = loader.plan
    held = {"limit": plan.limit_bytes, "planned": plan.planned_bytes, "peak": watch.peak_bytes, "rows": rows}
    used = {"samples": watch.samples, "batch": plan.batch_bytes, "slots": plan.slots, "threads": plan.threads}
    print(json.dumps(held | used))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
