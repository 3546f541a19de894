"""What a plan is made for: one dataset, in numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    """What one read of so many rows borrows."""
    most_rows: int = NO_LIMIT
    """The most rows of a read: as many as a function of the caller's handles in some tens of milliseconds."""
    index_bytes: int = 0
    shared_index: Mapping[int, int] = field(default_factory=dict)
    """Further index bytes that may be shared with other datasets, by the id of what is shared."""
    block_rows: int = 0
    """Rows of the largest block that is read whole; 0 where each row can be read by itself."""
    window_rows: int = 0
    """Rows that are mixed together, and so must be in slots together."""
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

    def inside(self, why: str) -> "Request":
        """The same without reader processes."""
        return replace(self, placement=self.placement.inside(why))
