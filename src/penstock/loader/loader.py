"""``Loader``: batches of one dataset, within a memory budget."""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from penstock.base import html
from penstock.base.checks import explains_arguments
from penstock.base.sizes import format_size
from penstock.base.spec import Origin
from penstock.dataset.composition import check_dataset
from penstock.dataset.dataset import Dataset, OnError
from penstock.errors import ConfigError
from penstock.loader.epoch import OneDataset
from penstock.loader.nonfinite import Nan
from penstock.loader.order import Order
from penstock.loader.partition import Tail
from penstock.loader.plan import Plan
from penstock.loader.plan_text import ALONE
from penstock.loader.ranks import Rank
from penstock.loader.request import order_of
from penstock.loader.runtime import LoaderRuntime, make_sources
from penstock.loader.source import LoaderOptions
from penstock.loader.stats import Report, Stats

Self = TypeVar("Self", bound="BaseLoader")

# Arguments of torch's DataLoader, and what takes their place.
OF_TORCH = {
    "dataset": "give it first: Loader(ds, …)",
    "num_workers": "threads=8 sets how many threads read, processes=4 in how many processes; leave both out as a rule",
    "collate_fn": "batches are read as arrays, many rows at once: ds.map(function) changes what they hold",
    "sampler": "shuffle= takes True, False or an order such as penstock.Resampled, and ds.select(rows) chooses rows",
    "batch_sampler": "batch_size= sets the samples per batch, and shuffle= their order",
    "pin_memory": 'device="cuda" pins memory by itself, and copies each batch ahead of time',
    "pin_memory_device": 'device="cuda" pins memory by itself, and copies each batch ahead of time',
    "prefetch_factor": 'how far ahead it reads follows from the budget: memory="2GiB"',
    "persistent_workers": "leave it out: reader processes live as long as the loader",
    "worker_init_fn": "leave it out: seed= decides the order, and ds.map_each(function) gives each sample its own rng",
    "multiprocessing_context": "leave it out: reader processes are always started anew; processes= sets how many",
    "generator": "seed=0 decides the order, together with the epoch",
    "timeout": "leave it out: reads that fail raise; penstock.open(…, remote=RemoteOptions(…)) has limits for servers",
    "in_order": "leave it out: batches always come in the order of the epoch",
    "transform": "ds.map(function) changes what samples hold",
    "fields": "columns=(…) chooses the fields of a batch",
}


class BaseLoader:
    """What loaders of one and of several datasets have in common."""

    _runtime: LoaderRuntime

    def __iter__(self) -> Iterator[Any]:
        """The next epoch, or the rest of one from a loaded position.

        It begins with the first ``next``, which ends an iteration still under way; until then nothing changes.
        """
        return self._runtime.iterate()

    def state_dict(self) -> dict[str, Any]:
        """The position after the latest batch delivered, as JSON."""
        return self._runtime.save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position with the next iteration; batch size, budget, threads and ranks may differ."""
        self._runtime.load(state)

    @property
    def epoch(self) -> int:
        """The epoch of the current position."""
        return int(self.state_dict()["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration: from its beginning, or from a position loaded inside it."""
        self._runtime.set_epoch(epoch)

    def stats(self) -> Stats:
        """Rate, waits, memory and bottleneck of the current or latest epoch."""
        return self._runtime.stats()

    def report(self) -> Report:
        """What the current or latest epoch left out, filled in, or could not check."""
        return self.stats().report

    def close(self) -> None:
        """End the iteration under way, its threads and files, and free the memory that is not lent."""
        self._runtime.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            f"a {type(self).__name__} cannot be pickled or copied: its threads and memory belong to this process. Make "
            f"it in the process that uses it; a Dataset can be sent there, and so can loader.state_dict()"
        )


