"""Memory that other loaders would hold for the same job: arithmetic from how they work, checked by measurement.

torch's DataLoader hands each worker two batches to make (``prefetch_factor``). While it makes one, a worker holds the
samples and the shared memory they are stacked into; its other batch waits in shared memory; the training loop has one
more. Workers are not all at that point at once, so on average half of the stacking counts. Without workers it holds
the samples, their stack, and the batch before.

WebDataset's workers also hold their shuffle buffer, of samples as they are stored. Batches are stacked in memory of
their own before they are copied to shared memory, so that a worker holds samples, stack, copy, and one that waits.
"""

from typing import Any

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.base.sizes import MiB, format_count
from penstock.errors import ConfigError

# Batches per worker: one that waits, one being made, and half of the stack.
TORCH_BATCHES_PER_WORKER = 2.5
# Samples, their stack, and the batch that the training loop has.
TORCH_BATCHES_ALONE = 3
# One that waits, samples, their stack, the copy in shared memory.
WEBDATASET_BATCHES_PER_WORKER = 4
# Measured: pages of Python and its libraries that become a forked worker's own.
WORKER_BYTES = 10 * MiB


@dataclass(frozen=True)
class LoadingJob:
    """What to load, as far as it matters to any loader."""

    batch_bytes: int
    stored_bytes: float
    """Bytes of one sample in its file."""
    rows: int


@dataclass(frozen=True)
class Habits:
    """How people run other loaders."""

    workers: int = 4
    shuffle_buffer: int = 1000
    """Samples that each worker of WebDataset mixes."""

    def __post_init__(self) -> None:
        for name in ("workers", "shuffle_buffer"):
            object.__setattr__(self, name, checks.whole(name, getattr(self, name)))


def check_habits(habits: Any) -> Habits:
    """Habits, as an argument: None stands for those of most people."""
    if habits is None:
        return Habits()
    if isinstance(habits, Habits):
        return habits
    raise ConfigError(f"habits={checks.shown(habits)}: expected Habits(workers=…, shuffle_buffer=…)")


@dataclass(frozen=True)
class Rival:
    """Another loader, and the memory it would hold at its peak."""

    name: str
    peak_bytes: int
    text: str


def rivals(job: LoadingJob, habits: Habits) -> list[Rival]:
    """The memory that the usual loaders would hold."""
    return [_dataloader(job, habits.workers), _webdataset(job, habits)]


def _dataloader(job: LoadingJob, workers: int) -> Rival:
    name = f"torch DataLoader, {format_count(workers, 'worker')}"
    if not workers:
        return Rival(name, TORCH_BATCHES_ALONE * job.batch_bytes, "samples, their stack, and the batch before")
    batches = TORCH_BATCHES_PER_WORKER * workers + 1
    text = f"about {batches:g} batches: 2 to each worker, one stacked from its samples, one in your hands"
    return Rival(name, int(batches * job.batch_bytes) + workers * WORKER_BYTES, text)


def _webdataset(job: LoadingJob, habits: Habits) -> Rival:
    processes = max(1, habits.workers)
    held = min(habits.shuffle_buffer, -(-job.rows // processes))
    buffers = int(processes * held * job.stored_bytes)
    batches = (WEBDATASET_BATCHES_PER_WORKER if habits.workers else TORCH_BATCHES_ALONE - 1) * processes + 1
    name = f"WebDataset, {format_count(habits.workers, 'worker')}, shuffle({habits.shuffle_buffer})"
    text = f"{processes * held:,} samples in shuffle buffers, and about {batches} batches"
    own = habits.workers * WORKER_BYTES
    return Rival(name, buffers + batches * job.batch_bytes + own, text)
