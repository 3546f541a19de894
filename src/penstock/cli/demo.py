"""``penstock demo``: a dataset larger than the budget, trained from with penstock and with a DataLoader over h5py.

Every number printed is measured in the run. What keeps the comparison fair:

- The same files, read once before anything is measured; the same model, batch size and epochs.
- Memory counts from before a loader is made, training step included. A page that processes share counts once.
- One epoch warms up and has its memory looked at every 20 ms; the epochs after it are timed. Apart, because looking
  at worker processes costs enough to slow them down.
- DataLoader workers stay alive between epochs, so that starting them is not timed.
"""

import argparse
import importlib.util
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import penstock as ps
from penstock.cli.demo_data import Trials, dataset_folder
from penstock.cli.demo_training import ByHand, Course, Learner, Result, Seen, Watch
from penstock.cli.progress import LABEL_WIDTH
from penstock.errors import ConfigError
from penstock.machine import held_bytes
from penstock.sizes import format_size, parse_size

COLUMNS = ("voxels", "images", "coco", "__index__")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--sessions", type=_count, default=6, help="files of measurements (%(default)s)")
    parser.add_argument("--trials", type=_count, default=40, help="trials in each of them (%(default)s)")
    parser.add_argument("--memory", default="64MiB", help="the loader's budget, as 64MiB or 1GB (%(default)s)")
    parser.add_argument("--batch-size", type=_count, default=8, help="trials a batch (%(default)s)")
    parser.add_argument("--epochs", type=_count, default=6, help="epochs timed, after one to warm up (%(default)s)")
    parser.add_argument("--workers", type=_count, default=2, help="run the DataLoader with 0 and so many (%(default)s)")
    parser.add_argument("--folder", help="keep the dataset here, and use it again; a temporary folder if left out")


def run(args: argparse.Namespace) -> int:
    """Make the data, train both ways, report; 0 if every promise held."""
    limit_bytes = parse_size(args.memory, argument="--memory")
    _check_libraries()
    import h5py  # noqa: F401  # as torch: imported before memory is counted, since both sides need it
    import torch

    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # the step is small: more threads would only take cores from the loaders, on both sides
    try:
        with dataset_folder(args.folder, args.sessions, args.trials) as folder:
            return _compare(Trials(folder), args, limit_bytes)
    finally:
        torch.set_num_threads(threads_before)


def _compare(trials: Trials, args: argparse.Namespace, limit_bytes: int) -> int:
    print(trials.describe(limit_bytes), end="\n\n")
    course = Course(Learner(args.batch_size), len(trials), args.epochs, limit_bytes)
    ours, bottleneck, promises = _with_penstock(trials, course, args.batch_size)
    theirs = [_with_dataloader(trials, course, args.batch_size, workers) for workers in (0, args.workers)]
    print("\n" + _table([ours, *theirs], limit_bytes), end="\n\n")
    print(textwrap.fill(f"What holds penstock up: {bottleneck}.", 100), end="\n\n")
    for promise in promises:
        print(f"[{'ok' if promise.kept else 'BROKEN'}] {promise.told}")
    return 0 if all(promise.kept for promise in promises) else 1


def _check_libraries() -> None:
    lacking = [name for name in ("torch", "h5py", "imagecodecs") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f'the demo needs {" and ".join(lacking)}: pip install "penstock[all]"')


def _count(written: str) -> int:
    if not written.isdecimal() or int(written) < 1:
        raise argparse.ArgumentTypeError(f"{written!r}: expected a whole number, at least 1")
    return int(written)


def _with_penstock(trials: Trials, course: Course, batch_size: int) -> tuple[Result, str, list["Promise"]]:
    watch = Watch(course.limit_bytes)
    ds = trials.open()

    def make() -> ps.Loader:
        return ps.Loader(ds, batch_size=batch_size, shuffle=True, seed=0, memory=course.limit_bytes, columns=COLUMNS)

    with make() as loader:
        print(f"What penstock will hold, decided before it reads:\n{loader.plan}\n")
        print(
            f"Training with penstock, then with torch's DataLoader over h5py as one writes it by hand;\n"
            f"each for one epoch to warm up, then {course.epochs} timed:",
            flush=True,
        )
        result = course.take("penstock", loader, watch)
        bottleneck = loader.stats().bottleneck
        promises = [_each_once(result.seen, trials), _resumes(loader, make)]
    ds.close()
    return result, bottleneck, promises


def _with_dataloader(trials: Trials, course: Course, batch_size: int, workers: int) -> Result:
    from torch.utils.data import DataLoader

    watch = Watch(course.limit_bytes)
    dataset: Any = ByHand(trials)
    loader = DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    result = course.take(f"DataLoader, {workers} workers", loader, watch)
    dataset.close()
    return result


@dataclass(frozen=True)
class Promise:
    """Something penstock undertakes to do, and whether it did."""

    kept: bool
    told: str


def _each_once(seen: Seen, trials: Trials) -> Promise:
    per_epoch = [seen[begin : begin + len(trials)] for begin in range(0, len(seen), len(trials))]
    expected = list(enumerate(trials.coco.tolist()))
    return Promise(
        all(sorted(epoch) == expected for epoch in per_epoch),
        f"each of {len(trials):,} trials came exactly once in each of {len(per_epoch)} epochs, with its coco number",
    )


def _resumes(loader: ps.Loader, make: Callable[[], ps.Loader]) -> Promise:
    """Stop for a moment after a third of an epoch: does another loader go on from there with just the rest?"""
    batches = iter(loader)
    begin = len(loader) // 3
    for _ in range(begin):
        next(batches)
    saved = json.dumps(loader.state_dict())
    rest = [rows.tolist() for *_, rows in batches]
    loader.close()
    with make() as another:
        another.load_state_dict(json.loads(saved))
        again = [rows.tolist() for *_, rows in another]
    return Promise(
        again == rest,
        f"a new loader resumed after batch {begin} of {len(loader)}, and delivered the same {len(rest)} that were left",
    )


def _table(results: list[Result], limit_bytes: int) -> str:
    rows = [("loader", "samples/s", "peak memory", f"within {format_size(limit_bytes)}?")]
    for result in results:
        within = "yes" if result.peak_bytes <= limit_bytes else "no"
        memory = (format_size(result.peak_bytes), within) if held_bytes() else ("unknown", "unknown here")
        rows.append((result.loader, f"{result.samples_per_s:,.0f}", *memory))
    lines = [f"{loader:<{LABEL_WIDTH}}  {rate:>9}  {peak:>11}  {within}" for loader, rate, peak, within in rows]
    ours, best = results[0].samples_per_s, max(result.samples_per_s for result in results[1:])
    return "\n".join([*lines, f"penstock is {ours / best:.1f} times as fast as the faster DataLoader"])
