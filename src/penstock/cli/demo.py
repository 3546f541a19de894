"""``penstock demo``: a small synthetic NSD, trained from as released and as tar shards, beside what people write.

Every number printed is measured in the run. What keeps the comparison fair:

- The same files, read once before anything is measured; the same model and batch size.
- Memory counts from before a loader is made, training step included. A page that processes share counts once.
- Each contender has an epoch to warm up, its memory looked at every 20 ms, and another that is timed, or as much of
  each as it does in some seconds. Apart, because looking at worker processes costs enough to slow them down.
- Beside the release stands the ``NSDDataset`` that people write over h5py, in torch's DataLoader; beside the shards,
  MindEye's pipeline with the ``webdataset`` package, where that is installed.
"""

import argparse
import importlib.util
import json
import random
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import penstock as ps
from penstock.cli.demo_data import DEMO_SCALES, PER_SHARD, dataset_folder, read_once
from penstock.cli.demo_picture import draw
from penstock.cli.demo_training import ByHand, Course, Learner, Result, Watch, kept
from penstock.errors import ConfigError
from penstock.machine import held_bytes
from penstock.nsd import NSD, get_dataloaders
from penstock.nsd.loaders import Shards
from penstock.rivals import counted
from penstock.sizes import format_size, parse_size

COLUMNS = ("voxels", "image", "coco", "__index__")
SHARD_COLUMNS = ("voxels", "images", "coco")
EXAMPLES = """examples:
  penstock demo
      train from a synthetic dataset within 256 MiB, beside torch's DataLoader, and draw penstock-demo.png

  penstock demo --scale tiny --memory 64MiB --folder demo-data
      a small one, kept in a folder and used again

exit codes: 0 every promise held; 1 one did not; 2 it cannot be done as asked"""

