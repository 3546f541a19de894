"""One dataset of a loader: its order, this rank's share, its columns, and the memory of its batches."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.base.spec import Origin
from penstock.dataset.dataset import Dataset, OnError, check_on_error
from penstock.dataset.explain import codecs, read_paths, unchecked
from penstock.loader.nonfinite import Nan
from penstock.loader.order import Order
from penstock.loader.outputs import Output
from penstock.loader.partition import Partition, Tail
from penstock.loader.plan import Plan
from penstock.loader.ranks import Rank, place_of
from penstock.loader.readers import Faults, Readers
from penstock.loader.request import IDENTITY, INDEX, URL, check_columns, chosen, request_for
from penstock.loader.schedule import Epoch
from penstock.loader.slots import Slots
from penstock.loader.team import Team


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Arguments that loaders of one and of several datasets have in common."""

    memory: int | str | None
    threads: int | Literal["auto"]
    processes: int | Literal["auto"]
    columns: Any
    on_error: OnError
    max_errors: int | None
    nan: Nan
    drop_last: bool
    tail: Tail
    rank: Rank
    world_size: int | None
    mesh: Any
    device: Any
    output: Literal["torch", "numpy"]
    seed: int

    def faults(self) -> Faults:
        """What to do about bad samples."""
        most = None if self.max_errors is None else checks.whole("max_errors", self.max_errors)
        skip = check_on_error(self.on_error) == "skip"
        return Faults(skip=skip, nan=checks.one_of("nan", self.nan, get_args(Nan)), most=most)

    def partition(self, length: int, batch_size: int) -> Partition:
        """This rank's partition of ``length`` positions."""
        rank, world_size = place_of(self.rank, self.world_size, self.mesh)
        return Partition(length, batch_size, rank=rank, world_size=world_size, drop_last=self.drop_last, tail=self.tail)


class Source:
    """A dataset as a loader reads it. Its plan is made with those of the others, and set before it begins."""

    plan: Plan

    def __init__(self, ds: Dataset, order: Order, batch_size: int, output: Output, options: LoaderOptions) -> None:
        self.output, self.order = output, order
        self.faults = options.faults()
        self.partition = options.partition(len(order), batch_size)
        self.columns, self.fields = check_columns(ds, options.columns), ds.fields
        self._views = {name: axes.order for name, axes in ds.axes.items() if not axes.is_contiguous}
        self.store = output.prepare(*chosen(ds, self.columns))
        paths = read_paths(self.store)
        self.request = request_for(
            self.store, paths, order, batch_size=self.partition.batch_size, steps=self.partition.steps,
            threads=options.threads, processes=options.processes, memory=options.memory, spare_slots=output.spare_slots,
        )  # fmt: skip
        self.seed = options.seed
        self.identity = {"data": ds.fingerprint, **order.describe()}
        """What a saved position is compared with."""
        self.codecs, self.unchecked = codecs(paths), unchecked(paths)
        self.files_left_out = [str(why) for why in ds.left_out]
        self.slots: Slots | None = None
        self._readers: Readers | None = None

    def begin(
        self, epoch: int, samples: int, team: Team, wanted_at: Callable[[int], float], number: int, *, is_shared: bool
    ) -> Readers:
        """Prepare to read an epoch from a position on.

        number:     which of the loader's datasets this is
        is_shared:  whether other processes fill the slots
        """
        if self.slots is not None and self._readers is not None:
            if self._readers.have_ended:
                self.slots.reclaim()
            else:
                self.close()  # a read that does not return may still write to these slots
        if self.slots is None:
            plan = self.plan
            self.slots = Slots(
                self.store.fields, plan.batch_rows, plan.slots, self.output.pin, is_shared=is_shared,
                is_tight=plan.is_tight, wake_from=plan.wake_from,
            )  # fmt: skip
        what = Epoch(epoch, self.order, replace(self.partition, start=samples), self.seed)
        self._readers = Readers(
            self.store, what, self.plan, self.slots, team, wanted_at=wanted_at, faults=self.faults, number=number
        )  # fmt: skip
        return self._readers

    @property
    def added_bytes(self) -> int:
        """Memory of batches beyond the plan, while the caller keeps batches."""
        return 0 if self.slots is None else (self.slots.count - self.slots.planned) * self.plan.batch_bytes

    def shape(self, values: Mapping[str, Any], rows: np.ndarray) -> Any:
        """A batch as the caller wants it: a dict, or a tuple in the order of ``columns``."""
        for name, axes in self._views.items():
            if name in values:
                values = {**values, name: self.output.permute(values[name], (0, *(axis + 1 for axis in axes)))}
        if self.columns is None:
            return dict(values)
        return tuple(self._identify(name, rows) if name in IDENTITY else values[name] for name in self.columns)

    def origin(self, row: int) -> Origin:
        """Where a sample comes from."""
        return self.store.origin(row)

    def close(self) -> None:
        """Free the memory of batches that are not lent."""
        if self.slots is not None:
            self.slots.close()
            self.slots = None

    def forget_parent(self) -> None:
        """In a forked child: the parent's threads do not exist here, and never return the slots that they hold."""
        self.slots = self._readers = None

    def _identify(self, column: str, rows: np.ndarray) -> Any:
        if column == INDEX:
            return self.output.start({INDEX: rows.copy()}, rows)()[INDEX]
        places = [self.origin(int(row)) for row in rows]
        return [place.url if column == URL else place.key for place in places]
