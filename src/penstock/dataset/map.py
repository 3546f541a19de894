"""A caller's function over whole reads. A trial run shows what it returns and how much memory and time it needs."""

import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from penstock.base import sample_rng, torch_threads, user_functions
from penstock.base.scratch import aligned, borrow, trim_now_and_then
from penstock.base.sizes import KiB
from penstock.base.spec import Fields, FieldSpec, InFull, row_bytes
from penstock.base.torch_memory import TensorBytes, count_tensors
from penstock.dataset.store import Out, StoreBase, Wrapper, describe_rows, digest
from penstock.errors import PenstockError, SchemaMismatch, TransformFailed

# Characters of the caller's error that are shown; all of it is in the cause of ours.
LONGEST_TEXT = 2000

Transform = Callable[[dict[str, np.ndarray]], Mapping[str, Any]]
EachTransform = Callable[[dict[str, Any], "np.random.Generator"], Mapping[str, Any]]  # a text: loading it takes 4 ms


class Mapped(Wrapper):
    """A caller's function over whole reads.

    The function takes a dict of arrays with one leading row axis and returns another; it runs in the reader threads.
    It needs whole rows, so threads do not share its reads.
    """

    accepts_strided = True

    VERB = "map"
    """How the caller gave the function."""
    TRIAL_ROWS = 2  # with one row, a function that loses the row axis would pass unnoticed
    LARGE_ROW_BYTES = 1024 * KiB  # two larger rows would take more memory than the loader will
    ALLOCATOR_SLACK = 1.5  # the allocator may keep part of what a function frees; measured at 1.3
    TENSOR_SLACK = 2  # glibc cannot use all of the memory again that tensors leave

    def __init__(self, store: StoreBase, function: Callable[..., Any]) -> None:
        super().__init__(store)
        self.function = function
        rows = self.TRIAL_ROWS if row_bytes(store.fields) < self.LARGE_ROW_BYTES else 1
        rows = min(rows, len(store))
        first = self._first_rows(rows)
        self._makes_tensors = False
        self._fields, self._own_row_bytes = self._trial(first, rows)
        self._rows_at_once = self._timed(first, rows) if rows else user_functions.NO_LIMIT

    @property
    def fields(self) -> Fields:
        return self._fields

    @property
    def rows_at_once(self) -> int:
        return min(self._rows_at_once, super().rows_at_once)

    @property
    def fingerprint(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return digest(self.VERB, self.store.fingerprint, name, InFull(self._fields))

    def scratch_bytes(self, rows: int) -> int:
        inputs = sum(aligned(rows * spec.row_bytes) for spec in self.store.fields.values())
        return inputs + self.store.scratch_bytes(rows) + aligned(rows * self._own_row_bytes)

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        if len(rows) == 0:
            return
        size = sum(aligned(len(rows) * spec.row_bytes) for spec in self.store.fields.values() if not spec.is_list)
        with borrow(size) as scratch:
            inputs = self._inputs(rows, scratch)
            for begin in range(0, len(rows), self._rows_at_once):
                some = slice(begin, begin + self._rows_at_once)
                made = self._result({name: values[some] for name, values in inputs.items()}, rows[some], scratch)
                for name, target in out.items():
                    target[at[some]] = self._checked(name, made, rows[some])
                if self._makes_tensors:
                    del made
                    trim_now_and_then()

    def _result(self, inputs: dict[str, np.ndarray], rows: np.ndarray, scratch: np.ndarray) -> dict[str, np.ndarray]:
        """The function's result for these rows. If it fails, find the row that it fails for."""
        try:
            return self._call(inputs, rows)
        except TransformFailed as error:
            if (row := self._find_failing_row(rows, scratch)) is None:
                raise
            where = f"row {row} ({self.store.origin(row)})"
            raise TransformFailed(f"{error}. It fails for {where} by itself") from error.__cause__

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

    def _find_failing_row(self, rows: np.ndarray, scratch: np.ndarray) -> int | None:
        """The row for which the function fails even alone, found by bisection; None if there is none."""
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
        try:
            made = self._made_by_function(inputs, rows)
            if isinstance(made, Mapping):
                return {name: np.asarray(values) for name, values in made.items()}
        except PenstockError:
            raise
        except (Exception, SystemExit) as error:  # the latter would end a torch worker silently
            raise TransformFailed(
                f"{self._name()} raised {type(error).__name__}: {str(error)[:LONGEST_TEXT]}; it was given rows "
                f"{describe_rows(rows)} ({self.store.origin(int(rows[0]))}), fields {', '.join(inputs)}"
            ) from error
        raise TransformFailed(
            f"{self._name()} must return a dict of arrays, one row per sample, but returned {type(made).__name__}"
        )

    def _made_by_function(self, inputs: dict[str, np.ndarray], rows: np.ndarray) -> Any:
        return user_functions.call(self.function, inputs)

    def _checked(self, name: str, made: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
        expected = (len(rows), *self._fields[name].shape), self._fields[name].dtype
        values = made.get(name)
        found = None if values is None else (values.shape, values.dtype.newbyteorder("="))
        if values is None or found != expected:
            raise SchemaMismatch(
                f"{self._name()} returned {name!r} as {_describe_shape(found)} for rows {describe_rows(rows)} "
                f"({self.store.origin(int(rows[0]))}); its trial run promised {_describe_shape(expected)}. "
                f"Make its output shape and dtype the same for every row"
            )
        return values

    def _trial(self, first: dict[str, np.ndarray], rows: int) -> tuple[Fields, int]:
        """What the function returns, and how much it allocates per row."""
        inputs = self._copied(first, rows)
        with _trace() as traced:
            made = self._call(inputs, np.arange(rows))
            allocated = self._most_held(*traced())
        for name, values in made.items():
            if values.ndim == 0 or len(values) != rows:
                raise TransformFailed(
                    f"{self._name()} was given {rows} rows and returned {name!r} of shape {values.shape}: "
                    f"the first axis must be the rows"
                )
        passed_on = {id(inputs[name]): spec for name, spec in self.store.fields.items() if spec.is_list}
        fields = {}
        for name, values in made.items():
            if values.dtype.hasobject and id(values) not in passed_on:
                raise TransformFailed(
                    f"{self._name()} returned {name!r} as Python objects; return numbers, or what it was given"
                )
            fields[name] = passed_on.get(id(values)) or FieldSpec(values.dtype, values.shape[1:])
        del made, inputs
        most = max(self._allocated_again(first, rows, allocated), self._most_held(rows * row_bytes(fields), 0))
        return fields, _round_up(most // max(1, rows))

    def _most_held(self, arrays_bytes: int, tensor_bytes: int) -> int:
        """What the allocator holds at most for a function that allocates this."""
        self._makes_tensors |= tensor_bytes > 0
        return int(self.ALLOCATOR_SLACK * arrays_bytes) + self.TENSOR_SLACK * tensor_bytes

    def _allocated_again(self, first: dict[str, np.ndarray], rows: int, before: int) -> int:
        """What a second call allocates: the first may import libraries or fill caches, independently of rows."""
        inputs = self._copied(first, rows)
        with suppress(TransformFailed), _trace() as traced:  # large rows are not copied: the first call wrote to them
            self._call(inputs, np.arange(rows))
            return min(before, self._most_held(*traced()))
        return before

    def _timed(self, first: dict[str, np.ndarray], rows: int) -> int:
        """How many rows to pass to the function at a time, measured by repeating the first rows.

        In a thread like a reader's: in the main thread torch would use all cores, and the time would differ.
        """
        row = max(1, row_bytes(self.store.fields), self._own_row_bytes)
        most = max(rows, self.LARGE_ROW_BYTES // row)

        def timed(count: int) -> float:
            inputs = self._copied(first, count)
            began = time.perf_counter()
            self._call(inputs, np.arange(count) % rows)
            return time.perf_counter() - began

        found = [user_functions.NO_LIMIT]

        def find() -> None:
            torch_threads.use_one_core()
            with suppress(Exception):  # it may fail for a single row or for repeated rows, which it may never get
                found[0] = user_functions.rows_at_once(timed, most)

        thread = threading.Thread(target=find, name="penstock-trial", daemon=True)
        with suppress(RuntimeError):  # the system has no more threads
            thread.start()
            thread.join()
        return found[0]

    def _first_rows(self, rows: int) -> dict[str, np.ndarray]:
        first = np.arange(rows)
        inputs = {name: spec.empty(rows) for name, spec in self.store.fields.items()}
        self.store.read_into(first, first, inputs)
        return inputs

    def _copied(self, first: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
        """A copy of the first rows, since the function may write to them; rows repeat if there are fewer."""
        if row_bytes(self.store.fields) >= self.LARGE_ROW_BYTES:  # too large for a second copy
            return dict(first)
        return {name: values[np.arange(rows) % len(values)] for name, values in first.items()}

    def _name(self) -> str:
        return f"{self.VERB}: {getattr(self.function, '__name__', repr(self.function))}"


class MappedEach(Mapped):
    """A caller's function over single samples, each with random numbers of its own."""

    VERB = "map_each"

    def _made_by_function(self, inputs: dict[str, np.ndarray], rows: np.ndarray) -> Any:
        made: list[Mapping[str, Any]] = []
        for number, row in enumerate(rows.tolist()):
            sample = {name: values[number] for name, values in inputs.items()}
            one = user_functions.call(lambda given: self.function(*given), (sample, sample_rng.generator(row)))
            if not isinstance(one, Mapping):
                return one
            if made and one.keys() != made[0].keys():
                raise TransformFailed(
                    f"{self._name()} returned {', '.join(map(repr, one))} for row {row}, and "
                    f"{', '.join(map(repr, made[0]))} for another: return the same names for every sample"
                )
            made.append(one)
        names = made[0] if made else ()
        return {name: _stack([one[name] for one in made], rows, inputs.get(name)) for name in names}


def _stack(values: Sequence[Any], rows: np.ndarray, given: np.ndarray | None) -> np.ndarray:
    """Values of single rows as one array; Python objects that were passed on as they came."""
    if given is not None and given.dtype.hasobject and all(map(operator.is_, values, given)):
        return given
    arrays = [np.asarray(value) for value in values]
    first_rows = {array.shape: int(row) for array, row in zip(reversed(arrays), rows[::-1], strict=True)}
    if len(first_rows) > 1:
        shapes = " and ".join(f"{shape} for row {row}" for shape, row in reversed(first_rows.items()))
        raise ValueError(f"samples differ in shape: {shapes}. Crop or pad them to one shape")
    return np.stack(arrays)


def _round_up(bytes_: int) -> int:
    """Up to four significant bits: two trials differ by a few bytes, but a plan should not."""
    step = 1 << max(0, bytes_.bit_length() - 4)
    return -(-bytes_ // step) * step


@contextmanager
def _trace() -> Iterator[Callable[[], tuple[int, int]]]:
    """Peak bytes that Python's allocator (numpy's too) and torch's had given out inside the ``with``."""
    import tracemalloc

    is_mine, tensors = not tracemalloc.is_tracing(), TensorBytes()
    if is_mine:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        with count_tensors(tensors):
            yield lambda: (tracemalloc.get_traced_memory()[1] - before, tensors.peak)
    finally:
        if is_mine:
            tracemalloc.stop()


def _describe_shape(found: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "nothing" if found is None else f"{found[1]} {found[0]}"
