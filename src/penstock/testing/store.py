"""The conformance suite: what every store must do, whatever it reads."""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler

import numpy as np

from penstock.base import scratch
from penstock.base.spec import Origin
from penstock.dataset.dataset import Dataset
from penstock.dataset.store import Store, as_base
from penstock.errors import OutOfRange
from penstock.loader.loader import Loader, runtime_of

Values = Mapping[str, np.ndarray]
THREADS = 8
ROUNDS_PER_THREAD = 5
PROCESS_BATCH, PROCESS_MEMORY, PROCESSES_WITHIN_S = 5, "1GiB", 60.0


def check_store(open_store: Callable[[], Store], expected: Values, *, seed: int = 0, processes: int = 0) -> None:
    """Check that a store keeps the protocol's promises and holds exactly ``expected``, one array per field.

    ``open_store`` is called several times; ``seed`` varies the rows that are tried. With ``processes``, that many
    reader processes read it too.
    """
    rng = np.random.default_rng(seed)
    store = open_store()
    _check_description(store, expected)
    _check_reads(store, expected, rng)
    _check_rows_apart(store, expected, rng)
    _check_scratch(store, rng)
    _check_refusals(store)
    _check_names(store)
    _check_threads(store, expected, seed)
    store.close()
    _check_reads(store, expected, rng)
    assert open_store().fingerprint == store.fingerprint, "the fingerprint of the same data must stay the same"
    sent = ForkingPickler.loads(ForkingPickler.dumps(store))  # as it reaches torch's spawned workers
    _check_reads(sent, expected, rng)
    _check_fork(store, expected, rng)
    if processes:
        _check_processes(store, expected, seed, processes)
    store.close()
    store.close()


def _check_description(store: Store, expected: Values) -> None:
    assert isinstance(store, Store), f"{type(store).__name__} lacks part of the Store protocol"
    assert list(store.fields) == list(expected), f"fields {list(store.fields)}, expected {list(expected)}"
    for name, values in expected.items():
        assert len(store) == len(values), f"{len(store)} rows, expected {len(values)}"
        spec = store.fields[name]
        assert (spec.dtype, spec.shape) == (values.dtype, values.shape[1:]), f"{name}: {spec}, expected {values.dtype}"
        assert spec.dtype.isnative, f"{name}: delivered dtypes are native, {spec.dtype} is not"
    if store.blocks is not None:
        assert store.blocks[0] == 0, "blocks must begin with row 0"
        assert (np.diff(store.blocks) > 0).all(), "blocks must ascend"
        assert store.blocks[-1] < len(store), "blocks must stay below the number of rows"


def _make_selections(length: int, rng: np.random.Generator) -> list[np.ndarray]:
    few = min(length, 5)
    return [
        np.arange(length),
        np.arange(length)[::-1].copy(),
        rng.permutation(length)[:few],
        rng.integers(0, length, 2 * few),
        np.array([length - 1]),
        np.array([], np.int64),
    ]


def _check_reads(store: Store, expected: Values, rng: np.random.Generator) -> None:
    for rows in _make_selections(len(store), rng):
        places = len(rows) + 3
        for at in (np.arange(len(rows)) + 2, rng.permutation(places)[: len(rows)]):
            _check_read(store, expected, rows, at, places)
    one = next(iter(expected))
    _check_read(store, {one: expected[one]}, np.array([0]), np.array([0]), 1)
    store.read_into(np.array([0]), np.array([0]), {})


def _check_read(store: Store, expected: Values, rows: np.ndarray, at: np.ndarray, places: int) -> None:
    """The values at the named places are right, and no other place was written to."""
    out = {name: _mark(values, places) for name, values in expected.items()}
    store.read_into(rows, at, out)
    for name, values in expected.items():
        want = _mark(values, places)
        want[at] = values[rows]
        assert _is_same(out[name], want), (
            f"{type(store).__name__}: field {name!r} differs for rows {rows.tolist()[:10]} at places {at.tolist()[:10]}"
        )


