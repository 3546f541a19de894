"""What a plan is made for: one dataset, in numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

from penstock.base.dataclass import dataclass
from penstock.base.scratch import CAN_RETURN_PAGES, aligned, page_bytes
from penstock.base.spec import Fields
from penstock.base.user_functions import NO_LIMIT
from penstock.loader.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to load from one dataset, and with what."""

    fields: Fields
    """The fields as they lie in a slot."""
    batch_rows: int
    steps: int
    threads: int
    """How many threads to start with."""
    limit_bytes: int
    scratch_bytes: Callable[[int], int]
    """What one read of ``rows`` rows borrows."""
    most_rows: int = NO_LIMIT
    """The most rows of a read: as many as the caller's function handles in some tens of milliseconds."""
    index_bytes: int = 0
    shared_index: Mapping[int, int] = field(default_factory=dict)
    """Further index bytes that may be shared with other datasets, by the id of what is shared."""
    block_rows: int = 0
    """Rows of the largest block that is read whole; 0 where each row can be read by itself."""
    window_rows: int = 0
    """Rows that are mixed together, and so must be in slots together."""
    free_fields: frozenset[str] = frozenset()
    """Fields that need not come with their block."""
    spare_slots: int = 0
    """Slots that stay busy longer than usual (a device copy in flight)."""
    limit_note: str = ""
    shuffle_quality: float | None = None
    """1.0 is a uniform shuffle; None without shuffling."""
    amplification: float = 1.0
    """Bytes that a reader of single rows would decode per byte delivered."""
    advice: Sequence[str] = ()
    remedy: str = ""
    """What would let each row be read by itself, where it cannot be."""
    most_threads: int = 0
    """How many threads may be tried if files turn out to be slow; 0 tries none beyond ``threads``."""
    far: bool = False
    """Whether reads go over the network: they are then small enough to give every thread a share."""
    placement: Placement = field(default_factory=lambda: Placement(threads=1))
    """In how many processes, and what these hold."""

    @property
    def can_be_tight(self) -> bool:
        """Whether the memory of slots may come and go: neither a device nor another process knows its pages."""
        return bool(self.window_rows) and CAN_RETURN_PAGES and not (self.spare_slots or self.placement.processes)

    @property
    def window_batches(self) -> int:
        """Batches that a window may reach into: it can begin and end within one."""
        if not self.window_rows:
            return 0
        return min(-(-self.window_rows // self.batch_rows) + 1, max(1, self.steps))

    def tight_bytes(self, slots: int) -> int:
        """What slots hold where only filled rows do: a batch in the caller's hands, a window, the batch it begins in.

        Fields that do not come in blocks fill all slots. Around a row, memory is taken by whole pages.
        """
        filled, total = 2 * self.batch_rows - 1 + self.window_rows, 0
        for name, spec in self.fields.items():
            whole = slots * aligned(self.batch_rows * spec.row_bytes)
            pages = self.batch_rows * page_bytes(spec.row_bytes)  # at most every other row has pages on both sides
            total += whole if name in self.free_fields else min(whole, filled * spec.row_bytes + pages)
        return total

    def inside(self, why: str) -> "Request":
        """The same without reader processes."""
        return replace(self, placement=self.placement.inside(why))
