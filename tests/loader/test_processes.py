"""Reader processes: the same batches as with threads, whatever happens to them, and nothing left behind."""

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.base.machine import children
from penstock.errors import ConfigError, ReadersNotStarted, WorkerDied
from penstock.loader import connection as connection_module
from penstock.loader import exchange as exchange_module
from penstock.loader import processes as processes_module
from penstock.loader import readers as readers_module
from penstock.loader import team as team_module
from penstock.loader.loader import runtime_of
from penstock.loader.nonfinite import not_finite
from penstock.webdataset import ShardWriter

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="reader processes need Linux")

ROWS = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    values = np.random.default_rng(0).integers(-500, 500, (ROWS, 40, 25)).astype(np.int16)
    with h5py.File(folder / "chunks.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(1, 40, 25), compression="gzip", shuffle=True)
        file.create_dataset("row", data=np.arange(ROWS))
    with h5py.File(folder / "blocks.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(16, 20, 25), compression="gzip")
        file.create_dataset("row", data=np.arange(ROWS))
    np.save(folder / "x.npy", values)
    return folder


@contextmanager
def started(ds: ps.Dataset, **options: Any) -> Any:
    """A loader whose processes are up before it reads anything."""
    options = {"batch_size": 7, "shuffle": True, "memory": "400MiB", "output": "numpy", "threads": 4, **options}
    with ps.Loader(ds, **{"processes": 2, **options}) as loader:
        runtime = runtime_of(loader)
        runtime.start_processes(60)
        if runtime._processes is not None:
            assert all(process.is_up for process in runtime._processes.processes)
        yield loader


def readers(loader: ps.Loader) -> list[processes_module.ReaderProcess]:
    found = runtime_of(loader)._processes
    assert found is not None
    return found.processes


def batches(loader: ps.Loader, epochs: int = 1) -> list[Any]:
    return [{name: np.array(values) for name, values in batch.items()} for _ in range(epochs) for batch in loader]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def by_threads(ds: ps.Dataset, epochs: int = 1, **options: Any) -> list[Any]:
    options = {"batch_size": 7, "shuffle": True, "memory": "400MiB", "output": "numpy", **options}
    with ps.Loader(ds, processes=0, **options) as loader:
        return batches(loader, epochs)


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    top = int(rng.integers(0, 10))
    return {"x": sample["x"][top : top + 30] + rng.standard_normal(25).astype(np.float32), "row": sample["row"]}


@pytest.mark.parametrize("name", ["chunks.h5", "blocks.h5"])
def test_the_same_batches_as_with_threads(folder: Path, name: str) -> None:
    ds = ps.open(folder / name).cast("x", "float32", scale=1 / 300)
    expected = by_threads(ds, 2)
    with started(ds) as loader:
        assert_same(batches(loader, 2), expected)
        stats = loader.stats()
    assert (stats.processes, stats.restarts) == (2, 0)
    assert stats.chunks_read > 0
    assert stats.bytes_read > 0


def test_lists_of_objects_come_through_the_socket(folder: Path, tmp_path: Path) -> None:
    writer = ShardWriter(str(tmp_path / "a-%02d.tar"), maxcount=20)
    with writer:
        for number in range(50):
            writer.write({"__key__": f"{number:03d}", "txt": f"text {number}", "json": {"n": [number]}, "cls": number})
    ds = ps.open(tmp_path / "*.tar")
    options: dict[str, Any] = {"batch_size": 6, "shuffle": True, "memory": "400MiB", "output": "numpy"}
    with ps.Loader(ds, processes=0, **options) as loader:
        expected = list(loader)
    with started(ds, batch_size=6) as loader:
        found = [{name: list(values) for name, values in batch.items()} for batch in loader]
    assert [batch["txt"] for batch in found] == [batch["txt"] for batch in expected]
    assert [batch["json"] for batch in found] == [batch["json"] for batch in expected]


@pytest.fixture(scope="module")
def augmented(folder: Path) -> tuple[ps.Dataset, list[dict[int, np.ndarray]], list[Any]]:
    """A dataset, what one thread delivers of it in two epochs, and its states: at first and after each batch."""
    ds = ps.open(folder / "chunks.h5").cast("x", "float32").map_each(augment)
    with ps.Loader(ds, threads=1, processes=0, **AUGMENTED) as loader:
        states, epochs = [loader.state_dict()], []
        for _ in range(2):
            found = []
            for batch in loader:
                found.append({name: np.array(values) for name, values in batch.items()})
                states.append(loader.state_dict())
            epochs.append(by_row(found))
    return ds, epochs, states[: len(loader) + 1]


AUGMENTED: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 5, "memory": "400MiB", "output": "numpy"}


def by_row(found: list[Any], most_repeated: int = 0) -> dict[int, np.ndarray]:
    """Values by row, each of which came once; a last step of fewer samples than ranks has some of them again."""
    rows: dict[int, np.ndarray] = {}
    for batch in found:
        for row, values in zip(batch["row"].tolist(), batch["x"], strict=True):
            assert rows.setdefault(row, values).tobytes() == values.tobytes()
    assert sum(len(batch["row"]) for batch in found) - len(rows) <= most_repeated
    return rows


def assert_same_rows(found: dict[int, np.ndarray], expected: dict[int, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[row].tobytes() == expected[row].tobytes() for row in found)


def check_augmented(augmented: Any, readers: tuple[int, int], world_size: int, stops: range) -> None:
    """All ranks together deliver what one thread does, in two epochs and from its states after these batches."""
    ds, epochs, states = augmented
    whole: list[list[Any]] = [[] for _ in epochs]
    resumed: dict[int, list[Any]] = {stop: [] for stop in stops}
    for rank in range(world_size):
        threads, processes = readers
        options = {"threads": threads, "processes": processes, "rank": rank, "world_size": world_size}
        with started(ds, **AUGMENTED, **options) as loader:
            for found in whole:
                found += batches(loader)
            for stop, rest in resumed.items():
                loader.load_state_dict(states[stop])
                rest += batches(loader)
            assert loader.stats().processes == processes
    for found, expected in zip(whole, epochs, strict=True):
        assert_same_rows(by_row(found), expected)
    delivered = list(epochs[0])
    for stop, rest in resumed.items():
        assert_same_rows(by_row(rest, world_size - 1), {row: epochs[0][row] for row in delivered[7 * stop :]})


@pytest.mark.slow
def test_augmented_batches_are_the_same_in_processes_and_on_ranks(augmented: Any) -> None:
    check_augmented(augmented, (4, 2), 2, range(0, 35, 11))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("readers", [(1, 0), (4, 0), (4, 2), (4, 4)], ids="threads={0[0]}-processes={0[1]}".format)
def test_augmented_batches_are_the_same_everywhere(augmented: Any, readers: tuple[int, int], world_size: int) -> None:
    check_augmented(augmented, readers, world_size, range(35))


def test_augmented_batches_keep_their_order_and_differ_between_epochs(augmented: Any) -> None:
    ds, (first, second), _ = augmented
    assert first.keys() == second.keys() == set(range(ROWS))
    assert not any(np.array_equal(first[row], second[row]) for row in first)
    with started(ds, **AUGMENTED) as loader:
        assert [int(row) for batch in batches(loader) for row in batch["row"]] == list(first)


def test_each_sample_with_its_own_randomness_by_hand() -> None:
    ds = ps.from_arrays(x=np.arange(6)).map_each(lambda sample, rng: {"x": sample["x"], "r": rng.random()})
    assert ds[3]["r"] == ds[3]["r"] != ds[4]["r"]
    assert ds.select([5, 3])[1]["r"] == ds[3]["r"]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda sample: sample, "takes 1 positional argument but 2 were given"),
        (lambda sample, rng: 3, "must return a dict"),
        (lambda sample, rng: {"x": np.zeros(int(sample["x"]) + 1)}, r"shape: \(1,\) for row 0 and \(2,\) for row 1"),
        (lambda sample, rng: {str(sample["x"]): 1}, "the same names for every sample"),
    ],
    ids=["one argument", "no dict", "shapes", "names"],
)
def test_functions_that_break_their_promise(function: Any, told: str) -> None:
    with pytest.raises(ps.PenstockError, match=told):
        ps.from_arrays(x=np.arange(6)).map_each(function)
    with pytest.raises(ConfigError, match="expected a function"):
        ps.from_arrays(x=np.arange(6)).map_each(3)  # type: ignore[arg-type]


