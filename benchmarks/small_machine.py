"""python -m benchmarks.small_machine [--rounds 3] [--only WORDS …] [--grain PYTHON] [--data FOLDER]: ordinary work on
few cores, beside other loaders and beside threads without a loader.

Everything runs in a process of its own, in turns, for a few seconds after its first batch; medians of all rounds count.
All sides read one value per page of every batch, with one thread of torch's: more would wait for cores that are busy
reading. Grain has dependencies of its own: install it with torch, h5py, imagecodecs, pillow and array_record into
another environment, and give that environment's Python.

Each case says what is wanted of its first line. The last lines name the cases that fall short. It takes 15 minutes, and
three more on first use, when data are made.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.small_data import make_all
from penstock.base.sizes import format_size

HERE = Path(__file__).resolve().parent
SECONDS = 2.5
# A process that takes longer is ended, and counts as failed: one that hangs must not hold up the others.
PROCESS_S = 120

OURS, OTHERS, BARE = "benchmarks.small_ours", "benchmarks.small_others", "benchmarks.bare"


@dataclass(frozen=True)
class Runner:
    """One line of a case: ``module:function`` and its arguments."""

    label: str
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable


@dataclass(frozen=True)
class Goal:
    """A number that the first line of a case should reach."""

    of: str
    """Which number."""
    bound: float
    is_most: bool = False
    """Whether the number should be at most this, rather than at least."""

    def __str__(self) -> str:
        sign, number = "≤" if self.is_most else "≥", f"{self.bound:.3g}"
        if self.of == OF_BARE:
            return f"{sign} {self.bound:.0%} of bare"
        return f"{sign} {number} {self.of}" if self.of != MEDIAN else f"{sign} {number}"

    def is_reached(self, found: Mapping[str, float]) -> bool:
        """Whether these numbers reach it; one that could not be measured does not."""
        value = found.get(self.of)
        return value is not None and (value <= self.bound if self.is_most else value >= self.bound)


MEDIAN, OF_BARE, TIMES_BEST, OF_MEMORY = "median", "of bare", "× best other", "× its memory"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of work, done by several."""

    name: str
    runners: tuple[Runner, ...]
    wanted: tuple[Goal, ...]
    unit: str = "samples/s"

    @property
    def watch(self) -> bool:
        """Whether memory is measured too, in a pass of its own."""
        return any(goal.of == OF_MEMORY for goal in self.wanted)


