"""``MultiLoader``: batches of several datasets of different shapes."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

from penstock.base import checks, html
from penstock.base.checks import explains_arguments, shown
from penstock.base.sizes import format_size
from penstock.dataset.dataset import Dataset, OnError
from penstock.errors import ConfigError
from penstock.loader.epoch import Alternate, Together
from penstock.loader.interleave import Interleaved
from penstock.loader.loader import OF_TORCH, BaseLoader
from penstock.loader.nonfinite import Nan
from penstock.loader.order import Order, check_seed, repeated
from penstock.loader.partition import Tail
from penstock.loader.permutation import generator
from penstock.loader.plan import JointPlan
from penstock.loader.ranks import Rank
from penstock.loader.request import order_of
from penstock.loader.runtime import LoaderRuntime, make_sources
from penstock.loader.source import LoaderOptions

Mode = Literal["together", "alternate"]
Samples = Literal["all", "shortest", "longest"]


def _check_datasets(datasets: Mapping[str, Dataset]) -> None:
    if not isinstance(datasets, Mapping) or not datasets:
        raise ConfigError(f"datasets: expected a dict of at least one dataset, by name; got {shown(datasets)}")
    for name, ds in datasets.items():
        if not isinstance(name, str) or not isinstance(ds, Dataset):
            raise ConfigError(
                f"datasets[{name!r}]: expected a text as name and a dataset as penstock.open returns it; got "
                f"{type(ds).__name__}"
            )
        if len(ds) == 0:
            raise ConfigError(f"datasets[{name!r}]: no samples; check what was selected, or leave it out")


class MultiLoader(BaseLoader):
    """Batches of several datasets, whose fields may differ in shape, in memory bounded by one number of bytes.

    datasets:    what to load, by name
    mode:        "together": each step is a dict with a batch of every dataset, by name;
                 "alternate": each step is a pair, a dataset's name and a batch of it, the datasets spread evenly over
                 the epoch
    batch_size:  samples per batch on each rank; a dict where datasets differ
    samples:     what an epoch is. "all": every sample of every dataset exactly once; in "together", datasets that have
                 ended are absent from the last steps. "shortest" and "longest": as many steps of each dataset as the
                 one with the fewest or the most. A dict: the number of samples of each. If an epoch takes only part of
                 a dataset, the next one continues there; each pass over a dataset has a new order, so that every
                 sample comes once before any comes twice
    shuffle:     within each dataset, as in ``Loader``, and in "alternate" the sequence of datasets too
    seed:        decides all orders, together with the epoch; no two datasets are shuffled alike
    memory:      the most that may be held for all datasets together
    threads:     the most reader threads for all datasets together
    processes:   in how many processes they read, as in ``Loader``
    max_errors:  with ``on_error="skip"``: raise after this many per epoch and dataset

    All other arguments are as in ``Loader``.
    """

    @explains_arguments({**OF_TORCH, "dataset": "give several by name: MultiLoader({...}, …)"}, _check_datasets)
    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        *,
        mode: Mode,
        batch_size: int | Mapping[str, int],
        samples: Samples | Mapping[str, int] = "all",
        shuffle: bool = False,
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
        _check_datasets(datasets)  # also when given by name
        self.mode: Mode = checks.one_of("mode", mode, get_args(Mode))
        shuffle, seed = checks.flag("shuffle", shuffle), check_seed(seed)
        options = LoaderOptions(
            memory=memory, threads=threads, processes=processes, seed=seed, columns=columns, on_error=on_error,
            max_errors=max_errors, nan=nan,
            drop_last=drop_last, tail=tail, rank=rank, world_size=world_size, mesh=mesh, device=device, output=output,
        )  # fmt: skip
        sizes = _batch_sizes(datasets, batch_size)
        orders = {name: order_of(ds, shuffle, _seed_of(seed, name), window) for name, ds in datasets.items()}
        orders = _for_epochs(orders, sizes, samples)
        sources, held_before = make_sources(datasets, orders, sizes, options)
        times = {
            name: Interleaved(name, len(orders[name]), source.partition.step_samples, seed if shuffle else None)
            for name, source in sources.items()
        }
        self._runtime = LoaderRuntime(
            sources,
            held_before=held_before,
            make_steps=Together if mode == "together" else Alternate,
            identity={"mode": mode, "seed": seed, "of": {name: source.identity for name, source in sources.items()}},
            times=None if mode == "together" else times,
            progress=progress,
        )

    @property
    def plan(self) -> JointPlan:
        """What the loader will use, decided before anything is read."""
        plan = self._runtime.plan
        assert isinstance(plan, JointPlan)
        return plan

    def __len__(self) -> int:
        """Steps in a whole epoch, the same on every rank."""
        steps = [source.partition.steps for source in self._runtime.sources.values()]
        return max(steps) if self.mode == "together" else sum(steps)

    def __repr__(self) -> str:
        return "\n".join([self._summary(), *(f"  {name}: {text}" for name, text in self._describe_members().items())])

    def _repr_html_(self) -> str:
        table = html.table(("dataset", "loader"), self._describe_members().items())
        return html.paragraph(self._summary()) + table + self.plan._repr_html_()

    def _summary(self) -> str:
        plan, partition = self.plan, next(iter(self._runtime.sources.values())).partition
        ranks = f", rank {partition.rank} of {partition.world_size}" if partition.world_size > 1 else ""
        return (
            f'MultiLoader of {len(self._runtime.sources)} datasets, "{self.mode}": {len(self):,} steps{ranks}, in '
            f"{format_size(plan.planned_bytes)} of {format_size(plan.limit_bytes)}; "
            f"epoch {self._runtime.position.epoch}"
        )

    def _describe_members(self) -> dict[str, str]:
        samples = self._runtime.position.samples
        return {
            name: f"{source.partition.steps:,} batches of {source.partition.batch_size:,}, {samples[name]:,} of "
            f"{source.partition.length:,} samples delivered"
            for name, source in self._runtime.sources.items()
        }


def _seed_of(seed: int, name: str) -> int:
    """A dataset's own seed: with one for all, datasets of one length would be shuffled alike."""
    return int(generator(seed, 0, "dataset", name).integers(2**53))