def test_functions_of_scripts_lambdas_and_closures(folder: Path) -> None:
    factor = np.float32(3)

    def scale(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"x": batch["x"] * factor, "pid": np.full(len(batch["x"]), os.getpid())}

    ds = ps.open(folder / "chunks.h5").cast("x", "float32").map(scale).map(lambda batch: dict(batch))
    with started(ds, shuffle=False) as loader:
        found = batches(loader)
        pids = {process.pid for process in readers(loader)}
    assert {int(pid) for batch in found for pid in batch["pid"]} <= pids
    with h5py.File(folder / "chunks.h5") as file:
        np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in found]), file["x"][:] * factor)


@pytest.mark.slow
def test_functions_that_return_tensors(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    ds = ps.open(folder / "chunks.h5").map_each(lambda sample, rng: {"x": torch.from_numpy(sample["x"]) + 1})
    expected = by_threads(ds)
    with started(ds, memory="1GiB") as loader:
        assert loader.plan.holders["processes"] > 2 * 140 * 2**20, "torch counts"
        assert_same(batches(loader), expected)


# Faults.


def damaged(folder: Path, tmp_path: Path) -> Path:
    data = bytearray((folder / "chunks.h5").read_bytes())
    with h5py.File(folder / "chunks.h5") as file:
        for row in (13, 77):
            place = file["x"].id.get_chunk_info(row).byte_offset
            data[place + 20 : place + 40] = bytes(20)
    (tmp_path / "damaged.h5").write_bytes(data)
    return tmp_path / "damaged.h5"


def test_errors_keep_their_kind_and_their_origin(folder: Path, tmp_path: Path) -> None:
    ds = ps.open(damaged(folder, tmp_path))
    with pytest.raises(ps.PenstockError) as here:
        by_threads(ds, shuffle=False)
    with started(ds, shuffle=False) as loader, pytest.raises(ps.PenstockError) as there:
        batches(loader)
    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value)
    assert there.value.__notes__ == here.value.__notes__


