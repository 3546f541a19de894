"""The trial table as plain arrays. pandas makes a DataFrame of it where a caller asks for one: importing it takes more
memory and time than all else that opening a subject does.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.nsd.libraries import needed


@dataclass(frozen=True, eq=False)
class TrialTable:
    """Columns of equal length, one entry per trial."""

    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["stim_id"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def take(self, rows: np.ndarray) -> "TrialTable":
        """The table of these rows: their numbers, or a boolean for each row."""
        return TrialTable({name: values[rows] for name, values in self.columns.items()})

    def replaced(self, **columns: np.ndarray) -> "TrialTable":
        """The same with other values in these columns."""
        return TrialTable({**self.columns, **columns})

    @cached_property
    def frame(self) -> Any:
        """The table as a pandas DataFrame."""
        return needed("pandas").DataFrame(dict(self.columns))
