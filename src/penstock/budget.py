"""The ledger: who may hold how much memory.

Every reservation is made while planning and has a named holder. Nothing waits for memory while the loader runs, so
nothing can deadlock on it.
"""

from penstock.errors import BudgetExceeded
from penstock.sizes import format_size


class MemoryBudget:
    """A limit in bytes, and the named reservations made against it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._holders: dict[str, int] = {}

    @property
    def reserved_bytes(self) -> int:
        return sum(self._holders.values())

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.reserved_bytes

    @property
    def holders(self) -> dict[str, int]:
        """A snapshot: bytes by holder, in the order of reservation."""
        return dict(self._holders)

    def reserve(self, holder: str, bytes_: int) -> None:
        """Enter ``bytes_`` for ``holder``, adding to what it has; all or nothing."""
        if bytes_ > self.free_bytes:
            raise BudgetExceeded(
                f"{holder} needs {format_size(bytes_)}, but of the budget of {format_size(self.limit_bytes)} only "
                f"{format_size(self.free_bytes)} is free: {self.describe()}"
            )
        self._holders[holder] = self._holders.get(holder, 0) + bytes_

    def describe(self) -> str:
        """``slots 576 MiB, scratch 1.00 MiB``."""
        return (
            ", ".join(f"{holder} {format_size(bytes_)}" for holder, bytes_ in self._holders.items()) or "nothing held"
        )