def test_bad_samples_are_left_out(folder: Path, tmp_path: Path) -> None:
    ds = ps.open(damaged(folder, tmp_path))
    with started(ds, on_error="skip") as loader:
        rows = sorted(int(row) for batch in batches(loader) for row in batch["row"])
        assert rows == sorted(set(range(ROWS)) - {13, 77})
        assert sorted(sample.row for sample in loader.report()) == [13, 77]


def test_errors_of_functions_show_where(folder: Path) -> None:
    def fails(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if os.getpid() != parent and 50 in batch["row"]:
            raise ZeroDivisionError("as planned")
        return batch

    parent = os.getpid()
    ds = ps.open(folder / "chunks.h5").map(fails)
    with started(ds) as loader, pytest.raises(ps.TransformFailed, match="ZeroDivisionError: as planned") as error:
        batches(loader)
    trace = str(error.value.__cause__)
    assert "in fails" in trace
    assert "During handling" not in trace, "of reading this batch alone, not of reading it with others before"


@pytest.mark.slow
def test_values_that_are_not_finite_are_found_by_the_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for_here: list[int] = []
    monkeypatch.setattr(
        readers_module, "not_finite", lambda values: looked_for_here.append(len(values)) or not_finite(values)
    )
    values = np.ones((60, 500), np.float32)
    values[[3, 50], 7] = np.nan
    np.save(tmp_path / "x.npy", values)
    with started(ps.open(tmp_path / "x.npy"), nan="count") as loader:
        batches(loader)
        assert sum(loader.report().not_finite.values()) == 2
        assert looked_for_here == []
    with started(ps.open(tmp_path / "x.npy"), nan="raise", on_error="skip") as loader:
        assert sum(len(batch["data"]) for batch in loader) == 58
        assert sorted(sample.row for sample in loader.report()) == [3, 50]
    with started(ps.open(tmp_path / "x.npy"), nan="raise") as loader, pytest.raises(ps.PenstockError, match="NaN"):
        batches(loader)
    assert looked_for_here == []
    with started(ps.open(tmp_path / "x.npy"), nan="count", batch_size=2) as loader:
        kept = list(loader)  # beyond the plan: read and looked at in this process
        assert sum(loader.report().not_finite.values()) == 2
    assert looked_for_here
    assert len(kept) == 30


# Processes that die.


def slow_down(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    time.sleep(0.002 * len(batch["row"]))
    return batch


@pytest.mark.slow
def test_killed_readers_cost_a_pause(folder: Path) -> None:
    ds = ps.open(folder / "chunks.h5").map(slow_down)
    expected = by_threads(ds, 4)
    chance = random.Random(1)
    with started(ds) as loader:
        over = threading.Event()

        def kill() -> None:
            while not over.wait(0.15):
                process = chance.choice(readers(loader))
                if process.is_up and process.pid:
                    os.kill(process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            found, restarts = [], 0
            for _ in range(4):
                found += batches(loader)
                restarts += loader.stats().restarts
        finally:
            over.set()
            killer.join()
        assert_same(found, expected)
        assert restarts > 0


CRASHES = 9


def crash(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if CRASHES in batch["row"] and _is_reader():
        ctypes.string_at(0)
    return batch


def _is_reader() -> bool:
    return sys.argv[0] == "-c"


@pytest.mark.slow
def test_a_read_that_kills_every_reader(folder: Path) -> None:
    ds = ps.open(folder / "chunks.h5").map(crash)
    with started(ds, shuffle=False) as loader, pytest.raises(WorkerDied, match="reader processes died") as error:
        batches(loader)
    assert f"row {CRASHES}." in str(error.value)
    assert "chunks.h5" in str(error.value)
    with started(ds, shuffle=False, on_error="skip") as loader:
        rows = {int(row) for batch in batches(loader) for row in batch["row"]}
        left_out = {sample.row for sample in loader.report()}
        assert left_out == {CRASHES}
        assert rows | left_out == set(range(ROWS))
        assert not rows & left_out
        assert loader.stats().restarts >= 2
        assert loader.report().restarts == loader.stats().restarts
        assert "were started again" in str(loader.report())


def test_other_readers_do_what_a_dead_one_left_before_it_is_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = ps.open(folder / "chunks.h5").map(slow_down)
    expected = by_threads(ds)
    with started(ds) as loader:
        monkeypatch.setattr(processes_module, "_BEGIN", "import time; time.sleep(60)")
        found = iter(loader)
        first = {name: np.array(values) for name, values in next(found).items()}
        os.kill(readers(loader)[0].pid, signal.SIGKILL)
        assert_same([first, *({name: np.array(values) for name, values in batch.items()} for batch in found)], expected)
        assert not readers(loader)[0].is_up
        assert loader.report().restarts == 1


def test_threads_read_if_no_reader_can_be_started_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = ps.open(folder / "chunks.h5")
    expected = by_threads(ds)
    with started(ds) as loader:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        for process in readers(loader):
            process._child.kill()
            process._child.wait()
        with pytest.warns(ReadersNotStarted):
            assert_same(batches(loader), expected)


def test_threads_that_read_again_begin_with_what_was_left_to_them() -> None:
    team = team_module.Team(1)
    work = object(), object()
    for each in (None, work, None):
        team._here.put(each)
    assert team._next() is work


def test_an_interrupt_while_a_read_is_repeated_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read goes on: its answer must not be taken for that of another."""
    ds = ps.open(folder / "chunks.h5").map(slow_down)
    expected = by_threads(ds, 2)
    with started(ds, processes=1, threads=1) as loader:
        monkeypatch.setattr(exchange_module, "SUSPECT_DEATHS", 1)
        steps = iter(loader)
        next(steps)
        os.kill(readers(loader)[0].pid, signal.SIGKILL)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(connection_module.ReaderConnection, "flush", interrupt)
            with pytest.raises(KeyboardInterrupt):
                list(steps)
        assert_same(batches(loader), expected[len(expected) // 2 :])


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_reader_that_cannot_be_started_again_is_an_error_and_loses_no_sample(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = ps.open(folder / "chunks.h5").map(slow_down)
    with started(ds, on_error="skip", threads=2) as loader:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        found = iter(loader)
        next(found)
        for process in readers(loader):
            os.kill(process.pid, signal.SIGKILL)
        with pytest.warns(ReadersNotStarted), pytest.raises(WorkerDied, match=r"could not be started again: .*nowhere"):
            list(found)
        assert list(loader.report()) == []


def test_closing_does_not_wait_for_a_reader_that_does_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = ps.open(folder / "chunks.h5").map(slow_down)
    with started(ds, threads=2) as loader:
        monkeypatch.setattr(processes_module, "_BEGIN", "import time; time.sleep(60)")
        found = iter(loader)
        next(found)
        for process in readers(loader):
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.5)  # the new ones begin
        began = time.monotonic()
    assert time.monotonic() - began < 5


def test_readers_that_die_while_they_start_are_counted_in_a_row(folder: Path) -> None:
    with started(ps.open(folder / "chunks.h5"), threads=2) as loader:
        for _ in range(3):
            process = readers(loader)[0]
            os.kill(process.pid, signal.SIGKILL)
            process.died(process.life)
            process.is_ready()
            os.kill(process.pid, signal.SIGKILL)  # before it is up
            process.restart()
        assert not process.failure


def stuck(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if _is_reader() and 100 in batch["row"]:
        time.sleep(60)
    return batch


def test_leaving_a_loop_does_not_wait_for_a_slow_function(folder: Path) -> None:
    ds, before = ps.open(folder / "chunks.h5").map(stuck), set(children(os.getpid()))
    with started(ds, shuffle=False) as loader:
        for number, _ in enumerate(loader):
            if number == 5:
                time.sleep(0.5)  # others read ahead, into the function that hangs
                break
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert set(children(os.getpid())) <= before


def test_the_next_epoch_after_one_that_was_left(folder: Path) -> None:
    ds = ps.open(folder / "chunks.h5").map(slow_down)
    expected = by_threads(ds, 3)
    per_epoch = len(expected) // 3
    with started(ds) as loader:
        for number, _ in enumerate(loader):
            if number == 2:
                break
        found = batches(loader, 2)
    assert_same(found, expected[per_epoch:])


# Starting and ending.


def test_nothing_is_left_when_it_is_closed(folder: Path) -> None:
    before, others = len(os.listdir("/proc/self/fd")), set(children(os.getpid()))
    with started(ps.open(folder / "chunks.h5")) as loader:
        kept = next(iter(loader))
        assert len(set(children(os.getpid())) - others) == 2
    assert set(children(os.getpid())) <= others
    assert kept["x"].sum() != 0, "a batch outlives its loader"
    del kept, loader
    assert len(os.listdir("/proc/self/fd")) <= before + 1


SCRIPT = """
import sys, time
import numpy as np
import penstock as ps

assert __name__ == "__main__", "the script must not run again"
print("once", flush=True)
ds = ps.open(sys.argv[1]).map(lambda batch: {"x": batch["x"] + 1, "row": batch["row"]})
loader = ps.Loader(ds, batch_size=4, processes=2, threads=2, memory="400MiB", output="numpy")
from penstock.loader.loader import runtime_of
runtime_of(loader).start_processes(60)
print(*(process.pid for process in runtime_of(loader)._processes.processes), flush=True)
rows = sorted(int(row) for batch in loader for row in batch["row"])
print(len(rows), flush=True)
if sys.argv[2] == "wait":
    for batch in loader:
        time.sleep(0.2)
"""


def run_script(folder: Path, tmp_path: Path, how: str) -> subprocess.Popen[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(folder / "chunks.h5"), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_script_without_a_main_guard(folder: Path, tmp_path: Path) -> None:
    script = run_script(folder, tmp_path, "end")
    out, _ = script.communicate(timeout=120)
    assert script.returncode == 0
    assert out.splitlines()[0] == "once"
    assert out.splitlines()[2] == str(ROWS)
    assert len(out.splitlines()) == 3
    assert gone(out.splitlines()[1].split())


def test_a_killed_training_process_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    script = run_script(folder, tmp_path, "wait")
    assert script.stdout is not None
    lines = [script.stdout.readline() for _ in range(3)]
    script.kill()
    script.wait()
    script.stdout.close()
    assert gone(lines[1].split())


def gone(pids: list[str]) -> bool:
    """Whether these processes end soon."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_cannot_start_is_said_and_threads_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "_BEGIN", "raise SystemExit(3)")
    ds = ps.open(folder / "chunks.h5")
    loader = ps.Loader(ds, batch_size=7, processes=2, memory="400MiB", output="numpy")
    runtime_of(loader)._ready_processes()
    with loader:
        with pytest.warns(ReadersNotStarted, match="could not be started"):
            runtime_of(loader).start_processes(60)
        assert sorted(int(row) for batch in batches(loader) for row in batch["row"]) == list(range(ROWS))


def test_a_module_that_readers_cannot_import(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported here, and gone when processes start."""
    (tmp_path / "only_here.py").write_text("def same(batch):\n    return batch\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    ds = ps.open(folder / "chunks.h5").map(only_here.same)
    loader = ps.Loader(ds, batch_size=7, processes=1, threads=1, memory="400MiB", output="numpy")
    runtime_of(loader)._ready_processes()
    (tmp_path / "only_here.py").unlink()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    with loader:
        with pytest.warns(ReadersNotStarted, match="only_here"):
            runtime_of(loader).start_processes(60)
        assert len(batches(loader)) == len(loader)


# Arguments and the plan.


def test_what_auto_chooses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loader.placement.WORTH_BYTES", 0)
    ds = ps.open(folder / "chunks.h5")

    def plan(cores: int, memory: str = "2GiB", ds: ps.Dataset = ds, **options: Any) -> Any:
        monkeypatch.setattr("penstock.loader.placement.cores", lambda: cores)
        with ps.Loader(ds, batch_size=8, memory=memory, output="numpy", **options) as loader:
            return loader.plan

    assert plan(2).processes == 0
    sixteen = plan(16)
    assert (sixteen.processes, sixteen.threads) == (8, 15)
    assert "leave the training step a core" in str(sixteen)
    assert "8 processes" in str(sixteen)
    assert plan(16, ds=ds.map(lambda batch: batch)).processes == 15
    assert plan(16, "64MiB").processes == 0
    assert "no room for processes" in str(plan(16, "64MiB"))
    assert sixteen.smallest_bytes == plan(2).smallest_bytes, "processes are given up before a budget is refused"
    assert plan(16, ds=ps.from_arrays(x=np.zeros((100, 10)))).processes == 0
    assert plan(16, processes=0).processes == 0


class Locked:
    def __init__(self) -> None:
        self.turn = threading.Lock()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return batch


LOCK = threading.Lock()


def test_what_cannot_be_sent_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loader.placement.cores", lambda: 16)
    lock = threading.Lock()
    functions = {
        "<lambda> uses 'turn'": lambda batch, turn=lock: batch,
        "<lambda> uses 'lock'": lambda batch: batch if lock else {},
        "<lambda> uses 'LOCK'": lambda batch: batch if LOCK else {},
        "Locked uses 'turn'": Locked(),
        "the dataset": partial(lambda lock, batch: batch, lock),
    }
    for told, function in functions.items():
        function.__module__ = "__main__"  # of no module that another process could import
        options = {"batch_size": 8, "memory": "2GiB", "output": "numpy"}
        ds = ps.open(folder / "chunks.h5").map(function)
        plan = ps.Loader(ds, **options).plan
        assert plan.processes == 0
        assert f"threads read here: {told}" in plan.placement_note
        assert "cannot be sent to processes (TypeError: cannot pickle '_thread.lock' object)" in plan.placement_note
        with pytest.raises(ConfigError, match=f"processes=2: {told}"):
            ps.Loader(ds, processes=2, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"processes": -1}, "processes=-1"),
        ({"processes": "many"}, 'expected "auto" or a whole number'),
        ({"processes": 3, "threads": 2}, "must be at least 3"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_meant(folder: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ps.Loader(ps.open(folder / "chunks.h5"), batch_size=4, **options)


def test_a_budget_without_room_for_the_processes_asked_for(folder: Path) -> None:
    with pytest.raises(ps.BudgetExceeded, match="processes"):
        ps.Loader(ps.open(folder / "chunks.h5"), batch_size=4, processes=2, memory="40MiB")


def test_several_datasets_share_the_processes(folder: Path) -> None:
    sets = {"a": ps.open(folder / "chunks.h5"), "b": ps.open(folder / "blocks.h5")}
    options: dict[str, Any] = {"mode": "together", "batch_size": 7, "shuffle": True, "output": "numpy"}
    with ps.MultiLoader(sets, processes=0, memory="600MiB", **options) as loader:
        expected = [{name: batch["x"].copy() for name, batch in step.items()} for step in loader]
    with ps.MultiLoader(sets, processes=2, memory="600MiB", **options) as loader:
        runtime_of(loader).start_processes(60)
        found = [{name: batch["x"].copy() for name, batch in step.items()} for step in loader]
    assert_same(found, expected)


def test_batches_that_are_kept_beyond_the_plan(folder: Path) -> None:
    ds = ps.open(folder / "chunks.h5")
    expected = by_threads(ds)
    with started(ds) as loader:
        assert_same([dict(batch) for batch in list(loader)], expected)


@pytest.mark.timeout(60)
def test_batches_are_kept_while_processes_come_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for reads when processes are up do those that no process can do, to the last one."""
    answers = iter([False])
    are_up = exchange_module.Exchange.are_up
    monkeypatch.setattr(exchange_module.Exchange, "are_up", lambda self: next(answers, None) is None and are_up(self))
    rows = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (72, 2**20))
    rows[:, 0] = np.arange(72)
    with started(ps.open(tmp_path / "x.npy"), batch_size=8, threads=2) as loader:
        kept = list(loader)
        assert loader.stats().kept_batches > 0
    assert sorted(int(row) for batch in kept for row in batch["data"][:, 0]) == list(range(72))


def test_reads_are_reported_to_who_watches_them(folder: Path) -> None:
    from penstock.base import counters

    seen: list[str] = []
    with started(ps.open(folder / "chunks.h5")) as loader, counters.watched(lambda path, at, count: seen.append(path)):
        batches(loader)
    assert {os.path.basename(path) for path in seen} == {"chunks.h5"}
