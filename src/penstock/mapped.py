"""A caller's function over whole reads, whose output and appetite are known from a trial run."""

import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock import tally
from penstock.errors import PenstockError, SchemaMismatch, TransformFailed
from penstock.memory import aligned, borrow
from penstock.sizes import KiB
from penstock.spec import Fields, FieldSpec, row_bytes
from penstock.store import Out, Store, digest, told_rows
from penstock.wrap import Wrapper

Transform = Callable[[dict[str, np.ndarray]], Mapping[str, Any]]


class Mapped(Wrapper):
    """A caller's function over whole reads, whose output is known from a trial run.

    The function takes a dict of arrays with one leading row axis and returns another; it runs in the reader threads.
    """

    TRIAL_ROWS = 2  # one would let a function lose the row axis unnoticed
    LARGE_ROW_BYTES = 1024 * KiB  # but two large ones would take more memory than the loader will
    ALLOCATOR_SLACK = 1.5  # what a function frees, the allocator may keep in pieces; measured at 1.3

    def __init__(self, store: Store, function: Transform) -> None:
        super().__init__(store)
        self.function = function
        rows = self.TRIAL_ROWS if row_bytes(store.fields) < self.LARGE_ROW_BYTES else 1
        self._fields, self._own_row_bytes = self._trial(min(rows, len(store)))

    @property
    def fields(self) -> Fields:
        return self._fields

    @property
    def fingerprint(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return digest("map", self.store.fingerprint, name, self._fields)

    def scratch_bytes(self, rows: int) -> int:
        inputs = sum(aligned(rows * spec.row_bytes) for spec in self.store.fields.values())
        return inputs + self.store.scratch_bytes(rows) + aligned(rows * self._own_row_bytes)

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        if len(rows) == 0:
            return
        size = sum(aligned(len(rows) * spec.row_bytes) for spec in self.store.fields.values() if not spec.is_list)
        with borrow(size) as scratch:
            try:
                made = self._call(self._inputs(rows, scratch), rows)
            except TransformFailed as error:
                if (row := self._culprit(rows, scratch)) is None:
                    raise
                where = f"row {row} ({self.store.origin(row)})"
                raise TransformFailed(f"{error}. It fails for {where} by itself") from error.__cause__
            for name, target in out.items():
                target[at] = self._checked(name, made, rows)

    def _inputs(self, rows: np.ndarray, scratch: np.ndarray) -> dict[str, np.ndarray]:
        inputs, begin = {}, 0
        for name, spec in self.store.fields.items():
            if spec.is_list:
                inputs[name] = spec.empty(len(rows))
                continue
            size = len(rows) * spec.row_bytes
            inputs[name] = scratch[begin : begin + size].view(spec.dtype).reshape(len(rows), *spec.shape)
            begin += aligned(size)
        self.store.read_into(rows, np.arange(len(rows)), inputs)
        return inputs

    def _culprit(self, rows: np.ndarray, scratch: np.ndarray) -> int | None:
        """The row among several for which the function fails by itself, found by halves, if there is one."""
        if len(rows) == 1:
            return None
        while len(rows) > 1:
            half = rows[: len(rows) // 2]
            rows = half if self._fails(half, scratch) else rows[len(half) :]
        return int(rows[0]) if self._fails(rows, scratch) else None

    def _fails(self, rows: np.ndarray, scratch: np.ndarray) -> bool:
        try:
            self._call(self._inputs(rows, scratch), rows)
        except TransformFailed:
            return True
        return False

    def _call(self, inputs: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
        began = time.perf_counter()
        try:
            made = self.function(inputs)
            tally.mine().function_seconds += time.perf_counter() - began
            if isinstance(made, Mapping):
                return {name: np.asarray(values) for name, values in made.items()}
        except PenstockError:
            raise
        except (Exception, SystemExit) as error:  # the latter would end a worker of torch's without a word
            raise TransformFailed(
                f"map: {self._name()} raised {type(error).__name__}: {error}; it was given rows {told_rows(rows)} "
                f"({self.store.origin(int(rows[0]))}), fields {', '.join(inputs)}"
            ) from error
        raise TransformFailed(
            f"map: {self._name()} must return a dict of arrays, one row a sample, and returned {type(made).__name__}"
        )

    def _checked(self, name: str, made: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
        expected = (len(rows), *self._fields[name].shape), self._fields[name].dtype
        values = made.get(name)
        found = None if values is None else (values.shape, values.dtype.newbyteorder("="))
        if values is None or found != expected:
            raise SchemaMismatch(
                f"map: {self._name()} returned {name!r} as {_shape_told(found)} for rows {told_rows(rows)} "
                f"({self.store.origin(int(rows[0]))}); its trial run at the start promised {_shape_told(expected)}. "
                f"Make its output shape and dtype the same for every row"
            )
        return values

    def _trial(self, rows: int) -> tuple[Fields, int]:
        """What the function returns, and what it allocates a row on the way."""
        first = np.arange(rows)
        inputs = {name: spec.empty(rows) for name, spec in self.store.fields.items()}
        self.store.read_into(first, first, inputs)
        with _Traced() as peak:
            made = self._call(inputs, first)
            allocated = peak()
        for name, values in made.items():
            if values.ndim == 0 or len(values) != rows:
                raise TransformFailed(
                    f"map: {self._name()} was given {rows} rows and returned {name!r} of shape {values.shape}: "
                    f"the first axis must be the rows"
                )
        passed_on = {id(inputs[name]): spec for name, spec in self.store.fields.items() if spec.is_list}
        fields = {}
        for name, values in made.items():
            if values.dtype.hasobject and id(values) not in passed_on:
                raise TransformFailed(
                    f"map: {self._name()} returned {name!r} as Python objects; return numbers, or what it was given"
                )
            fields[name] = passed_on.get(id(values)) or FieldSpec(values.dtype, values.shape[1:])
        most = max(allocated, rows * row_bytes(fields))
        return fields, _rounded_up(int(self.ALLOCATOR_SLACK * most / max(1, rows)))

    def _name(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


def _rounded_up(bytes_: int) -> int:
    """To four significant bits: two trials differ by a few bytes, and a plan should not."""
    step = 1 << max(0, bytes_.bit_length() - 4)
    return -(-bytes_ // step) * step


class _Traced:
    """Peak bytes allocated through Python's allocator (numpy's too) inside the ``with``."""

    def __enter__(self) -> Callable[[], int]:
        self.mine = not tracemalloc.is_tracing()
        if self.mine:
            tracemalloc.start()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        return lambda: tracemalloc.get_traced_memory()[1] - before

    def __exit__(self, *_: object) -> None:
        if self.mine:
            tracemalloc.stop()


def _shape_told(found: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "nothing" if found is None else f"{found[1]} {found[0]}"
