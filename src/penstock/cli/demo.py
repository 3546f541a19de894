"""``penstock demo``: a dataset larger than the budget, trained from with penstock and with a DataLoader over h5py.

Every number printed is measured in the run. What keeps the comparison fair:

- The same files, read once before anything is measured; the same model, batch size and epochs.
- Memory counts from before a loader is made, training step included. A page that processes share counts once.
- One epoch warms up and has its memory looked at every 20 ms; the epochs after it are timed. Apart, because looking
  at worker processes costs enough to slow them down.
- DataLoader workers stay alive between epochs, so that starting them is not timed.

In this order: the command, the data, the training, the measuring, the report.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

import penstock as ps
from penstock.errors import ConfigError
from penstock.machine import children, cores, held_bytes
from penstock.sizes import KiB, MiB, format_size, parse_size

# 0.8 MiB as stored and 1.6 MiB as float32: large enough that reading and decoding decide, not Python.
VOLUME = (80, 80, 64)
IMAGE = (128, 128, 3)
COARSE = 8  # a smooth field is drawn on a grid this much coarser, and the model looks at means over such cells
SHOWN = 3  # times each picture is shown
LEVEL = 4  # of gzip
RATE = 1e-3  # of learning
SCALE = 300  # measurements are stored as whole numbers, this many to the unit
TABLE, STIMULI = "trials.npz", "nsd_stimuli.hdf5"
COLUMNS = ("voxels", "images", "coco", "__index__")

LOOK_EVERY_S = 0.02
NOTE_EVERY_S = 0.5
LINE_EVERY_S = 2.0
LABEL_WIDTH = len("DataLoader, 2 workers")

Seen = list[tuple[int, int]]
"""The row and the picture's number of every trial that was delivered, in order."""


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
        with _dataset_folder(args.folder, args.sessions, args.trials) as folder:
            return _compare(Trials(folder), args, limit_bytes)
    finally:
        torch.set_num_threads(threads_before)


def _compare(trials: "Trials", args: argparse.Namespace, limit_bytes: int) -> int:
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


# ---------------------------------------------------------------------------------------------------------- the data


