"""``penstock bench``: run the loader as it would train, and say how fast it is, what it holds and what holds it up.

Every number is measured in the run: an epoch, or as much of one as is done in some seconds, with a step that waits as
long as yours would. Memory counts from before a loader is made, over all its processes, and is looked at every 50 ms.
"""

import argparse
import json
import threading
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import penstock
from penstock import tally
from penstock.cli.bench_contenders import CONTENDERS, Job
from penstock.cli.bench_pictures import ReadMap, mixing
from penstock.cli.bench_report import page
from penstock.cli.demo_training import Watch
from penstock.cli.progress import Progress
from penstock.cli.training_arguments import add_training_arguments, count, none_or_more, opened
from penstock.errors import ConfigError
from penstock.request import memory_limit, order_of
from penstock.sizes import format_size
from penstock.stats import Stats

EXAMPLES = """examples:
  penstock bench "betas_session*.hdf5" --batch-size 32 --memory 2GiB
      how fast the loader is on these files and this machine, and what holds it up

  penstock bench "betas_session*.hdf5" --step 80
      in front of a training step of 80 ms: does it keep up?

  penstock bench "train-{000..017}.tar" --against torch,webdataset --workers 4 --html report.html
      beside what people run, with a page of pictures that needs no network

exit codes: 0 done; 1 the budget was exceeded; 2 it cannot be done as asked"""

LOOK_EVERY_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files, how they would be trained from, and what to compare with."""
    add_training_arguments(parser, EXAMPLES, files="+")
    parser.add_argument(
        "--step", type=float, default=0, metavar="MS", help="a training step takes so long (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=5, help="the longest that each may take (%(default)s)")
    parser.add_argument("--against", default="", metavar="NAMES", help=f"compare with {', '.join(CONTENDERS)}")
    parser.add_argument("--workers", type=none_or_more, default=2, metavar="N", help="of those (%(default)s)")
    parser.add_argument("--shuffle-buffer", type=count, default=1000, metavar="K", help="of WebDataset (%(default)s)")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures, which needs nothing else")
    parser.add_argument("--json", action="store_true", help="print the numbers for scripts")


@dataclass(frozen=True)
class Run:
    """What one contender did."""

    name: str
    samples: int
    seconds: float
    waited: float
    peak_bytes: int
    memory: list[tuple[float, int]]
    """Seconds, and bytes held then."""

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(1e-9, self.seconds)


def run(args: argparse.Namespace) -> int:
    """Run everybody, report; 1 if penstock held more than its budget."""
    others = [name for name in args.against.split(",") if name]
    for name in others:
        if name not in CONTENDERS:
            raise ConfigError(f"--against {name}: expected some of {', '.join(CONTENDERS)}, with commas between")
    ds = opened(args)
    limit, _ = memory_limit(args.memory)
    job = Job(
        ds, tuple(args.columns or ds.fields), args.batch_size, args.workers, args.shuffle_buffer, args.mask is None
    )
    ours, stats, pictures = _penstock(job, args, limit)
    runs = [ours, *(_other(name, job, args, limit) for name in others)]
    told = _numbers(runs, stats, limit)
    if args.html:
        _write(args.html, page({**told, **pictures}))
    print(json.dumps(told, indent=2) if args.json else _report(runs, stats, limit))
    return 1 if ours.peak_bytes > limit else 0


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written: {error.strerror}") from None


def _penstock(job: Job, args: argparse.Namespace, limit: int) -> tuple[Run, Stats, dict[str, Any]]:
    columns = None if args.columns is None else job.columns
    watch = Watch(limit)
    threads: Any = args.threads or "auto"
    with penstock.Loader(
        job.ds, batch_size=job.batch_size, shuffle=True, memory=limit, threads=threads, columns=columns, output="numpy"
    ) as loader:
        reads = ReadMap()
        with tally.watched(reads.note) if args.html else nullcontext():
            ours = _timed("penstock", loader, watch, job, args)
        mixed = {**mixing(order_of(job.ds, True, 0, None)), "quality": loader.plan.shuffle_quality}
        return ours, loader.stats(), {"reads": reads.told(), "mixing": mixed}


def _other(name: str, job: Job, args: argparse.Namespace, limit: int) -> Run:
    import torch  # noqa: F401  # before memory is counted: libraries are nobody's loader

    watch = Watch(limit)
    label, loader = CONTENDERS[name](job)
    return _timed(label, loader, watch, job, args)


def _timed(label: str, loader: Iterable[Any], watch: Watch, job: Job, args: argparse.Namespace) -> Run:
    """An epoch, or as much as is done in time."""
    memory: list[tuple[float, int]] = []
    over, began = threading.Event(), time.perf_counter()

    def keep_looking() -> None:
        while not over.wait(LOOK_EVERY_S):
            memory.append((time.perf_counter() - began, watch.look()))

    looking = threading.Thread(target=keep_looking)
    looking.start()
    samples, waited = 0, 0.0
    try:
        with Progress(label, len(job.ds), "samples", watch.note) as progress:
            asked = time.perf_counter()
            for batch in loader:
                waited += time.perf_counter() - asked
                time.sleep(args.step / 1000)
                size = len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])
                samples += size
                progress.add(size)
                asked = time.perf_counter()
                if asked - began > args.seconds:
                    break
        seconds = time.perf_counter() - began
        memory.append((seconds, watch.look()))
    finally:
        over.set()
        looking.join()
    return Run(label, samples, seconds, waited, watch.peak_bytes, sorted(memory))


def _numbers(runs: list[Run], stats: Stats, limit: int) -> dict[str, Any]:
    return {
        "budget_bytes": limit,
        "planned_bytes": stats.planned_bytes,
        "bottleneck": stats.bottleneck,
        "bytes_read": stats.bytes_read,
        "threads": stats.threads,
        "stages": _stages(stats),
        "samples_per_s_if_never_waiting": stats.samples_per_s_at_most,
        "samples_per_s_of_reading_alone": _reading_alone(stats),
        "runs": [{**asdict(each), "samples_per_s": each.samples_per_s} for each in runs],
    }


def _stages(stats: Stats) -> dict[str, float]:
    """Seconds of the threads' time, by what they went into."""
    return {"files": stats.file_seconds, "decoding": stats.decoding_seconds, "own functions": stats.function_seconds}


def _reading_alone(stats: Stats) -> float:
    """The rate at which the threads read while they were busy."""
    return stats.samples * stats.threads / max(1e-9, stats.readers_busy)


def _report(runs: list[Run], stats: Stats, limit: int) -> str:
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
        f"read: {format_size(stats.bytes_read)} by {stats.threads} threads ({stages})",
        f"at most: {stats.samples_per_s_at_most:,.0f} samples/s if the step never waited",
        f"         {_reading_alone(stats):,.0f} samples/s if reading never did",
        f"What holds it up: {stats.bottleneck}.",
    ]
    return "\n".join(lines)
