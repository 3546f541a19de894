"""python -m benchmarks.first_batch [--data FOLDER] [--runs 10]: how soon the first batch of a whole subject comes.

Subject 1 at its true size, stored by voxel, voxels alone, 26,880 samples. Each figure is from a process of its own:

first batch   from the root's path to the first batch, opening included; tables were saved by an earlier run
one window    the sessions that are mixed first, read into fresh memory by as many threads; everything is open before
its bytes     the byte ranges of these sessions, read by as many threads from the page cache, and put nowhere
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

MEMORY = ("320MiB", "256MiB")
PIECE_BYTES = 1 << 20
GAP_BYTES = 4096
OPTIONS = {"dtype": "float16", "split": "mindeye2/train"}


def opened(root: str, memory: str) -> Any:
    from penstock.nsd import NSD

    ds = NSD(root, prepared=os.path.join(root, "no copies")).dataset(("voxels",), **OPTIONS)
    return ds.loader(128, shuffle=True, memory=memory, drop_last=True)


def first_batch(root: str, memory: str) -> float:
    began = time.perf_counter()
    with opened(root, memory) as loader:
        (voxels,) = next(iter(loader))
        seconds = time.perf_counter() - began
        assert voxels.shape[0] == 128
    return seconds


def mixed_sessions(loader: Any) -> int:
    """Whole sessions in a window."""
    blocks = loader._source.store.blocks
    return int(loader.plan.window_rows // np.diff(blocks).max())


def one_window(root: str, memory: str) -> float:
    """Each thread reads its share of every session, as the loader's threads do."""
    with opened(root, memory) as loader:
        store, threads, sessions = loader._source.store, loader.plan.threads, mixed_sessions(loader)
    rows = np.arange(store.blocks[sessions])
    blocks = np.split(rows, store.blocks[1:sessions])

    def read(number: int, out: dict[str, Any]) -> None:
        for some in blocks:
            store.read(some, some, out, (number, threads))

    began = time.perf_counter()
    out = {name: spec.empty(len(rows)) for name, spec in store.fields.items()}
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda number: read(number, out), range(threads)))
    return time.perf_counter() - began


def its_bytes(root: str, memory: str) -> float:
    """Neighbouring chunks are read in one call, as the loader does."""
    with opened(root, memory) as loader:
        threads, sessions = loader.plan.threads, mixed_sessions(loader)
    ranges = [each for session in range(1, sessions + 1) for each in byte_ranges(root, session)]
    descriptors = {path: os.open(path, os.O_RDONLY) for path, _, _ in ranges}

    def read(number: int) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        for path, begin, length in ranges[number::threads]:
            os.preadv(descriptors[path], [buffer[:length]], begin)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    return time.perf_counter() - began


def byte_ranges(root: str, session: int) -> list[tuple[str, int, int]]:
    """Where the region's chunks of a session are: path, offset and length, neighbours together."""
    from penstock.nsd import NSD
    from penstock.read.coalesce import plan_spans

    nsd = NSD(root)
    store = nsd.betas(nsd.voxels("nsdgeneral"), [session]).store.children[0]
    array, part = store._arrays["betas"], store._parts["betas"]
    offsets, lengths, _ = array.table.find(0, part.flat)
    together = plan_spans(offsets, lengths, np.arange(len(offsets)), GAP_BYTES, PIECE_BYTES)
    return [(array.file.path, each.begin, each.end - each.begin) for each in together]


def in_a_process(what: str, root: str, memory: str) -> float:
    program = [sys.executable, "-m", "benchmarks.first_batch", "--measure", what, "--root", root, "--memory", memory]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(program, check=True, capture_output=True, text=True, env=env)
    return float(json.loads(done.stdout))


def measure(what: str, root: str, memory: str) -> float:
    import h5py  # noqa: F401  # libraries are loaded before the clock starts
    import nibabel  # noqa: F401
    import pandas  # noqa: F401
    import scipy.io  # noqa: F401
    import torch

    import penstock.nsd.subject  # noqa: F401

    torch.zeros(1000).sum()
    return MEASURES[what](root, memory)


MEASURES = {"first": first_batch, "window": one_window, "bytes": its_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_batch", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent / "data")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--measure", choices=("first", "window", "bytes"), help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.root, args.memory)))
        return
    from benchmarks.nsd import make_subject

    root = str(make_subject(args.data))
    for memory in MEMORY:
        in_a_process("first", root, memory)  # saves tables, and brings the bytes into the page cache
        found = [{what: in_a_process(what, root, memory) for what in MEASURES} for _ in range(args.runs)]
        median = {what: statistics.median(each[what] for each in found) for what in MEASURES}
        worst = max(each["first"] for each in found)
        print(
            f"{memory}: one window {median['window'] * 1e3:.0f} ms (its bytes {median['bytes'] * 1e3:.0f} ms); first "
            f"batch {median['first'] * 1e3:.0f} ms, {median['first'] / median['window']:.2f} x; worst of {args.runs} "
            f"{worst * 1e3:.0f} ms, {worst / median['window']:.2f} x",
            flush=True,
        )


if __name__ == "__main__":
    main()
