"""What all contenders of the demo share: a small model, the time they have, and how their memory is watched."""

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.cli.progress import Progress
from penstock.measure import tree_bytes
from penstock.sizes import MiB

RATE = 1e-3  # of learning
EMBEDDING = 64
GRID = 8  # pictures are averaged over so many cells a side before they are embedded
LOOK_EVERY_S = 0.02


class Learner:
    """A small model, so that loading matters: voxels -> a fixed random embedding of the picture."""

    def __init__(self, voxels: int) -> None:
        import torch

        torch.manual_seed(0)
        self._model = torch.nn.Linear(voxels, EMBEDDING)
        self._embedding = torch.randn(3 * GRID**2, EMBEDDING) / GRID
        # The first step makes torch set itself up; that is no loader's doing.
        self.step(torch.zeros(2, voxels), torch.zeros(2, 3, 16, 16))

    def step(self, voxels: Any, images: Any) -> None:
        """One step of training."""
        from torch.nn import functional

        features = voxels.float()
        features = features.mean(1) if features.ndim == 3 else features
        pixels = images.float() / 255 if not images.is_floating_point() else images
        wanted = functional.adaptive_avg_pool2d(pixels, GRID).flatten(1) @ self._embedding
        self._model.zero_grad()
        functional.mse_loss(self._model(features), wanted).backward()  # type: ignore[no-untyped-call]
        for weights in self._model.parameters():  # torch.optim would load a compiler, which leaves a folder behind
            assert weights.grad is not None
            weights.data -= RATE * weights.grad


@dataclass(frozen=True)
class Result:
    """What one contender did."""

    source: str
    loader: str
    samples_per_s: float
    peak_bytes: int
    seen: list[int]
    """Pictures of every sample that was delivered while memory was watched, in order."""

    @property
    def is_ours(self) -> bool:
        return self.loader.startswith("penstock")


@dataclass(frozen=True)
class Course:
    """What every contender has to do: feed the model for an epoch, or as far as it comes in so many seconds."""

    learner: Learner
    seconds: float
    limit_bytes: int

    def take(self, source: str, samples: int, label: str, loader: Iterable[Any], watch: "Watch") -> Result:
        """Train with a loader; ``watch`` was made before it."""
        with Progress(label, 2 * samples, "samples", watch.note) as progress:
            with watch.closely():
                seen, _ = self._epoch(loader, progress)
            _, rate = self._epoch(loader, progress)
        return Result(source, label, rate, watch.peak_bytes, seen)

    def _epoch(self, loader: Iterable[Any], progress: Progress) -> tuple[list[int], float]:
        seen: list[int] = []
        began = time.perf_counter()
        for voxels, images, coco, *_ in loader:
            self.learner.step(voxels, images)
            seen += coco.reshape(-1).tolist()
            progress.add(len(coco))
            if time.perf_counter() - began > self.seconds:
                break
        return seen, len(seen) / (time.perf_counter() - began)


class ByHand:
    """The dataset people write for a DataLoader: files opened on first use in each process, a trial a call."""

    def __init__(
        self, sessions: dict[int, str], stimuli: str, trials: list[tuple[int, int, int]], mask: np.ndarray
    ) -> None:
        self._sessions, self._stimuli, self._trials, self._mask = sessions, stimuli, trials, mask
        self._open = dict[str, Any]()

    def __len__(self) -> int:
        return len(self._trials)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray, int]:
        session, trial, picture = self._trials[row]
        betas = self._file(self._sessions[session])["betas"][trial]
        image = self._file(self._stimuli)["imgBrick"][picture]
        return betas[self._mask].astype(np.float32) / 300, image.transpose(2, 0, 1), picture

    def _file(self, path: str) -> Any:
        import h5py

        if path not in self._open:
            self._open[path] = h5py.File(path, "r")
        return self._open[path]

    def close(self) -> None:
        """Close what this process has opened."""
        for file in self._open.values():
            file.close()


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


def kept(epoch: Callable[[], Iterable[Any]]) -> Iterable[Any]:
    """An iterable that begins anew each time."""

    class Again:
        def __iter__(self) -> Iterator[Any]:
            return iter(epoch())

    return Again()
