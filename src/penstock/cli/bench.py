"""``penstock bench``: run the loader as training would, and report its rate, its memory and the bottleneck.

Every number is measured in the run: one epoch, or as much of it as fits into the time limit, with a step that waits as
long as yours would. Memory counts from before a loader is made, over all its processes, sampled every 50 ms.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import penstock
from penstock.base import counters
from penstock.base.dataclass import dataclass
from penstock.base.progress import Progress
from penstock.base.sizes import format_count, format_size
from penstock.cli.arguments import add_contender_arguments, add_training_arguments, open_dataset
from penstock.cli.bench_report import ReadMap, mixing, page
from penstock.cli.contenders import CONTENDERS, BenchJob, TimedEpoch, memory_note, run_epoch
from penstock.cli.parser import suggestion
from penstock.errors import ConfigError
from penstock.loader.request import memory_limit, order_of
from penstock.loader.stats import Stats
from penstock.testing.measure import MemoryWatch, release_freed_memory

EXAMPLES = """examples:
  penstock bench "data/*.h5" --batch-size 32 --memory 2GiB
      how fast the loader reads these files on this machine, and what limits it

  penstock bench "data/*.h5" --step 80
      with a training step of 80 ms: does the loader keep up?

  penstock bench "train-{000..017}.tar" --against torch,webdataset --workers 4 --html report.html
      compare with other loaders, and write a page of charts that works offline

exit codes: 0 success; 1 the loader exceeded its budget; 2 invalid request"""

SAMPLE_EVERY_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files, how they would be trained from, and what to compare with."""
    add_training_arguments(parser, files="+")
    parser.add_argument("--step", type=float, default=0, metavar="MS", help="time of a training step (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="time limit for each loader (%(default)s)")
    parser.add_argument("--against", default="", metavar="NAMES", help=f"compare with {', '.join(CONTENDERS)}")
    add_contender_arguments(parser, workers=2)
    parser.add_argument("--html", metavar="FILE", help="write a page of charts")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


@dataclass(frozen=True)
class BenchResult(TimedEpoch):
    """One loader's result."""

    name: str
    peak_bytes: int
    memory: list[tuple[float, int]]
    """Bytes held over time, in seconds."""


def run(args: argparse.Namespace) -> int:
    """Run all loaders and report; 1 if penstock held more than its budget."""
    others = [name for name in args.against.split(",") if name]
    for name in others:
        if name not in CONTENDERS:
            raise ConfigError(
                f"--against {name}: expected some of {', '.join(CONTENDERS)}, separated by commas"
                f"{suggestion(name, CONTENDERS)}"
            )
    ds = open_dataset(args)
    limit, _ = memory_limit(args.memory)
    job = BenchJob(
        ds=ds, columns=tuple(args.columns or ds.fields), batch_size=args.batch_size, workers=args.workers,
        shuffle_buffer=args.shuffle_buffer, whole_rows=args.mask is None,
    )  # fmt: skip
    ours, stats, charts = _run_penstock(job, args, limit)
    runs = [ours, *(_run_other(name, job, args, limit) for name in others)]
    numbers = _collect_numbers(runs, stats, limit)
    if args.html:
        _write(args.html, page({**numbers, **charts}))
    print(json.dumps(numbers, indent=2) if args.json else _report(runs, stats, limit))
    return 1 if ours.peak_bytes > limit else 0


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written: {error.strerror}") from None


def _run_penstock(job: BenchJob, args: argparse.Namespace, limit: int) -> tuple[BenchResult, Stats, dict[str, Any]]:
    reads = ReadMap()
    loaders: list[penstock.Loader] = []

    def make() -> tuple[str, Iterable[Any]]:
        loaders.append(
            penstock.Loader(
                job.ds, batch_size=job.batch_size, shuffle=True, memory=limit, threads=args.threads or "auto",
                processes="auto" if args.processes is None else args.processes,
                columns=None if args.columns is None else job.columns, output="numpy", rank=0, world_size=1,
            )
        )  # fmt: skip
        return "penstock", loaders[0]

    try:
        with counters.watched(reads.note) if args.html else nullcontext():
            ours = _time_loader(make, job, args, limit)
        stats, quality = loaders[0].stats(), loaders[0].plan.shuffle_quality
    finally:
        for each in loaders:
            each.close()
    mixed = {**mixing(order_of(job.ds, True, 0, None)), "quality": quality}
    return ours, stats, {"reads": reads.as_json(), "mixing": mixed}


def _run_other(name: str, job: BenchJob, args: argparse.Namespace, limit: int) -> BenchResult:
    import torch  # noqa: F401  # before memory is counted: libraries do not count for any loader

    return _time_loader(lambda: CONTENDERS[name](job), job, args, limit)


def _time_loader(
    make: Callable[[], tuple[str, Iterable[Any]]], job: BenchJob, args: argparse.Namespace, limit: int
) -> BenchResult:
    """Make a loader and run one epoch, or as much of it as fits into the time limit."""

    def step(batch: Any) -> int:
        time.sleep(args.step / 1000)
        return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])

    release_freed_memory()
    with MemoryWatch(SAMPLE_EVERY_S, timeline=True) as watch:
        name, loader = make()
        with Progress(name, len(job.ds), "samples", partial(memory_note, watch, limit)) as progress:
            epoch = run_epoch(loader, step, args.seconds, progress)
    assert watch.timeline is not None
    return BenchResult(**asdict(epoch), name=name, peak_bytes=watch.peak_bytes, memory=watch.timeline)


def _collect_numbers(runs: list[BenchResult], stats: Stats, limit: int) -> dict[str, Any]:
    return {
        "budget_bytes": limit,
        "planned_bytes": stats.planned_bytes,
        "bottleneck": stats.bottleneck,
        "bytes_read": stats.bytes_read,
        "threads": stats.threads,
        "stages": _stages(stats),
        "samples_per_s_if_never_waiting": stats.samples_per_s_at_most,
        "samples_per_s_of_reading_alone": _rate_of_reading(stats),
        "runs": [{**asdict(each), "samples_per_s": each.samples_per_s} for each in runs],
    }


def _stages(stats: Stats) -> dict[str, float]:
    """Seconds of the threads' time, by activity."""
    return {"files": stats.file_seconds, "decoding": stats.decoding_seconds, "own functions": stats.function_seconds}


def _rate_of_reading(stats: Stats) -> float:
    """The rate at which the threads read while they were busy."""
    return stats.samples * stats.threads / max(1e-9, stats.readers_busy)


def _report(runs: list[BenchResult], stats: Stats, limit: int) -> str:
    wide = max(len(each.name) for each in runs)
    lines = [f"{'':<{wide}}  samples/s   peak memory  waited"]
    for each in runs:
        share = each.waited / max(1e-9, each.seconds)
        lines.append(
            f"{each.name:<{wide}}  {each.samples_per_s:>9,.0f}  {format_size(each.peak_bytes):>12}  {share:>6.0%}"
        )
    stages = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in _stages(stats).items() if seconds)
    lines += [
        "",
        f"penstock: {format_size(stats.planned_bytes)} planned, of a budget of {format_size(limit)}",
        f"read: {format_size(stats.bytes_read)} by {format_count(stats.threads, 'thread')} ({stages})",
        f"at most: {stats.samples_per_s_at_most:,.0f} samples/s if training never waited for data",
        f"         {_rate_of_reading(stats):,.0f} samples/s if reading never waited for training",
        f"Bottleneck: {stats.bottleneck}.",
    ]
    return "\n".join(lines)