RELEASE, SHARDS = "HDF5, by voxel", "tar shards"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--scale", choices=DEMO_SCALES, default="demo", help="of the dataset (%(default)s)")
    parser.add_argument("--memory", default="256MiB", help="the loaders' budget, as 256MiB or 1GB (%(default)s)")
    parser.add_argument("--batch-size", type=_count, default=8, help="samples a batch (%(default)s)")
    parser.add_argument("--seconds", type=float, default=4, help="the longest a timed epoch may take (%(default)s)")
    parser.add_argument("--workers", type=_count, default=2, help="run the DataLoader with 0 and so many (%(default)s)")
    parser.add_argument("--folder", help="keep the dataset here, and use it again; a temporary folder if left out")
    parser.add_argument("--out", default="penstock-demo.png", help="the picture to draw (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Make the data, train every way, report; 0 if every promise held."""
    limit_bytes = parse_size(args.memory, argument="--memory")
    _check_libraries()
    import h5py  # noqa: F401  # as torch: imported before memory is counted, since all sides need it
    import torch

    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # the step is small: more threads would only take cores from the loaders, on all sides
    try:
        with dataset_folder(args.folder, args.scale) as folder:
            return _compare(folder, args, limit_bytes)
    finally:
        torch.set_num_threads(threads_before)


def _compare(folder: str, args: argparse.Namespace, limit_bytes: int) -> int:
    nsd = NSD(folder)
    voxels = nsd.voxels("nsdgeneral")
    assert voxels is not None
    sizes = read_once(folder)
    print(
        f"Subject 1: {len(nsd.trials):,} trials in {len(nsd.sessions)} sessions, {len(voxels):,} voxels of "
        f"nsdgeneral.\n"
        f"As released, one time course a chunk: {format_size(sizes['release'])}. As tar shards: "
        f"{format_size(sizes['shards'])}.\n"
    )
    course = Course(Learner(len(voxels)), args.seconds, limit_bytes)
    ours, bottleneck, promises = _release(nsd, course, args.batch_size)
    results = [ours, *(_by_hand(nsd, course, args.batch_size, workers) for workers in (0, args.workers))]
    shards, once = _shards(folder, course, args.batch_size)
    results += [shards, *_webdataset(folder, course, args.batch_size)]
    promises.append(once)
    print("\n" + _table(results, limit_bytes), end="\n\n")
    print(textwrap.fill(f"What holds penstock up over the release: {bottleneck}.", 100), end="\n\n")
    for promise in promises:
        print(f"[{'ok' if promise.kept else 'BROKEN'}] {promise.told}")
    print(draw(results, limit_bytes, args.out))
    return 0 if all(promise.kept for promise in promises) else 1


def _check_libraries() -> None:
    wanted = ("torch", "h5py", "imagecodecs", "nibabel", "pandas", "scipy")
    lacking = [name for name in wanted if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f'the demo needs {" and ".join(lacking)}: pip install "penstock[all]"')


def _count(written: str) -> int:
    if not written.isdecimal() or int(written) < 1:
        raise argparse.ArgumentTypeError(f"{written!r}: expected a whole number, at least 1")
    return int(written)


def _release(nsd: NSD, course: Course, batch_size: int) -> tuple[Result, str, list["Promise"]]:
    watch = Watch(course.limit_bytes)
    ds = nsd.dataset(roi="nsdgeneral")

    def make() -> ps.Loader:
        return ds.loader(batch_size, shuffle=True, seed=0, memory=course.limit_bytes, columns=COLUMNS)

    with make() as loader:
        print(f"What penstock will hold, decided before it reads:\n{loader.plan}\n")
        print(f"Training from each in turn, for up to {course.seconds:g} s twice:", flush=True)
        result = course.take(RELEASE, len(nsd.trials), "penstock", loader, watch)
        bottleneck = loader.stats().bottleneck
        promises = [_each_once(result.seen, ds.trials["stim_id"].tolist()), _resumes(loader, make)]
    ds.close()
    return result, bottleneck, promises


def _by_hand(nsd: NSD, course: Course, batch_size: int, workers: int) -> Result:
    from torch.utils.data import DataLoader

    voxels = nsd.voxels("nsdgeneral")
    assert voxels is not None
    watch = Watch(course.limit_bytes)
    trials = list(nsd.trials[["session", "trial_in_session", "stim_id"]].itertuples(index=False, name=None))
    paths = {session: nsd.layout.session(session, ".hdf5") for session in nsd.sessions}
    dataset: Any = ByHand(paths, nsd.layout.stimuli, trials, voxels.mask.T)
    loader = DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    result = course.take(RELEASE, len(nsd.trials), f"NSDDataset, {counted(workers)}", loader, watch)
    dataset.close()
    return result


def _shards(folder: str, course: Course, batch_size: int) -> tuple[Result, "Promise"]:
    watch = Watch(course.limit_bytes)
    train, val, count, _ = get_dataloaders(
        batch_size, root=folder, backend="tar", to_tuple=SHARD_COLUMNS, memory=course.limit_bytes
    )
    result = course.take(SHARDS, count, "penstock", train, watch)
    val.close()
    once = len(result.seen) == len(set(result.seen)) == count
    train.close()
    return result, Promise(once, f"each of {count:,} pictures came exactly once in an epoch of the shards")


def _webdataset(folder: str, course: Course, batch_size: int) -> Iterator[Result]:
    """MindEye's own pipeline."""
    found = Shards.find(folder, 1)
    if importlib.util.find_spec("webdataset") is None or found is None:
        return
    import webdataset as wds  # isort: skip
    from torch.utils.data import DataLoader

    batches = max(1, len(found.train) * PER_SHARD // batch_size)

    def epoch() -> Any:
        pipeline = (
            wds.WebDataset(found.train, resampled=True, shardshuffle=False, nodesplitter=lambda urls: urls)
            .shuffle(500, initial=500, rng=random.Random(42))  # noqa: S311  as MindEye does
            .decode("torch")
            .rename(images="jpg;png", voxels="nsdgeneral.npy", coco="coco73k.npy")
            .to_tuple(*SHARD_COLUMNS)
            .batched(batch_size, partial=True)
            .with_epoch(batches)
        )
        return DataLoader(pipeline, batch_size=None, num_workers=1)

    watch = Watch(course.limit_bytes)
    yield course.take(SHARDS, batches * batch_size, "WebDataset, 1 worker", kept(epoch), watch)


@dataclass(frozen=True)
class Promise:
    """Something penstock undertakes to do, and whether it did."""

    kept: bool
    told: str


def _each_once(seen: list[int], expected: list[int]) -> Promise:
    return Promise(
        sorted(seen) == sorted(expected),
        f"each of {len(expected):,} trials came exactly once in an epoch of the release",
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
    rows = [("", "", "samples/s", "peak memory", f"within {format_size(limit_bytes)}?")]
    for result in results:
        within = "yes" if result.peak_bytes <= limit_bytes else "no"
        memory = (format_size(result.peak_bytes), within) if held_bytes() else ("unknown", "unknown here")
        rate = f"{result.samples_per_s:,.0f}" if result.samples_per_s >= 20 else f"{result.samples_per_s:.1f}"
        rows.append((result.source, result.loader, rate, *memory))
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{s:<{wide[0]}}  {n:<{wide[1]}}  {rate:>9}  {peak:>11}  {within}" for s, n, rate, peak, within in rows]
    for source in (RELEASE, SHARDS):
        here = [result for result in results if result.source == source]
        others = [result.samples_per_s for result in here if not result.is_ours]
        if others:
            lines.append(f"{source}: penstock is {here[0].samples_per_s / max(others):,.1f} times as fast")
    return "\n".join(lines)