class Trials:
    """A dataset on disk: sessions of measurements, pictures, and which picture each trial showed."""

    def __init__(self, folder: str) -> None:
        with np.load(os.path.join(folder, TABLE)) as table:
            self.per_session, self.stimulus, self.coco = int(table["per_session"]), table["stimulus"], table["coco"]
        self.stimuli = os.path.join(folder, STIMULI)
        self.sessions = [_session(folder, n) for n in range(len(self.stimulus) // self.per_session)]

    def __len__(self) -> int:
        return len(self.stimulus)

    def open(self) -> ps.Dataset:
        """As one dataset, the penstock way."""
        betas = ps.open(self.sessions, fields=["betas"]).cast("betas", "float32", scale=1 / SCALE)
        return ps.join(voxels=betas, images=(ps.open(self.stimuli), self.stimulus), coco=self.coco)

    def describe(self, limit_bytes: int) -> str:
        """Sizes in words. Reads every file once, which leaves them all equally in the page cache."""
        stored = 0
        for path in (*self.sessions, self.stimuli):
            with open(path, "rb", buffering=0) as file:
                while piece := file.read(MiB):
                    stored += len(piece)
        delivered = len(self) * (4 * int(np.prod(VOLUME)) + int(np.prod(IMAGE)))
        return (
            f"{len(self):,} trials in {len(self.sessions)} gzipped HDF5 files, and the pictures shown: "
            f"{format_size(stored)} on disk, {format_size(delivered)} as tensors,\n"
            f"{delivered / limit_bytes:.1f} times the memory budget of {format_size(limit_bytes)}"
        )


@contextmanager
def _dataset_folder(chosen: str | None, sessions: int, per_session: int) -> Iterator[str]:
    """A folder with the dataset in it: the caller's, or one that goes away afterwards."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as temporary:
        folder = chosen or temporary
        if not os.path.exists(os.path.join(folder, TABLE)):
            _make(folder, sessions, per_session)
        found = Trials(folder)
        if (len(found.sessions), found.per_session) != (sessions, per_session):
            raise ConfigError(
                f"--folder {folder}: holds {len(found.sessions)} sessions of {found.per_session} trials, not "
                f"{sessions} of {per_session}; ask for those, or name another folder"
            )
        yield folder


def _make(folder: str, sessions: int, per_session: int) -> None:
    """Write the dataset, the table last: where there is a table, the rest is whole."""
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise ConfigError(f"--folder {folder}: has files, but no whole demo dataset; name an empty or a new folder")
    rng = np.random.default_rng(0)
    pictures = -(-sessions * per_session // SHOWN)
    noise = 12 * rng.standard_normal(VOLUME, dtype=np.float32)
    with Progress("making the dataset", sessions * per_session, "trials") as progress:
        for number in range(sessions):
            _make_session(_session(folder, number), per_session, rng, noise, progress)
    _make_pictures(os.path.join(folder, STIMULI), pictures, rng)
    stimulus = rng.permutation(np.arange(sessions * per_session) % pictures)
    coco = np.sort(rng.choice(10 * pictures, pictures, replace=False))[stimulus]
    np.savez(os.path.join(folder, TABLE), per_session=per_session, stimulus=stimulus, coco=coco)


def _session(folder: str, number: int) -> str:
    return os.path.join(folder, f"betas_session{number + 1:02d}.hdf5")


def _make_session(path: str, trials: int, rng: np.random.Generator, noise: np.ndarray, progress: "Progress") -> None:
    """One session, a trial a chunk: smooth fields with some noise, which compress like measurements."""
    import h5py

    chunk: dict[str, Any] = {"chunks": (1, *VOLUME), "compression": "gzip", "compression_opts": LEVEL, "shuffle": True}
    with h5py.File(path, "w") as file, ThreadPoolExecutor(cores()) as pool:
        betas = file.create_dataset("betas", (trials, *VOLUME), np.int16, **chunk)
        for trial, packed in enumerate(pool.map(_packed, (_volume(rng, noise) for _ in range(trials)))):
            betas.id.write_direct_chunk((trial, 0, 0, 0), packed)
            progress.add(1)


def _volume(rng: np.random.Generator, noise: np.ndarray) -> np.ndarray:
    """One trial's measurements."""
    values = SCALE * _smooth(rng, VOLUME)
    # The same noise from another corner: drawing it anew takes as long as all the rest.
    values += np.roll(noise, tuple(rng.integers(VOLUME)), (0, 1, 2))
    return values.astype(np.int16)


def _packed(volume: np.ndarray) -> bytes:
    """A chunk as HDF5's shuffle and gzip write it. Done here, where all cores help and Ctrl-C is not lost in h5py."""
    return zlib.compress(volume.reshape(-1, 1).view(np.uint8).T.tobytes(), LEVEL)


def _make_pictures(path: str, count: int, rng: np.random.Generator) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        bricks = file.create_dataset("imgBrick", (count, *IMAGE), np.uint8)
        for picture in range(count):
            for colour in range(IMAGE[2]):
                bricks[picture, ..., colour] = np.clip(128 + 60 * _smooth(rng, IMAGE[:2]), 0, 255)


def _smooth(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A random field, drawn coarsely and interpolated between the points."""
    field = rng.standard_normal([size // COARSE for size in shape], dtype=np.float32)
    weight = np.linspace(0, 1, COARSE, endpoint=False, dtype=np.float32)
    for axis in range(len(shape)):
        near, far = np.moveaxis(field, axis, -1)[..., None], np.moveaxis(np.roll(field, -1, axis), axis, -1)[..., None]
        between = near + (far - near) * weight
        field = np.moveaxis(between.reshape(*between.shape[:-2], -1), -1, axis)
    return field


# ------------------------------------------------------------------------------------------------------ the training


class Learner:
    """A small model, so that loading matters: means over cells of the brain -> means over cells of the picture."""

    def __init__(self, batch_size: int) -> None:
        import torch

        torch.manual_seed(0)
        cells, tiles = np.prod(VOLUME) // COARSE**3, np.prod(IMAGE) // (2 * COARSE) ** 2
        self._model = torch.nn.Linear(int(cells), int(tiles))
        # The first step makes torch set itself up; that is no loader's doing.
        self.step(torch.zeros(batch_size, *VOLUME), torch.zeros(batch_size, *IMAGE, dtype=torch.uint8))

    def step(self, voxels: Any, images: Any) -> None:
        """One step of training."""
        from torch.nn import functional

        slabs = voxels.unflatten(1, (-1, COARSE)).mean(2)  # axis by axis, which is four times as fast as all at once
        features = functional.avg_pool2d(slabs, COARSE).flatten(1)
        pixels = images[:, ::4, ::4].permute(0, 3, 1, 2).float() / 255
        wanted = functional.avg_pool2d(pixels, COARSE // 2).flatten(1)
        self._model.zero_grad()
        functional.mse_loss(self._model(features), wanted).backward()  # type: ignore[no-untyped-call]
        for weights in self._model.parameters():  # torch.optim would load a compiler, which leaves a folder behind
            assert weights.grad is not None
            weights.data -= RATE * weights.grad


class ByHand:
    """The dataset people write for a DataLoader: files opened on first use in each process, a sample a call."""

    def __init__(self, trials: Trials) -> None:
        self._trials, self._open = trials, dict[str, Any]()

    def __len__(self) -> int:
        return len(self._trials)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray, int, int]:
        session, trial = divmod(row, self._trials.per_session)
        voxels = self._file(self._trials.sessions[session])["betas"][trial].astype(np.float32) / SCALE
        image = self._file(self._trials.stimuli)["imgBrick"][self._trials.stimulus[row]]
        return voxels, image, int(self._trials.coco[row]), row

    def _file(self, path: str) -> Any:
        import h5py

        if path not in self._open:
            self._open[path] = h5py.File(path, "r")
        return self._open[path]

    def close(self) -> None:
        """Close what this process has opened."""
        for file in self._open.values():
            file.close()


def _with_penstock(trials: Trials, course: "Course", batch_size: int) -> tuple["Result", str, list["Promise"]]:
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


def _with_dataloader(trials: Trials, course: "Course", batch_size: int, workers: int) -> "Result":
    from torch.utils.data import DataLoader

    watch = Watch(course.limit_bytes)
    dataset: Any = ByHand(trials)
    loader = DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    result = course.take(f"DataLoader, {workers} workers", loader, watch)
    dataset.close()
    return result


# ----------------------------------------------------------------------------------------------------- the measuring


@dataclass(frozen=True)
class Result:
    """What one loader did."""

    loader: str
    samples_per_s: float
    peak_bytes: int
    seen: Seen


@dataclass(frozen=True)
class Course:
    """The epochs that every loader has to feed."""

    learner: Learner
    samples: int
    epochs: int
    limit_bytes: int

    def take(self, label: str, loader: Iterable[Any], watch: "Watch") -> Result:
        """Train with a loader; ``watch`` was made before it."""
        with Progress(label, (1 + self.epochs) * self.samples, "samples", watch.note) as progress:
            with watch.closely():
                seen = self._epoch(loader, progress)
            began = time.perf_counter()
            for _ in range(self.epochs):
                seen += self._epoch(loader, progress)
            seconds = time.perf_counter() - began
        return Result(label, self.epochs * self.samples / seconds, watch.peak_bytes, seen)

    def _epoch(self, loader: Iterable[Any], progress: "Progress") -> Seen:
        seen: Seen = []
        for voxels, images, coco, rows in loader:
            self.learner.step(voxels, images)
            seen += zip(rows.tolist(), coco.tolist(), strict=True)
            progress.add(len(rows))
        return seen


class Watch:
    """The most that this process and its workers held above what was held when the watch was made."""

    def __init__(self, limit_bytes: int) -> None:
        _trim()
        self.peak_bytes = 0
        self._limit_bytes, self._before = limit_bytes, _tree_bytes()

    def look(self) -> int:
        """What is held above the start now."""
        held = max(0, _tree_bytes() - self._before)
        self.peak_bytes = max(self.peak_bytes, held)
        return held

    def note(self) -> str:
        return f"mem {self.look() / MiB:.0f}/{self._limit_bytes / MiB:.0f} MiB"

    @contextmanager
    def closely(self) -> Iterator[None]:
        """Look every 20 ms for the length of a ``with``."""
        done = threading.Event()

        def keep_looking() -> None:
            while not done.wait(LOOK_EVERY_S):
                self.look()

        looking = threading.Thread(target=keep_looking)
        looking.start()
        try:
            yield
        finally:
            done.set()
            looking.join()


def _trim() -> None:
    """Give freed memory back to the system, so that what one loader left over is no gift to the next."""
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _tree_bytes() -> int:
    workers = children(os.getpid())
    return sum(_share_bytes(pid) for pid in (os.getpid(), *workers)) if workers else held_bytes()


def _share_bytes(pid: int) -> int:
    """As ``held_bytes``, a page shared by n processes counting 1/n: a worker shares with us what it never changed."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            lines = rollup.read().splitlines()
    except OSError:  # it has just ended
        return 0
    return sum(int(line.split()[1]) * KiB for line in lines if line.startswith((b"Pss_Anon:", b"Pss_Shmem:")))


class Progress:
    """A bar on a terminal, where tqdm is installed; otherwise a line now and then. All on stderr."""

    def __init__(self, label: str, total: int, unit: str, note: Callable[[], str] = str) -> None:
        self._label, self._total, self._unit, self._note = label, total, unit, note
        self._done, self._began = 0, time.perf_counter()
        self._bar = self._make_bar() if sys.stderr.isatty() and importlib.util.find_spec("tqdm") else None
        self._next_note = self._began + (LINE_EVERY_S if self._bar is None else 0)

    def _make_bar(self) -> Any:
        from tqdm import tqdm

        columns, lines = shutil.get_terminal_size()  # tqdm shows nothing where a terminal does not know its size
        layout = "{desc} {percentage:3.0f}%|{bar}| {rate_noinv_fmt}{postfix}, {remaining} left"
        bar = tqdm(total=self._total, unit=f" {self._unit}", bar_format=layout, ncols=columns, nrows=lines)
        bar.set_description_str(f"{self._label:<{LABEL_WIDTH}}")
        return bar

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        now = time.perf_counter()
        due = now >= self._next_note or self._done == self._total
        if due:
            self._next_note = now + (LINE_EVERY_S if self._bar is None else NOTE_EVERY_S)
        if self._bar is not None:
            if due:
                self._bar.set_postfix_str(self._note(), refresh=False)
            self._bar.update(count)
        elif due:
            self._print(now - self._began)

    def _print(self, seconds: float) -> None:
        rate = self._done / max(seconds, 1e-9)
        left = f"{(self._total - self._done) / rate:.0f} s left" if self._done < self._total else f"{seconds:.1f} s"
        parts = [f"{rate:,.0f} {self._unit}/s", self._note(), left]
        told = ", ".join(part for part in parts if part)
        print(f"{self._label}: {self._done / self._total:.0%}, {told}", file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------- the report


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
