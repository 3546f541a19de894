"""``penstock demo``: train from a small synthetic NSD, as released and as tar shards, and compare with other loaders.

Every number is measured in the run. The comparison is fair:

- All loaders read the same files, which are in the page cache, with the same model and batch size.
- Memory counts from before a loader is made, training step included. A page shared by processes counts once.
- Each loader runs twice: one epoch to warm up while its memory is sampled every 20 ms, then one that is timed. They are
  apart because looking at worker processes slows them down. Both end early at the time limit, apart from penstock's
  first: all of its samples are counted.
- For the release, the rival is the ``NSDDataset`` that people write over h5py, in torch's DataLoader; for the shards,
  MindEye's pipeline with the ``webdataset`` package, if that is installed.
"""

import argparse
import importlib.util
import json
import os
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import penstock as ps
from penstock.base.dataclass import dataclass
from penstock.base.progress import Progress
from penstock.base.sizes import MiB, format_count, format_size, parse_size
from penstock.cli.arguments import count
from penstock.cli.contenders import TrialsByHand, dataloader, memory_note, mindeye_pipeline, run_epoch
from penstock.cli.demo_report import NEXT, RELEASE, SHARDS, Promise, Result, as_json, draw, table
from penstock.errors import ConfigError
from penstock.nsd import NSD, get_dataloaders
from penstock.nsd.mindeye import Shards
from penstock.nsd.synthetic import SCALES, Scale, steps, synthesize
from penstock.nsd.synthetic.pictures import write_stimuli
from penstock.nsd.synthetic.shards import FOLDER, write_shards
from penstock.testing.measure import MemoryWatch, release_freed_memory

EXAMPLES = """examples:
  penstock demo
      train from a synthetic dataset within 256 MiB, compare with torch's DataLoader, and draw penstock-demo.png

  penstock demo --scale tiny --memory 64MiB --folder demo-data
      a smaller dataset, kept in a folder and reused by the next run

exit codes: 0 every promise was kept; 1 one was broken; 2 invalid request"""

# A trial of the release costs as many reads as there are voxels: few, so that the loaders by hand finish some batches.
DEMO = Scale((14, 18, 16), 750, 4, {1: 4}, shared=40, picture=128, region_voxels=600)
DEMO_SCALES = {"demo": DEMO, "tiny": SCALES["tiny"]}
PER_SHARD = 50
COMPLETE = "demo.txt"  # written last: if it is there, so is everything else

COLUMNS = ("voxels", "image", "coco", "__index__")
SHARD_COLUMNS = ("voxels", "images", "coco")

