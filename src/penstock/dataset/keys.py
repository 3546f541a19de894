"""Names of samples: ``ds.keys``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from penstock.errors import ConfigError, Missing

if TYPE_CHECKING:
    from penstock.dataset.dataset import Dataset


class Keys(Sequence[str]):
    """Names of samples, made on demand. If a format has no names, the name is the place in the file: ``betas[12]``."""

    def __init__(self, ds: "Dataset") -> None:
        self._ds = ds

    def __len__(self) -> int:
        return len(self._ds)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._ds.origin(row).key for row in range(*index.indices(len(self)))]
        return self._ds.origin(index).key

    def __contains__(self, key: object) -> bool:
        try:
            return isinstance(key, str) and self._ds.delivered.find(key) is not None
        except ConfigError:  # several samples have this name
            return True

    def find(self, key: str) -> int:
        """The row of a sample, by its name."""
        row = self._ds.delivered.find(key)
        if row is None:
            length = len(self)
            some = f"they are called {self[0]!r} to {self[length - 1]!r}" if length else "there are none"
            raise Missing(f"no sample {key!r} among {length:,}: {some}")
        return row