def _check_rows_apart(store: Store, expected: Values, rng: np.random.Generator) -> None:
    """A store that claims it can reads into rows that are the first part of longer ones."""
    if not as_base(store).accepts_strided:
        return
    for name, values in expected.items():
        if values.ndim < 2 or values.dtype.hasobject:
            continue
        rows, length = rng.integers(0, len(values), 4), values.shape[1]
        longer = np.concatenate([values[:1], values[:1]], axis=1)
        for at in (np.arange(4), rng.permutation(6)[:4]):
            out, want = _mark(longer, 6), _mark(longer, 6)
            store.read_into(rows, at, {name: out[:, :length]})
            want[at, :length] = values[rows]
            assert out.tobytes() == want.tobytes(), f"field {name!r} differs where rows of ``out`` lie apart"


def _mark(like: np.ndarray, places: int) -> np.ndarray:
    """Memory with a pattern, so that untouched places can be distinguished from written ones."""
    if like.dtype.hasobject:
        return np.full(places, _UNTOUCHED, object)
    out = np.empty((places, *like.shape[1:]), like.dtype)
    out.reshape(-1).view(np.uint8)[:] = 0xA5
    return out


_UNTOUCHED = object()


def _is_same(found: np.ndarray, wanted: np.ndarray) -> bool:
    if not wanted.dtype.hasobject:
        return found.tobytes() == wanted.tobytes()
    pairs = zip(found, wanted, strict=True)
    return all(type(one) is type(other) and bool(np.all(one == other)) for one, other in pairs)


def _check_scratch(store: Store, rng: np.random.Generator) -> None:
    """No read may borrow more than was declared for it."""
    for rows in (1, min(3, len(store)), len(store)):
        out = {name: spec.empty(rows) for name, spec in store.fields.items()}
        declared = store.scratch_bytes(rows)
        for at in (np.arange(rows), rng.permutation(rows)):
            scratch.prepare(declared)
            try:
                store.read_into(rng.integers(0, len(store), rows), at, out)
                over = scratch.overflow_bytes()
            finally:
                scratch.release()
            assert over == 0, f"scratch_bytes({rows}) declares {declared:,} bytes, but a read borrowed {over:,} more"


def _check_refusals(store: Store) -> None:
    out = {name: spec.empty(1) for name, spec in store.fields.items()}
    for row in (-1, len(store), len(store) + 10**9):
        try:
            store.read_into(np.array([row]), np.array([0]), out)
        except OutOfRange:
            continue
        raise AssertionError(f"row {row} of {len(store)} must raise OutOfRange")


def _check_names(store: Store) -> None:
    places = [store.origin(row) for row in range(min(len(store), 50))]
    assert all(isinstance(place, Origin) for place in places), "origin must return an Origin"
    assert len(set(places)) == len(places), "two rows must not have the same origin"


def _check_threads(store: Store, expected: Values, seed: int) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        try:
            for _ in range(ROUNDS_PER_THREAD):
                rows = rng.integers(0, len(store), 4)
                _check_read(store, expected, rows, rng.permutation(6)[:4], 6)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise AssertionError(f"{len(failures)} of {THREADS} threads failed; the first: {failures[0]!r}") from failures[
            0
        ]


def _check_fork(store: Store, expected: Values, rng: np.random.Generator) -> None:
    """A store that was read from works in a forked child, and in the parent afterwards."""
    if sys.platform != "linux":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns wherever another thread lives
        child = os.fork()
    if child == 0:
        status = 1
        try:
            _check_reads(store, expected, rng)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "reading in a forked child failed"
    _check_reads(store, expected, rng)


def _check_processes(store: Store, expected: Values, seed: int, processes: int) -> None:
    """Reader processes deliver every row once, and each as it is."""
    columns = (*expected, "__index__")
    batch_size = min(len(store), PROCESS_BATCH)
    with Loader(
        Dataset(store), batch_size=batch_size, shuffle=True, seed=seed, memory=PROCESS_MEMORY, processes=processes,
        output="numpy", columns=columns, drop_last=False,
    ) as loader:  # fmt: skip
        runtime_of(loader).start_processes(PROCESSES_WITHIN_S)
        seen: list[int] = []
        for *found, rows in loader:
            for values, (name, wanted) in zip(found, expected.items(), strict=True):
                found_here = np.empty(len(rows), object) if wanted.dtype.hasobject else np.asarray(values)
                if wanted.dtype.hasobject:
                    found_here[:] = values
                assert _is_same(found_here, wanted[rows]), f"{name!r} differs in a reader process for rows {rows}"
            seen += rows.tolist()
        assert sorted(seen) == list(range(len(store))), "reader processes lost or repeated rows"
        assert not loader.stats().restarts, "a reader process died"