def _batch_sizes(datasets: Mapping[str, Dataset], batch_size: int | Mapping[str, int]) -> dict[str, int]:
    if not isinstance(batch_size, Mapping):
        batch_size = dict.fromkeys(datasets, batch_size)
    return _named("batch_size", datasets, batch_size)


def _named(argument: str, datasets: Mapping[str, Any], given: Mapping[str, int]) -> dict[str, int]:
    """One positive number per dataset."""
    for name in datasets:
        checks.whole(f"{argument}[{name!r}]", given.get(name), least=1)
    for name in given:
        if name not in datasets:
            raise ConfigError(f"{argument}: no dataset {name!r}: there are {', '.join(map(repr, datasets))}")
    return {name: int(given[name]) for name in datasets}


def _for_epochs(
    orders: Mapping[str, Order], sizes: Mapping[str, int], samples: Samples | Mapping[str, int]
) -> dict[str, Order]:
    """The orders, with as many samples per epoch as requested."""
    if isinstance(samples, Mapping):
        wanted = _named("samples", orders, samples)
    elif not isinstance(samples, str) or samples not in get_args(Samples):
        raise ConfigError(
            f'samples={shown(samples)}: expected "all", "shortest", "longest", or a dict of numbers by name'
        )
    elif samples == "all":
        return dict(orders)
    else:
        steps = [Fraction(len(order), sizes[name]) for name, order in orders.items()]
        each = min(steps) if samples == "shortest" else max(steps)
        # Of batches, not of steps: on any number of ranks, an epoch has the same samples.
        wanted = {name: -(-(each * sizes[name]) // 1) for name in orders}
    return {
        name: order if wanted[name] == len(order) else repeated(order, int(wanted[name]))
        for name, order in orders.items()
    }
