"""Samples made of several rows: stacked along a new axis, or averaged.

``rows`` has one line per sample. Stacking reads each row straight into its place. A place without a row (-1) gets the
mean of the sample's rows, or zeros.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from penstock.base import checks
from penstock.base.dtypes import is_inexact
from penstock.base.scratch import aligned, borrow
from penstock.base.spec import Fields, FieldSpec, Origin
from penstock.dataset.second_pass import CONVERT_BYTES
from penstock.dataset.store import Filled, Out, StoreBase, Wrapper, check_rows, digest
from penstock.errors import ConfigError, OutOfRange
from penstock.read.pieces import WHOLE, Share

NO_ROW = -1
Absent = Literal["mean", "zeros"]


class Gathered(Wrapper):
    """Sample ``i`` is made of rows ``rows[i]`` of the store below."""

    accepts_strided = False

    def __init__(self, store: StoreBase, rows: Any, *, mean: bool = False, absent: Absent = "mean") -> None:
        super().__init__(store)
        rows = np.asarray(rows)
        if rows.ndim != 2 or rows.shape[1] < 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise ConfigError(
                f"gather: rows are {rows.dtype} of shape {rows.shape}: expected whole numbers, (samples, rows per "
                f"sample)"
            )
        self.rows = np.ascontiguousarray(rows, np.int64)
        self.mean = checks.flag("gather: mean", mean)
        self.absent: Absent = checks.one_of("gather: absent", absent, get_args(Absent))
        there = self.rows != NO_ROW
        try:
            check_rows(self.rows[there], store)
        except OutOfRange as error:
            raise OutOfRange(f"gather: {error}; {NO_ROW} stands for no row") from None
        self._some_absent = not bool(there.all())
        averages = self.mean or (absent == "mean" and self._some_absent)
        if averages and not there.any(axis=1).all():
            raise ConfigError(f"gather: sample {int(np.argmin(there.any(axis=1)))} has no row at all")
        whole = [name for name, spec in store.fields.items() if not is_inexact(spec.dtype)]
        if averages and whole:
            raise ConfigError(f"gather: means of {', '.join(whole)} would be rounded to whole numbers; cast to a float")

    def rebuild(self, children: Sequence[StoreBase]) -> StoreBase:
        return Gathered(children[0], self.rows, mean=self.mean, absent=self.absent)

    @property
    def width(self) -> int:
        """Rows per sample."""
        return int(self.rows.shape[1])

    @property
    def rows_at_once(self) -> int:
        return max(1, super().rows_at_once // self.width)

    @property
    def only_stacks(self) -> bool:
        """Whether each delivered value is a value of one row, not a mean of several."""
        return not self.mean and not self._some_absent

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fields(self) -> Fields:
        if self.mean:
            return self.store.fields
        return {name: FieldSpec(spec.dtype, (self.width, *spec.shape)) for name, spec in self.store.fields.items()}

    @property
    def blocks(self) -> np.ndarray | None:
        """Runs of samples whose rows all lie in one block; None if a sample needs several blocks."""
        below = self.store.blocks
        if below is None or len(self) == 0:
            return None
        which, there = np.searchsorted(below, self.rows, side="right"), self.rows != NO_ROW
        first = np.where(there, which, len(below) + 1).min(axis=1)
        some = there.any(axis=1)
        if not some.any() or (first != np.where(there, which, 0).max(axis=1))[some].any():
            return None
        # A sample without any row goes with the block of the next sample that has one.
        following = np.searchsorted(np.flatnonzero(some), np.arange(len(self)))
        block = first[some][np.minimum(following, some.sum() - 1)]
        starts = np.flatnonzero(np.diff(block, prepend=0))
        return starts if len(starts) == len(np.unique(block)) < len(self) else None

    @property
    def fingerprint(self) -> str:
        return digest(
            "gathered", self.store.fingerprint, digest(self.rows.tobytes()), self.width, self.mean, self.absent
        )

    @property
    def index_bytes(self) -> int:
        return super().index_bytes + self.rows.nbytes

    def _samples_together(self, samples: int) -> int:
        """How many samples to average at a time; all if rows come in blocks, so that each is read once."""
        if self.store.blocks is not None:
            return samples
        largest = max(spec.row_bytes for spec in self.store.fields.values())
        return min(samples, max(1, CONVERT_BYTES // max(1, self.width * largest)))

    def scratch_bytes(self, rows: int) -> int:
        if not self.mean:
            one = max(aligned(spec.row_bytes) for spec in self.store.fields.values()) if self._some_absent else 0
            return max(one, self.store.scratch_bytes(rows * self.width))
        group = self._samples_together(rows) * self.width
        return self.store.scratch_bytes(group) + max(aligned(group * s.row_bytes) for s in self.store.fields.values())

    def read(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share = WHOLE) -> None:
        check_rows(rows, self)
        if not len(rows) or not out:
            return
        if self.only_stacks:
            self._stack(rows, at, out, share)
        elif share[0] == 0:  # a mean needs all of the rows that it is made of
            self._read_whole(rows, at, out)

    def _read_whole(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        if not self.mean:
            self._stack(rows, at, out, WHOLE)
            return
        step = self._samples_together(len(rows))
        for name, target in out.items():
            for begin in range(0, len(rows), step):
                self._average(name, self.rows[rows[begin : begin + step]], at[begin : begin + step], target)

    def filled(self, field: str, rows: np.ndarray, share: Share) -> Iterator[tuple[np.ndarray, Filled]]:
        if not self.only_stacks:
            yield from super().filled(field, rows, share)
            return
        each = np.empty((len(rows) * self.width, *self.store.fields[field].shape), bool)
        for which, flags in self.store.filled(field, self.rows[rows].reshape(-1), share):
            each[which] = flags
        for sample, flags in enumerate(each.reshape(len(rows), self.width, *each.shape[1:])):
            yield np.array([sample]), flags

    def _stack(self, rows: np.ndarray, at: np.ndarray, out: Out, share: Share) -> None:
        wanted = self.rows[rows]
        places = at[:, None] * self.width + np.arange(self.width)
        there = wanted != NO_ROW
        flat = {name: _merge_axes(target) for name, target in out.items()}
        self.store.read(wanted[there], places[there], flat, share)
        for sample in np.flatnonzero(~there.all(axis=1)).tolist():
            for target in out.values():
                self._fill(target[int(at[sample])], there[sample])

    def _fill(self, sample: np.ndarray, there: np.ndarray) -> None:
        if self.absent == "zeros":
            sample[~there] = 0
            return
        with borrow(sample[0].nbytes) as scratch:
            mean = scratch.view(sample.dtype).reshape(sample.shape[1:])
            _average_rows(sample, there, mean)
            for place in np.flatnonzero(~there).tolist():
                sample[place] = mean

    def _average(self, name: str, wanted: np.ndarray, at: np.ndarray, target: np.ndarray) -> None:
        spec, there = self.store.fields[name], wanted != NO_ROW
        with borrow(wanted.size * spec.row_bytes) as scratch:
            stacked = scratch.view(spec.dtype).reshape(*wanted.shape, *spec.shape)
            self.store.read_into(wanted[there], np.flatnonzero(there), {name: _merge_axes(stacked)})
            for sample, which, place in zip(stacked, there, at.tolist(), strict=True):
                _average_rows(sample, which, target[place : place + 1].reshape(spec.shape))

    def origin(self, row: int) -> Origin:
        check_rows(np.array([row]), self)
        places = [self.store.origin(each) for each in self.rows[row].tolist() if each != NO_ROW]
        urls = dict.fromkeys(place.url for place in places)
        return Origin("; ".join(urls), f"{row}: " + "; ".join(place.key for place in places))


def _merge_axes(target: np.ndarray) -> np.ndarray:
    """(samples, width, …) as (samples x width, …), in the same memory."""
    assert target.flags.c_contiguous, "a batch lies in one piece"
    return target.reshape(target.shape[0] * target.shape[1], *target.shape[2:])


def _average_rows(sample: np.ndarray, there: np.ndarray, goal: np.ndarray) -> None:
    """The mean of the rows that are there, added up row by row, without a temporary array."""
    first, *others = np.flatnonzero(there).tolist()
    np.copyto(goal, sample[first])
    for row in others:
        np.add(goal, sample[row], out=goal)
    np.divide(goal, goal.dtype.type(1 + len(others)), out=goal)
