"""Runs two shuffled epochs over any files in a process of its own, and prints what they held from before ``open``.

python files_child.py '{"path": …, "open": {}, "cast": ["jpg"], "batch_size": 8, "memory": null, "threads": 2}'

``open`` has options of ``penstock.open``; ``memory`` null takes the smallest budget that is accepted; ``crop`` names a
field of which nine tenths of each axis are read, ``mask`` one of which every third element is.
"""

import importlib
import json
import sys
from functools import cache

import imagecodecs  # libraries are loaded before the first look, as in a program that trains
import numpy as np
from PIL import Image

import penstock as ps
from penstock.errors import BudgetExceeded
from penstock.testing.measure import MemoryWatch


def opened(job: dict) -> ps.Dataset:
    options = {"index_dir": False, **job.get("open", {})}
    if "decoders" in options:
        options["decoders"] = {name: (dtype, tuple(shape)) for name, (dtype, shape) in options["decoders"].items()}
    ds = ps.open(job["path"], **options)
    if field := job.get("crop"):
        ds = ds.select_within(field, tuple(slice(0, -(-size * 9 // 10)) for size in ds.fields[field].shape))
    if field := job.get("mask"):
        ds = ds.select_within(field, thirds(ds.fields[field].shape))
    for field in job.get("cast", ()):
        ds = ds.cast(field, "float32", scale=1 / 255)
    return ds


def made(job: dict, memory: int) -> ps.Loader:
    options = {"batch_size": job["batch_size"], "threads": job["threads"], "output": "numpy"}
    return ps.Loader(opened(job), memory=memory, shuffle=True, **options)


@cache
def thirds(shape: tuple[int, ...]) -> np.ndarray:
    """A mask of every third element: the caller's own, so made before memory is looked at."""
    mask = np.zeros(shape, bool)
    mask.reshape(-1)[::3] = True
    return mask


def smallest(job: dict) -> int:
    """The smallest budget that is accepted, as the refusal of one byte names it."""
    try:
        made(job, 1)
    except BudgetExceeded as error:
        return int(str(error).split("(")[1].split(" bytes")[0].replace(",", ""))
    raise AssertionError("a budget of one byte was accepted")


def warm_up() -> None:
    """What the libraries take for themselves once."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    imagecodecs.jpeg8_decode(imagecodecs.jpeg8_encode(pixels))
    imagecodecs.png_decode(imagecodecs.png_encode(pixels))
    Image.init()


def main(job: dict) -> None:
    warm_up()
    if job["path"].endswith(".tiledb"):
        importlib.import_module("tiledb")  # its contexts are the loader's to count, itself it is not
    limit = job["memory"] or smallest(job)
    total, rows = 0.0, 0
    with MemoryWatch() as watch:
        loader = made(job, limit)
        for _ in range(2):
            for batch in loader:
                total += sum(float(v.reshape(-1)[0]) for v in batch.values() if isinstance(v, np.ndarray))
                rows += len(next(iter(batch.values())))
    plan = loader.plan
    held = {"limit": plan.limit_bytes, "planned": plan.planned_bytes, "peak": watch.peak_bytes, "rows": rows}
    used = {"samples": watch.samples, "batch": plan.batch_bytes, "slots": plan.slots, "threads": plan.threads}
    print(json.dumps(held | used))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
