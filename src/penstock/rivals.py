"""What other loaders would hold for the same job. Arithmetic from how they work, checked against what they took.

torch's DataLoader hands each worker two batches to make (``prefetch_factor``). While it makes one, a worker holds the
samples and the shared memory they are stacked into; its other batch waits in shared memory; one more is in the training
loop's hands. Workers are not all at that point at once, so on the whole half of the stacking counts. Without workers it
is the samples, their stack, and the batch before.

WebDataset's workers also hold their shuffle buffer, of samples as they are stored. Batches are stacked in memory of
their own before they are copied to shared memory, so that a worker holds samples, stack, copy, and one that waits.
"""

from dataclasses import dataclass

from penstock.sizes import MiB

# Batches a worker holds: one that waits, one being made, and half of the stack.
TORCH_BATCHES_A_WORKER = 2.5
# Samples, their stack, and the batch in the training loop's hands.
TORCH_BATCHES_ALONE = 3
# One that waits, samples, their stack, the copy in shared memory.
WEBDATASET_BATCHES_A_WORKER = 4
# Measured: what a forked worker comes to own of Python's and the libraries' pages.
WORKER_BYTES = 10 * MiB


@dataclass(frozen=True)
class Job:
    """What is to be loaded, as far as it matters to any loader."""

    batch_bytes: int
    stored_bytes: float
    """Of one sample, as it lies in a file."""
    rows: int


@dataclass(frozen=True)
class Habits:
    """How people run other loaders."""

    workers: int = 4
    shuffle_buffer: int = 1000
    """Samples that each worker of WebDataset mixes."""


@dataclass(frozen=True)
class Rival:
    """Another loader, and what it would hold at its peak."""

    name: str
    peak_bytes: int
    told: str


def rivals(job: Job, habits: Habits) -> list[Rival]:
    """What the usual loaders would hold."""
    return [_dataloader(job, habits.workers), _webdataset(job, habits)]


def _dataloader(job: Job, workers: int) -> Rival:
    name = f"torch DataLoader, {counted(workers)}"
    if not workers:
        return Rival(name, TORCH_BATCHES_ALONE * job.batch_bytes, "samples, their stack, and the batch before")
    batches = TORCH_BATCHES_A_WORKER * workers + 1
    told = f"about {batches:g} batches: 2 to each worker, one stacked from its samples, one in your hands"
    return Rival(name, int(batches * job.batch_bytes) + workers * WORKER_BYTES, told)


def _webdataset(job: Job, habits: Habits) -> Rival:
    processes = max(1, habits.workers)
    held = min(habits.shuffle_buffer, -(-job.rows // processes))
    buffers = int(processes * held * job.stored_bytes)
    batches = (WEBDATASET_BATCHES_A_WORKER if habits.workers else TORCH_BATCHES_ALONE - 1) * processes + 1
    name = f"WebDataset, {counted(habits.workers)}, shuffle({habits.shuffle_buffer})"
    told = f"{processes * held:,} samples in shuffle buffers, and about {batches} batches"
    own = habits.workers * WORKER_BYTES
    return Rival(name, buffers + batches * job.batch_bytes + own, told)


def counted(workers: int) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{workers} worker{'' if workers == 1 else 's'}"