def cases(root: Mapping[str, str], grain: str | None) -> Iterator[Case]:
    """All work, on data in these folders."""
    volumes, shards = root["volumes"], root["shards"]
    grains = partial(Runner, "Grain, 2 threads", python=grain or "")

    def case(name: str, *runners: Runner, wanted: tuple[Goal, ...], unit: str = "samples/s") -> Case:
        return Case(name=name, runners=tuple(one for one in runners if one.python), wanted=wanted, unit=unit)

    yield case(
        "volumes, contiguous HDF5, batch 32",
        Runner("penstock, 768 MiB", f"{OURS}:volumes", {"folder": volumes, "memory": "768MiB"}),
        grains(f"{OTHERS}:grain_volumes", {"folder": volumes}),
        Runner("torch + h5py, 2 workers", f"{OTHERS}:torch_volumes", {"folder": volumes, "workers": 2}),
        Runner("bare, 2 threads", f"{BARE}:volumes", {"folder": volumes, "batch": 32}),
        wanted=(Goal(OF_BARE, 0.75), Goal(TIMES_BEST, 4), Goal(OF_MEMORY, 1 / 3, is_most=True)),
    )
    yield case(
        "volumes, gzip in h5py's own chunks, batch 32",
        Runner("penstock, 1 GiB", f"{OURS}:guessed", {"folder": volumes, "memory": "1GiB"}),
        Runner("penstock, 1.5 GiB", f"{OURS}:guessed", {"folder": volumes, "memory": "1536MiB"}),
        Runner("bare, 2 threads", f"{BARE}:guessed_chunks", {"path": f"{volumes}/guessed.hdf5"}),
        wanted=(Goal(OF_BARE, 0.8),),
    )
    for contiguous, name, of_bare, times in (
        (False, "channels-last view", 0.85, 0.0),
        (True, "contiguous planes", 0.8, 2.5),
    ):
        several = (Goal(TIMES_BEST, times), Goal(OF_MEMORY, 1 / 3, is_most=True)) if contiguous else ()
        yield case(
            f"pictures in shards, {name}, batch 32",
            Runner("penstock, 256 MiB", f"{OURS}:pictures", {"folder": shards, "contiguous": contiguous}),
            *([grains(f"{OTHERS}:grain_pictures", {"folder": root["records of shards"]})] * contiguous),
            Runner("bare, 2 threads", f"{BARE}:pictures", {"folder": shards, "batch": 32, "planes": contiguous}),
            wanted=(Goal(OF_BARE, of_bare), *several),
        )
    for batch in (32, 300):
        verbs = partial(dict, folder=shards, workers=2, batch=batch)
        yield case(
            f"verbs over the same shards, 2 workers, batch {batch}",
            Runner("penstock.webdataset", "benchmarks.shards:pipeline", verbs(package="penstock.webdataset")),
            Runner("webdataset", "benchmarks.shards:pipeline", verbs(package="webdataset")),
            wanted=(Goal(TIMES_BEST, 3), Goal(OF_MEMORY, 0.5, is_most=True)),
        )
    vectors = root["vectors"]
    yield case(
        "records of 4 KiB, batch 256",
        Runner("penstock, 256 MiB", f"{OURS}:records", {"path": vectors, "batch": 256}),
        Runner("torch, memmap, 0 workers", f"{OTHERS}:torch_records", {"path": vectors, "batch": 256}),
        Runner("bare, 2 threads", f"{BARE}:records", {"path": vectors, "batch": 256}),
        wanted=(Goal(OF_BARE, 0.65), Goal(TIMES_BEST, 2.2)),
    )
    for batch in (1, 8, 32):
        here = {"path": root["rows"], "batch": batch}
        yield case(
            f"rows of 1 KiB, batches of {batch}",
            Runner("penstock", f"{OURS}:records", here),
            Runner("torch, memmap, 0 workers", f"{OTHERS}:torch_records", here),
            wanted=(Goal(TIMES_BEST, 1),),
        )
    yield case(
        "1,000 HDF5 files of small rows, batch 64",
        Runner("penstock", f"{OURS}:many_files", {"pattern": f"{root['files']}/*.h5"}),
        Runner("torch + h5py, all open", f"{OTHERS}:torch_many_files", {"folder": root["files"]}),
        wanted=(Goal(TIMES_BEST, 2),),
    )
    yield case(
        "1,000 shards of small samples, batch 64",
        Runner("penstock", f"{OURS}:many_files", {"pattern": f"{root['many shards']}/*.tar"}),
        Runner("webdataset, 2 workers", f"{OTHERS}:many_shards", {"folder": root["many shards"]}),
        wanted=(Goal(TIMES_BEST, 4),),
    )
    yield case(
        "first epoch ÷ second, pictures in shards",
        Runner("penstock", f"{OURS}:first_epoch", {"folder": shards}),
        unit="ratio",
        wanted=(Goal(MEDIAN, 0.85),),
    )
    yield case(
        "volumes, files not in memory",
        Runner("penstock", f"{OURS}:cold_volumes", {"folder": volumes}),
        Runner("torch + h5py, 2 workers", f"{OTHERS}:cold_volumes", {"folder": volumes}),
        Runner("bare, files read from beginning to end", f"{OTHERS}:cold_sequential", {"folder": volumes}),
        Runner("bare, 2 threads, the same rows", f"{OTHERS}:cold_rows", {"folder": volumes}),
        unit="MB/s",
        wanted=(Goal(OF_BARE, 0.85),),
    )
    yield case(
        "penstock.open of one npy file",
        Runner("penstock", f"{OURS}:open_npy", {"path": vectors}),
        unit="ms",
        wanted=(Goal(MEDIAN, 20, is_most=True),),
    )
    yield case(
        "its first batch",
        Runner("penstock", f"{OURS}:first_batch", {"path": vectors}),
        unit="ms",
        wanted=(Goal(MEDIAN, 30, is_most=True),),
    )


# One process.


