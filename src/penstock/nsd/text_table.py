"""Columns of numbers in a table of text, read line by line: pandas takes 50 MiB for it."""

import csv
import io
from array import array
from collections.abc import Collection, Sequence

import numpy as np

from penstock.errors import Corrupt
from penstock.files.retry import open_for_parser

WORDS = {"true": 1.0, "false": 0.0, **dict.fromkeys(("", "na", "n/a", "nan", "null", "none"), float("nan"))}
"""What stands for numbers in tables that MATLAB and pandas write."""


def read_columns(path: str, delimiter: str, wanted: Collection[str], required: Sequence[str]) -> dict[str, np.ndarray]:
    """Those of the wanted columns that are there: int64 where all of a column are whole numbers, else float64."""
    with io.TextIOWrapper(open_for_parser(path), encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter=delimiter)
        try:
            names = next(lines, [])
            columns = [_Column(name, place) for place, name in enumerate(names) if name in wanted]
            for line in filter(None, lines):
                for column in columns:
                    column.add(line)
        except (csv.Error, UnicodeDecodeError) as error:
            raise Corrupt(f"{path}: not a table of text ({error}); fetch it again") from error
        except ValueError as error:
            raise Corrupt(f"{path}: line {lines.line_num}: {error}; fetch it again") from error
    if absent := [name for name in required if name not in names]:
        raise Corrupt(f"{path}: no {absent[0]!r} in it, but {', '.join(names)}; fetch it again")
    return {column.name: column.array() for column in columns}


class _Column:
    """The numbers of one column."""

    def __init__(self, name: str, place: int) -> None:
        self.name, self._place = name, place
        self._numbers, self._is_whole = array("d"), True

    def add(self, line: Sequence[str]) -> None:
        if self._place >= len(line):
            raise ValueError(f"ends before column {self.name!r}")
        text = line[self._place]
        self._is_whole = self._is_whole and text.lstrip("-").isdecimal()
        try:
            self._numbers.append(float(text))
        except ValueError:
            if (word := WORDS.get(text.strip().lower())) is None:
                raise ValueError(f"column {self.name!r} has {text[:40]!r}, expected a number") from None
            self._numbers.append(word)

    def array(self) -> np.ndarray:
        return np.array(self._numbers, np.int64 if self._is_whole else np.float64)
