"""What both sides of the demo share: a small model, the epochs to feed it, and the dataset as written by hand."""

import ctypes
import gc
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.cli.demo_data import COARSE, IMAGE, SCALE, VOLUME, Trials
from penstock.cli.progress import Progress
from penstock.measure import tree_bytes
from penstock.sizes import MiB

RATE = 1e-3  # of learning
LOOK_EVERY_S = 0.02

Seen = list[tuple[int, int]]
"""The row and the picture's number of every trial that was delivered, in order."""


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

    def _epoch(self, loader: Iterable[Any], progress: Progress) -> Seen:
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
        self._limit_bytes, self._before = limit_bytes, tree_bytes()

    def look(self) -> int:
        """What is held above the start now."""
        held = max(0, tree_bytes() - self._before)
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
