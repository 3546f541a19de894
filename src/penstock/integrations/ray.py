"""Ray Data: read whatever ``penstock.open`` opens, in blocks that follow those of the files.

    rows = ray.data.read_datasource(Datasource(penstock.open("volumes.h5")))

Each read task reads some rows by whole blocks of the file, and declares how many bytes they take.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from itertools import pairwise
from typing import Any

from penstock.base.sizes import MiB, parse_size
from penstock.dataset.dataset import Dataset
from penstock.errors import ConfigError
from penstock.integrations.dask import chunk_edges

try:
    import ray.data
    from ray.data.block import BlockAccessor, BlockMetadata
    from ray.data.datasource import ReadTask
except ImportError:
    raise ConfigError('penstock.integrations.ray needs Ray Data: pip install "penstock[ray]"') from None

BLOCK_BYTES = 64 * MiB


class Datasource(ray.data.Datasource):
    """A dataset as a source of Ray Data; workers must reach its files under the same paths.

    block:  about how many bytes one block of Ray's holds
    """

    def __init__(self, ds: Dataset, block: int | str = BLOCK_BYTES) -> None:
        super().__init__()
        self._ds, self._size = ds, parse_size(block, argument="block")
        self._row_bytes = max(1, sum(spec.row_bytes for spec in ds.fields.values()))

    def get_name(self) -> str:
        return "penstock"

    def estimate_inmemory_data_size(self) -> int:
        return len(self._ds) * self._row_bytes

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, **_: Any) -> list[ReadTask]:
        size = min(self._size, max(self._row_bytes, self.estimate_inmemory_data_size() // max(1, parallelism)))
        edges = chunk_edges(self._ds, self._row_bytes, size)
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
