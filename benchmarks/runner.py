"""Runs contestants side by side: each in a fresh process, in turns, several rounds, medians compared.

A contestant is a function of this package that yields the number of samples of each batch, after touching one value of
each page of it, as a copy to a device would read it all. Time counts from the first batch to the end of the epoch;
memory is what the process tree held above its imports, sampled every 20 ms in a pass of its own.
"""

import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Contestant:
    """What runs: ``module:function`` of this package, and its arguments."""

    label: str
    target: str
    arguments: dict[str, Any]
    whole: bool = False
    """Whether time counts from the start, opening and first batch included: for layouts that are read in windows."""


@dataclass
class Result:
    label: str
    rates: list[float]
    peak_bytes: int = 0

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def side_by_side(contestants: list[Contestant], rounds: int = 3) -> list[Result]:
    """Every contestant once a round, in turns; then once more for memory."""
    results = [Result(each.label, []) for each in contestants]
    for _ in range(rounds):
        for contestant, result in zip(contestants, results, strict=True):
            result.rates.append(_child(contestant, watch=False)["rate"])
    for contestant, result in zip(contestants, results, strict=True):
        result.peak_bytes = _child(contestant, watch=True)["peak"]
    return results


def _child(contestant: Contestant, watch: bool) -> dict[str, Any]:
    job = json.dumps({**vars(contestant), "watch": watch})
    done = subprocess.run([sys.executable, "-m", __name__, job], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{contestant.label} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run(job: dict[str, Any]) -> dict[str, Any]:
    """In the child: one epoch."""
    import h5py  # noqa: F401  # libraries are imported before time or memory is counted
    import imagecodecs  # noqa: F401
    import torch  # noqa: F401

    from penstock.testing.measure import MemoryWatch

    module, name = job["target"].split(":")
    epoch = getattr(importlib.import_module(module), name)
    if not job["watch"]:
        return {"rate": _rate(epoch(**job["arguments"]), job["whole"]), "peak": 0}
    with MemoryWatch(0.02) as watch:
        for _ in epoch(**job["arguments"]):
            pass
    return {"rate": 0.0, "peak": watch.peak_bytes}


def _rate(batches: Iterator[int], whole: bool) -> float:
    if not whole:
        next(batches)
    began, samples = time.perf_counter(), 0
    for size in batches:
        samples += size
    return samples / (time.perf_counter() - began)


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