def in_child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one line for a few seconds: its rate, or the number that it returns; or what it held at most."""
    import torch  # libraries are loaded before anything is counted

    torch.set_num_threads(1)
    module, name = job["target"].split(":")
    made = getattr(importlib.import_module(module), name)(**job["arguments"])
    if not isinstance(made, Iterator):
        return {"value": made}
    if not job["watch"]:
        return {"value": _rate(made)}
    from penstock.testing.measure import MemoryWatch

    with MemoryWatch(0.02) as watch:
        _rate(made)
    return {"value": watch.peak_bytes}


def _rate(batches: Iterator[int]) -> float:
    next(batches)
    began, samples = time.perf_counter(), 0
    for size in batches:
        samples += size
        if time.perf_counter() - began > SECONDS:
            break
    return samples / (time.perf_counter() - began)


def run(one: Runner, watch: bool = False) -> float | str:
    """One line in a process of its own; a number, or why there is none."""
    job = json.dumps({"target": one.target, "arguments": dict(one.arguments), "watch": watch})
    command = [one.python, "-m", __spec__.name, "--child", job]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "PYTHONPYCACHEPREFIX": str(HERE / "data" / "bytecode")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=HERE.parent, env=env, timeout=PROCESS_S
        )
    except subprocess.TimeoutExpired:
        return f"not done after {PROCESS_S} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no output"])[-1][:100]
    return float(json.loads(done.stdout.splitlines()[-1])["value"])


# All of it.


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    """The lines of one case, in turns; the first one says whether all that is wanted is reached."""
    found: dict[str, list[float]] = {one.label: [] for one in case.runners}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for one in case.runners:
            value = "" if one.label in failed else run(one)
            if isinstance(value, float):
                found[one.label].append(value)
            elif value:
                failed[one.label] = value
    measured = {one.label: run(one, watch=True) for one in case.runners if case.watch}
    peaks = {label: peak for label, peak in measured.items() if isinstance(peak, float)}
    medians = {label: statistics.median(values) for label, values in found.items() if values}
    rows = []
    for number, label in enumerate(found):
        numbers = _compare(label, medians, peaks)
        row = {"label": case.name, "with": label, "unit": case.unit}
        row[MEDIAN] = _text(numbers.get(MEDIAN)) or failed[label]
        row[OF_BARE] = f"{numbers[OF_BARE]:.0%}" if OF_BARE in numbers else ""
        row[TIMES_BEST] = f"{numbers[TIMES_BEST]:.3g}" if TIMES_BEST in numbers else ""
        row["peak memory"] = format_size(int(peaks[label])) if label in peaks else ""
        row[OF_MEMORY] = f"{numbers[OF_MEMORY]:.2g}" if OF_MEMORY in numbers else ""
        goals = case.wanted if number == 0 else ()
        row["wanted"] = ", ".join(map(str, goals))
        row["reached"] = "" if not goals else _missed(goals, numbers) or "yes"
        row["all runs"] = ", ".join(map(_text, found[label]))
        rows.append(row)
    return rows


def _compare(label: str, medians: Mapping[str, float], peaks: Mapping[str, float]) -> dict[str, float]:
    """What was measured of one line, and its ratios to bare threads and to the quickest other loader."""
    if label not in medians:
        return {}
    numbers = {MEDIAN: medians[label]}
    bare = next((each for each in medians if each.startswith(results.REFERENCES)), None)
    if bare is not None:
        numbers[OF_BARE] = medians[label] / medians[bare]
    others = [each for each in medians if not each.startswith(("penstock", *results.REFERENCES))]
    best = max(others, key=lambda each: medians[each], default=None)
    if best is not None and label.startswith("penstock"):
        numbers[TIMES_BEST] = medians[label] / medians[best]
        if label in peaks and best in peaks:
            numbers[OF_MEMORY] = peaks[label] / max(1.0, peaks[best])
    return numbers


def _missed(goals: Sequence[Goal], numbers: Mapping[str, float]) -> str:
    missed = [str(goal) for goal in goals if not goal.is_reached(numbers)]
    return f"not: {', '.join(missed)}" if missed else ""


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_machine", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names contain one of these")
    parser.add_argument("--grain", help="the Python of an environment that has Grain")
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(in_child(json.loads(args.child))), flush=True)
        os._exit(0)  # bare threads never end
    rows = []
    for case in cases(make_all(args.data, args.grain), args.grain):
        if not args.only or any(words in case.name for words in args.only):
            rows += measure(case, args.rounds)
            print("\n".join(" | ".join(map(str, row.values())) for row in rows[-len(case.runners) :]), flush=True)
    judged = [row for row in rows if row["wanted"]]
    short = [row for row in judged if row["reached"] != "yes"]
    print(f"\n{len(judged) - len(short)} of {len(judged)} cases reach what is wanted.")
    for row in short:
        print(f"NOT REACHED: {row['label']}: {row['reached'].removeprefix('not: ')}")
    if not args.only:
        results.write(
            "small-machine", "python -m benchmarks.small_machine", rows, title="Ordinary work on few cores",
            about="Loaders and threads without a loader, in turns; all read one value per page of every batch.",
        )  # fmt: skip


if __name__ == "__main__":
    main()
