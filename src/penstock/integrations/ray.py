"""Ray Data reads whatever ``penstock.open`` opens, and workers of Ray Train share a dataset.

    rows = ray.data.read_datasource(Datasource(penstock.open("volumes.h5")))

Each read task reads some rows by whole blocks of the file, and declares how many bytes they take.

In the training function of Ray Train:

    loader = train_loader(ds, batch_size=32, shuffle=True)
    load_position(loader)  # of the latest checkpoint, if there is one
    for batch in loader:
        ...
        save_position(loader, checkpoint)
        ray.train.report(metrics, checkpoint=checkpoint)
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.base.requirements import needs
from penstock.base.sizes import MiB, parse_size
from penstock.dataset.dataset import Dataset
from penstock.dataset.lazy import row_edges
from penstock.errors import ConfigError
from penstock.loader.loader import Loader

with needs("ray", "2.50", "ray"):
    import ray.data
    import ray.train
    from ray.data.block import BlockAccessor, BlockMetadata
    from ray.data.datasource import ReadTask

SAVED = "penstock_loader"
"""The entry of a checkpoint's metadata that holds the position of a loader."""

BLOCK_BYTES = 64 * MiB

# What a worker process of Ray's takes with Arrow, NumPy and this package, before it reads anything: Ray itself measured
# 113 MiB, and advises to declare a quarter more than it measures.
WORKER_BYTES = 144 * MiB


class Datasource(ray.data.Datasource):
    """A dataset as a source of Ray Data; workers must reach its files under the same paths.

    block:  about how many bytes one block of Ray's holds
    """

    def __init__(self, ds: Dataset, block: int | str = BLOCK_BYTES) -> None:
        super().__init__()
        self._ds, self._size = ds, parse_size(block, argument="block")
        self._row_bytes = max(1, sum(spec.row_bytes for spec in ds.fields.values()))

    @property
    def task_bytes(self) -> int:
        """The most memory that one read task takes, for ``read_datasource(…, memory=…)``.

        Its rows, a copy of them in Arrow's format, scratch memory, and the worker process itself, which Ray counts too.
        """
        rows = int(np.diff(row_edges(self._ds, self._size // self._row_bytes)).max(initial=1))
        return WORKER_BYTES + 2 * rows * self._row_bytes + self._ds.delivered.scratch_bytes(rows)

    def get_name(self) -> str:
        return "penstock"

    def estimate_inmemory_data_size(self) -> int:
        return len(self._ds) * self._row_bytes

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, **_: Any) -> list[ReadTask]:
        size = min(self._size, max(self._row_bytes, self.estimate_inmemory_data_size() // max(1, parallelism)))
        edges = row_edges(self._ds, size // self._row_bytes)
        return [self._task(int(a), int(b), per_task_row_limit) for a, b in pairwise(edges)]

    def _task(self, begin: int, end: int, limit: int | None) -> ReadTask:
        ds = self._ds

        def read() -> Iterable[Any]:
            yield BlockAccessor.batch_to_block(dict(ds[begin:end]))

        metadata = BlockMetadata(
            num_rows=end - begin, size_bytes=(end - begin) * self._row_bytes, input_files=None, exec_stats=None
        )
        return ReadTask(read, metadata, per_task_row_limit=limit)


class RayExecutor(Executor):
    """Ray as an executor: ``penstock.convert(ds, "out.zarr", executor=RayExecutor(), workers=8)``.

    options:  of each task, as ``ray.remote`` takes them: num_cpus, memory …
    """

    def __init__(self, **options: Any) -> None:
        self._remote = ray.remote(**options) if options else ray.remote

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run a function in a task of Ray's."""
        found: Future[Any] = self._remote(function).remote(*args, **kwargs).future()
        return found


def train_loader(ds: Dataset, **options: Any) -> Loader:
    """In a worker of Ray Train: a ``penstock.Loader`` of this worker's share of the samples.

    It asks Ray for the rank, so it works with or without a process group of torch's.
    """
    context = ray.train.get_context()
    return Loader(ds, rank=context.get_world_rank(), world_size=context.get_world_size(), **options)


def save_position(loader: Loader, checkpoint: "ray.train.Checkpoint") -> None:
    """Put the position of a loader into the metadata of a checkpoint, before it is reported."""
    checkpoint.update_metadata({SAVED: loader.state_dict()})


def load_position(loader: Loader, checkpoint: "ray.train.Checkpoint | None" = None) -> bool:
    """Go on from the position in a checkpoint: the latest that was reported, unless another is given.

    Returns whether there was one. The number of workers may have changed.
    """
    checkpoint = ray.train.get_checkpoint() if checkpoint is None else checkpoint
    if checkpoint is None:
        return False
    metadata = checkpoint.get_metadata()
    if SAVED not in metadata:
        raise ConfigError(
            f"{checkpoint}: no position of a loader in its metadata: save_position() was not called on it"
        )
    loader.load_state_dict(metadata[SAVED])
    return True