class Loader(BaseLoader):
    """Batches of a dataset, in memory bounded by a number of bytes.

    ds:          what to load
    batch_size:  samples per batch on each rank
    shuffle:     False, True (a new order each epoch: over the whole set, or where files store many rows per chunk, by
                 blocks mixed in windows, so that each chunk is read once), or an ``Order`` of your own
    seed:        decides the shuffled order, together with the epoch
    memory:      the most the loader may hold, as ``"2GiB"`` or bytes; None takes a quarter of what is free
    threads:     the most reader threads, in all processes together; "auto" starts with one per core (16 for remote
                 files) and adds more if reading is I/O-bound
    processes:   in how many processes the threads read; 0 reads in this process. "auto" chooses by cores, budget and
                 work, leaves the training step a core, and says why in the plan. Your own functions then run on all
                 cores. No ``if __name__ == "__main__"`` is needed
    columns:     fields of a batch, in this order, as a tuple; None gives dicts of all. ``"__index__"``, ``"__url__"``
                 and ``"__key__"`` name each sample: its row, file, and place in the file
    window:      where rows come in blocks: how much is mixed together, in rows or as a size ("512MiB" as stored)
    on_error:    "raise", or "skip": samples that cannot be read are left out of their batch, which is then smaller,
                 and are counted and listed in ``report()``. An empty batch is left out too, unless there are several
                 ranks, which must take the same steps
    max_errors:  with "skip": raise after this many per epoch
    nan:         values that are NaN or infinite: "pass" does not look for them; "count" counts them by field in
                 ``stats()``; "raise" treats such a sample as unreadable. Looking takes about as long as copying the
                 values
    drop_last:   leave out the last, smaller batch
    tail:        where fewer samples remain than ranks: "pad" repeats some, "drop" leaves them out. "fill" makes all
                 batches of all ranks equally large: the last ones repeat samples
    rank, world_size:  this process's share; taken from torch.distributed where it is in use. ``rank="auto"`` also asks
                 the environment: torchrun, Slurm, MPI. Under such a launcher, make the loader after
                 ``init_process_group``, or pass one of these
    mesh:        a torch ``DeviceMesh`` in place of rank and world_size: ranks along its data axes divide the samples,
                 and ranks along others, such as "tp", get the same batches
    device:      copy batches to this device, and convert there
    output:      "torch" tensors or "numpy" arrays
    progress:    show how far each epoch is, with rate, memory and waits: a bar on a terminal, else lines; on rank 0
    """

    @explains_arguments(OF_TORCH, check_dataset)
    def __init__(
        self,
        ds: Dataset,
        *,
        batch_size: int,
        shuffle: bool | Order = False,
        seed: int = 0,
        memory: int | str | None = None,
        threads: int | Literal["auto"] = "auto",
        processes: int | Literal["auto"] = "auto",
        columns: Sequence[str] | None = None,
        window: int | str | None = None,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        nan: Nan = "pass",
        drop_last: bool = False,
        tail: Tail = "pad",
        rank: Rank = None,
        world_size: int | None = None,
        mesh: Any = None,
        device: Any = None,
        output: Literal["torch", "numpy"] = "torch",
        progress: bool = False,
    ) -> None:
        options = LoaderOptions(
            memory=memory, threads=threads, processes=processes, seed=seed, columns=columns, on_error=on_error,
            max_errors=max_errors, nan=nan,
            drop_last=drop_last, tail=tail, rank=rank, world_size=world_size, mesh=mesh, device=device, output=output,
        )  # fmt: skip
        orders = {ALONE: order_of(ds, shuffle, seed, window)}
        sources, held_before = make_sources({ALONE: ds}, orders, {ALONE: batch_size}, options)
        self._source = sources[ALONE]
        self.dataset = ds
        """What is loaded."""
        identity = self._source.identity
        self._runtime = LoaderRuntime(
            sources, held_before=held_before, make_steps=OneDataset, identity=identity, progress=progress
        )

    @property
    def plan(self) -> Plan:
        """What the loader will use, decided before anything is read."""
        return self._source.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        """For a plan that also reserves memory for something else, such as opening the files."""
        self._runtime.plan = self._source.plan = plan

    @property
    def batch_size(self) -> int:
        """Samples per batch on each rank."""
        return self._source.partition.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether the last, smaller batch is left out."""
        return self._source.partition.drop_last

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        return self._source.partition.steps

    def origin(self, row: int) -> Origin:
        """Where a sample comes from."""
        return self._source.origin(row)

    def __repr__(self) -> str:
        return "\n".join([self._summary(), *(f"  {name}: {text}" for name, text in self._describe_columns().items())])

    def _repr_html_(self) -> str:
        columns = html.field_table(self._describe_columns())
        return html.paragraph(self._summary()) + columns + self.plan._repr_html_()

    def _summary(self) -> str:
        partition, plan, at = self._source.partition, self.plan, self._runtime.position
        ranks = f", rank {partition.rank} of {partition.world_size}" if partition.world_size > 1 else ""
        return (
            f"Loader: {partition.steps:,} batches of {partition.batch_size:,} samples{ranks}, in "
            f"{format_size(plan.planned_bytes)} of {format_size(plan.limit_bytes)}; epoch {at.epoch}, "
            f"{at.samples[ALONE]:,} of {partition.length:,} samples delivered"
        )

    def _describe_columns(self) -> dict[str, str]:
        fields = self._source.fields
        return {name: str(fields.get(name, "names each sample")) for name in self._source.columns or fields}


def runtime_of(loader: BaseLoader) -> LoaderRuntime:
    """The engine of a loader, for reports and trials."""
    return loader._runtime