LEARNING_RATE = 1e-3
EMBEDDING = 64
GRID = 8  # each picture is averaged over this many cells per side before it is embedded
SAMPLE_EVERY_S = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", choices=DEMO_SCALES, default="demo", help="size of the dataset (%(default)s)")
    parser.add_argument("--memory", default="256MiB", help="the loaders' budget, such as 1GB (%(default)s)")
    parser.add_argument("--batch-size", type=count, default=8, help="samples per batch (%(default)s)")
    parser.add_argument("--seconds", type=float, default=4, help="time limit for each epoch (%(default)s)")
    parser.add_argument("--workers", type=count, default=2, help="run the DataLoader with 0 and with N (%(default)s)")
    parser.add_argument("--folder", help="keep the dataset here and reuse it (default: a temporary folder)")
    parser.add_argument("--out", default="penstock-demo.png", help="the chart to draw (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, with sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """Make the data, train with each loader, report; 0 if every promise was kept."""
    limit_bytes = parse_size(args.memory, argument="--memory")
    _check_libraries()
    import h5py  # noqa: F401  # like torch: all sides need it, so it is imported before memory is counted
    import torch

    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # the step is small: more threads would only take cores from all loaders
    try:
        with dataset_folder(args.folder, args.scale) as folder:
            return _compare(folder, args, limit_bytes)
    finally:
        torch.set_num_threads(threads_before)


def _check_libraries() -> None:
    wanted = ("torch", "h5py", "imagecodecs", "nibabel", "pandas", "scipy")
    lacking = [name for name in wanted if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f'the demo needs {" and ".join(lacking)}: pip install "penstock[all]"')


def _compare(folder: str, args: argparse.Namespace, limit_bytes: int) -> int:
    nsd = NSD(folder)
    voxels = nsd.voxels("nsdgeneral")
    assert voxels is not None
    sizes = read_once(folder)
    job = DemoJob(Learner(len(voxels)), args.batch_size, args.seconds, limit_bytes, quiet=args.json)
    job.say(
        f"Subject 1: {len(nsd.trials):,} trials in {len(nsd.sessions)} sessions, {len(voxels):,} voxels of "
        f"nsdgeneral.\n"
        f"As released, one time job per chunk: {format_size(sizes['release'])}. As tar shards: "
        f"{format_size(sizes['shards'])}.\n"
    )
    ours, bottleneck, promises = _train_on_release(nsd, job)
    results = [ours, *(_train_by_hand(nsd, job, workers) for workers in (0, args.workers))]
    shards, each_once = _train_on_shards(folder, job)
    results += [shards, *_train_with_webdataset(folder, job)]
    promises.append(each_once)
    drawn = draw(results, limit_bytes, args.out)
    if args.json:
        print(json.dumps(as_json(results, promises, limit_bytes, bottleneck), indent=2))
    else:
        print("\n" + table(results, limit_bytes), end="\n\n")
        print(textwrap.fill(f"penstock's bottleneck on the release: {bottleneck}.", 100), end="\n\n")
        for promise in promises:
            print(f"[{'ok' if promise.kept else 'BROKEN'}] {promise.text}")
        print(f"{drawn}\n\n{NEXT}")
    return 0 if all(promise.kept for promise in promises) else 1


# The dataset.


@contextmanager
def dataset_folder(chosen: str | None, scale: str) -> Iterator[str]:
    """The folder of the dataset: the caller's, or a temporary one."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as temporary:
        folder = chosen or temporary
        note = os.path.join(folder, COMPLETE)
        if not os.path.exists(note):
            _make(folder, scale)
        with open(note) as file:
            found = file.read()
        if found != scale:
            raise ConfigError(f"--folder {folder}: holds a dataset of scale {found}, not {scale}; name another folder")
        yield folder


def _make(folder: str, name: str) -> None:
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise ConfigError(f"--folder {folder}: has files, but no complete demo dataset; name an empty or a new folder")
    scale = DEMO_SCALES[name]
    with Progress("making a synthetic NSD", steps(scale, [1], stimuli=False) + 2, "steps") as progress:
        made = synthesize(folder, scale, subjects=[1], stimuli=False, progress=lambda _: progress.add(1))
        write_stimuli(folder, scale, only=made.stimuli(1))
        progress.add(1)
        write_shards(folder, per_shard=PER_SHARD, wholebrain=True)
        progress.add(1)
    with open(os.path.join(folder, COMPLETE), "w") as file:
        file.write(name)


def read_once(folder: str) -> dict[str, int]:
    """Bytes on disk of the release and of the shards. Reads every file, so that all are in the page cache."""
    sizes = {"release": 0, "shards": 0}
    for home, _, names in os.walk(folder):
        kind = "shards" if FOLDER in home else "release"
        for name in names:
            with open(os.path.join(home, name), "rb", buffering=0) as file:
                while piece := file.read(MiB):
                    sizes[kind] += len(piece)
    return sizes


# Training.


class Learner:
    """A small model, so that loading matters: voxels to a fixed random embedding of the picture."""

    def __init__(self, voxels: int) -> None:
        import torch

        torch.manual_seed(0)
        self._model = torch.nn.Linear(voxels, EMBEDDING)
        self._embedding = torch.randn(3 * GRID**2, EMBEDDING) / GRID
        # In its first step torch sets itself up, which must not count for a loader.
        self.step(torch.zeros(2, voxels), torch.zeros(2, 3, 16, 16))

    def step(self, voxels: Any, images: Any) -> None:
        """One step of training."""
        from torch.nn import functional

        features = voxels.float()
        features = features.mean(1) if features.ndim == 3 else features
        pixels = images.float() / 255 if not images.is_floating_point() else images
        wanted = functional.adaptive_avg_pool2d(pixels, GRID).flatten(1) @ self._embedding
        self._model.zero_grad()
        functional.mse_loss(self._model(features), wanted).backward()
        for weights in self._model.parameters():  # torch.optim would load a compiler, which leaves a folder behind
            assert weights.grad is not None
            weights.data -= LEARNING_RATE * weights.grad


@dataclass(frozen=True)
class DemoJob:
    """The work of every loader: feed the model for two epochs, or until the time limit of each."""

    learner: Learner
    batch_size: int
    seconds: float
    limit_bytes: int
    quiet: bool = False
    """Whether nothing but the results is printed."""

    def say(self, text: str) -> None:
        """Print, unless quiet."""
        if not self.quiet:
            print(text, flush=True)

    def watch(self) -> MemoryWatch:
        """Count memory from now on; to be called before a loader is made."""
        release_freed_memory()
        return MemoryWatch(SAMPLE_EVERY_S).start()

    def train_twice(
        self,
        source: str,
        name: str,
        loader: Iterable[Any],
        samples: int,
        watch: MemoryWatch,
        first_limit_s: float | None = None,
    ) -> Result:
        """Train with a loader: first while memory is sampled, then timed.

        first_limit_s:  the time limit of the first epoch, if it is not that of the second
        """
        pictures: list[int] = []

        def step(batch: Any) -> int:
            voxels, images, coco, *_ = batch
            self.learner.step(voxels, images)
            pictures.extend(coco.reshape(-1).tolist())
            return len(coco)

        note = partial(memory_note, watch, self.limit_bytes)
        with Progress(name, 2 * samples, "samples", note) as progress:
            warm = run_epoch(loader, step, self.seconds if first_limit_s is None else first_limit_s, progress)
            watch.stop()
            timed = run_epoch(loader, step, self.seconds, progress)
        return Result(source, name, timed.samples_per_s, watch.peak_bytes, pictures[: warm.samples])


def _train_on_release(nsd: NSD, job: DemoJob) -> tuple[Result, str, list[Promise]]:
    watch = job.watch()
    ds = nsd.dataset(roi="nsdgeneral")

    def make() -> ps.Loader:
        return ds.loader(job.batch_size, shuffle=True, seed=0, memory=job.limit_bytes, columns=COLUMNS)

    with make() as loader:
        job.say(f"What penstock will hold, decided before it reads:\n{loader.plan}\n")
        job.say(f"Training with each loader in turn, for up to {job.seconds:g} s twice:")
        result = job.train_twice(RELEASE, "penstock", loader, len(nsd.trials), watch, first_limit_s=inf)
        bottleneck = loader.stats().bottleneck
        expected = ds.trials["stim_id"].tolist()
        once = f"each of {len(expected):,} trials came exactly once in an epoch of the release"
        promises = [Promise(sorted(result.pictures) == sorted(expected), once), _check_resume(loader, make)]
    ds.close()
    return result, bottleneck, promises


def _check_resume(loader: ps.Loader, make: Callable[[], ps.Loader]) -> Promise:
    """Save the state after a third of an epoch: does another loader deliver exactly the rest?"""
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


def _train_by_hand(nsd: NSD, job: DemoJob, workers: int) -> Result:
    voxels = nsd.voxels("nsdgeneral")
    assert voxels is not None
    watch = job.watch()
    trials = list(nsd.trials[["session", "trial_in_session", "stim_id"]].itertuples(index=False, name=None))
    paths = {session: nsd.layout.session(session, ".hdf5") for session in nsd.sessions}
    dataset = TrialsByHand(paths, nsd.layout.stimuli, trials, voxels.mask.T)
    loader = dataloader(dataset, job.batch_size, workers)
    result = job.train_twice(RELEASE, f"NSDDataset, {format_count(workers, 'worker')}", loader, len(trials), watch)
    dataset.close()
    return result


def _train_on_shards(folder: str, job: DemoJob) -> tuple[Result, Promise]:
    watch = job.watch()
    train, val, pictures, _ = get_dataloaders(
        job.batch_size, root=folder, backend="tar", to_tuple=SHARD_COLUMNS, memory=job.limit_bytes
    )
    result = job.train_twice(SHARDS, "penstock", train, pictures, watch, first_limit_s=inf)
    val.close()
    train.close()
    once = len(result.pictures) == len(set(result.pictures)) == pictures
    return result, Promise(once, f"each of {pictures:,} pictures came exactly once in an epoch of the shards")


def _train_with_webdataset(folder: str, job: DemoJob) -> Iterator[Result]:
    found = Shards.find(folder, 1)
    if importlib.util.find_spec("webdataset") is None or found is None:
        return
    batches = max(1, len(found.train) * PER_SHARD // job.batch_size)
    watch = job.watch()
    loader = mindeye_pipeline(found.train, SHARD_COLUMNS, job.batch_size, batches)
    yield job.train_twice(SHARDS, "WebDataset, 1 worker", loader, batches * job.batch_size, watch)
