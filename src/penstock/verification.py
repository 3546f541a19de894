"""Everything there is, read and decoded once, to find what cannot be.

Field by field, so that one that is broken does not hide another, by a loader in the order of the file, which leaves out
what cannot be read and says why. Where rows come in blocks of many chunks, the first broken one keeps all others of its
block from being looked at, so those blocks are then read in small shares.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from penstock.dataset import Dataset
from penstock.errors import BudgetExceeded, DataError, SourceError
from penstock.loader import Loader
from penstock.sizes import MiB
from penstock.spec import row_bytes
from penstock.stats import LeftOut
from penstock.store import Sharing, Store

SMALL_BUDGET = 256 * MiB
BATCH_BYTES = 8 * MiB

# A block with a broken chunk is looked at in so many shares: as many broken chunks of it can be told apart.
SHARES = 64
# Of so many broken blocks; whoever has more has other worries.
BLOCKS_LOOKED_INTO = 100


@dataclass(frozen=True)
class Fault:
    """Something that cannot be read, and the samples that suffer from it."""

    field: str
    rows: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        first, last = min(self.rows), max(self.rows)
        which = f"row {first:,}" if len(self.rows) == 1 else f"{len(self.rows):,} rows from {first:,} to {last:,}"
        return f"{self.field}, {which}: {self.why}"


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a dataset."""

    faults: tuple[Fault, ...]
    unreadable: int
    """Values (a field of a sample each) that cannot be read; all are counted, also where not all faults are listed."""
    filled: int
    """Chunks that were never written, and stand for their fill value."""


Progress = Callable[[int, int], None]
"""Called with how many more values were looked at, and how many could not be read so far."""


def verify(ds: Dataset, *, memory: int | str | None = None, progress: Progress = lambda more, bad: None) -> Verdict:
    """Read and decode every value of every field; ``memory`` is as for ``Loader``, little if not given."""
    faults: list[Fault] = []
    unreadable = filled = 0
    for field in ds.fields:
        only, before = ds.only(field), unreadable
        with _loader(only, memory) as loader:
            for more, bad in _epoch(loader):
                unreadable = before + bad
                progress(more, unreadable)
            stats = loader.stats()
            found = list(_together(field, stats.left_out))
            filled += stats.chunks_filled
        faults += _looked_into(only, found)
        only.close()
    return Verdict(tuple(faults), unreadable, filled)


def _loader(ds: Dataset, memory: int | str | None) -> Loader:
    rows = max(1, BATCH_BYTES // max(1, row_bytes(ds.fields)))
    try:
        return Loader(ds, batch_size=rows, memory=memory or SMALL_BUDGET, on_error="skip", output="numpy")
    except BudgetExceeded:
        if memory is not None:
            raise
    return Loader(ds, batch_size=rows, on_error="skip", output="numpy")


def _epoch(loader: Loader) -> Iterator[tuple[int, int]]:
    """For each batch: how many more rows were looked at, and how many could not be read so far."""
    seen = 0
    for _ in loader:
        stats = loader.stats()
        done = stats.samples + stats.left_out_samples
        yield done - seen, stats.left_out_samples
        seen = done
    stats = loader.stats()
    yield stats.samples + stats.left_out_samples - seen, stats.left_out_samples


def _together(field: str, left_out: Iterable[LeftOut]) -> Iterator[Fault]:
    """One fault for all samples that fail for the same reason."""
    rows: dict[str, list[int]] = {}
    for sample in left_out:
        rows.setdefault(sample.why, []).append(sample.row)
    for why, which in rows.items():
        yield Fault(field, tuple(which), why)


def _looked_into(ds: Dataset, faults: list[Fault]) -> Iterator[Fault]:
    store = ds.delivered
    several_chunks = isinstance(store, Sharing)
    for number, fault in enumerate(faults):
        others = _reasons(store, fault) if several_chunks and number < BLOCKS_LOOKED_INTO else {}
        yield fault
        yield from (replace(fault, why=why) for why in others if why != fault.why)


def _reasons(store: Store, fault: Fault) -> dict[str, None]:
    """Why a row of a broken block cannot be read, share by share."""
    assert isinstance(store, Sharing)
    row, at = np.array(fault.rows[:1]), np.array([0])
    out = {name: spec.empty(1) for name, spec in store.fields.items()}
    found: dict[str, None] = {}
    for share in range(SHARES):
        try:
            store.read_share(row, at, out, (share, SHARES))
        except (DataError, SourceError) as error:
            found[str(error)] = None
    return found
