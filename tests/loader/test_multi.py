"""Several datasets of different shapes in one loader: exact epochs, positions, ranks, and clean ends."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import BudgetExceeded, ConfigError, DataError, KeptBatches, StateMismatch
from penstock.testing import check_resume

VOXELS = {"subj01": 19, "subj02": 14, "subj05": 12, "subj07": 9}
ROWS = {"subj01": 53, "subj02": 38, "subj05": 53, "subj07": 6}
MODES = ["together", "alternate"]


@pytest.fixture
def subjects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ps.Dataset]:
    """Four datasets stored in four ways; every voxel names its row, and every sample its subject."""
    monkeypatch.setattr("penstock.loader.request.WINDOW_BYTES", 15 * 72)  # three chunks of subj02
    found = {}
    for name, rows in ROWS.items():
        values = np.repeat(np.arange(rows, dtype=np.float32)[:, None], VOXELS[name], 1)
        if name == "subj01":
            np.save(tmp_path / f"{name}.npy", values)
            voxels = ps.open(tmp_path / f"{name}.npy")
        elif name == "subj07":
            voxels = ps.from_arrays(voxels=values)
        else:
            with h5py.File(tmp_path / f"{name}.h5", "w") as file:
                options = {"chunks": (5, 4), "compression": "gzip"} if name == "subj02" else {"chunks": (1, 12)}
                file.create_dataset("voxels", data=values, **options)
            voxels = ps.open(tmp_path / f"{name}.h5")
        found[name] = ps.join(voxels=voxels, row=np.arange(rows), subject=np.full(rows, int(name[-1])))
    return found


def loader(subjects: dict[str, ps.Dataset], mode: str = "together", **options: Any) -> ps.MultiLoader:
    defaults = {"batch_size": 4, "shuffle": True, "memory": "64MiB"}
    return ps.MultiLoader(subjects, mode=mode, **{**defaults, **options})  # type: ignore[arg-type]


def parts(step: Any) -> list[tuple[str, Any]]:
    return list(step.items()) if isinstance(step, dict) else [step]


def rows_of(name: str, batch: Any) -> list[int]:
    assert batch["voxels"].shape == (len(batch["row"]), VOXELS[name])
    assert (batch["voxels"] == batch["row"][:, None]).all()
    assert (batch["subject"] == int(name[-1])).all()
    return batch["row"].tolist()


def epoch_of(batches: ps.MultiLoader) -> list[list[tuple[str, list[int]]]]:
    return [[(name, rows_of(name, batch)) for name, batch in parts(step)] for step in batches]


def by_name(steps: list[list[tuple[str, list[int]]]]) -> dict[str, list[int]]:
    seen: dict[str, list[int]] = {name: [] for name in ROWS}
    for step in steps:
        for name, rows in step:
            seen[name] += rows
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [1, 4, 60, {"subj01": 8, "subj02": 3, "subj05": 8, "subj07": 1}], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_sample_of_every_dataset_once(subjects: Any, mode: str, batch_size: Any, threads: int) -> None:
    with loader(subjects, mode, batch_size=batch_size, threads=threads) as batches:
        epochs = [epoch_of(batches) for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(batches)
        assert {name: sorted(rows) for name, rows in by_name(epoch).items()} == {
            name: list(range(rows)) for name, rows in ROWS.items()
        }
    if batch_size != 60:
        assert epochs[0] != epochs[1] != epochs[2]


def test_together_gives_one_batch_of_each_until_it_ends(subjects: Any) -> None:
    with loader(subjects, batch_size=4) as batches:
        names = [[name for name, _ in step] for step in epoch_of(batches)]
    steps = {name: -(-rows // 4) for name, rows in ROWS.items()}
    assert names == [[name for name in ROWS if number < steps[name]] for number in range(max(steps.values()))]


def test_alternate_spreads_each_dataset_over_the_epoch(subjects: Any) -> None:
    with loader(subjects, "alternate", batch_size=1) as batches:
        sequences = [[name for step in epoch_of(batches) for name, _ in step] for _ in range(2)]
    assert sequences[0] != sequences[1]
    for sequence in sequences:
        assert {name: sequence.count(name) for name in ROWS} == ROWS
        for name, rows in ROWS.items():
            so_far = np.cumsum([each == name for each in sequence])
            even = np.arange(1, len(sequence) + 1) * rows / len(sequence)
            # Each batch moves within its own length; so do those of the others around it.
            assert np.abs(so_far - even).max() <= 1 + rows * len(ROWS) / len(sequence)


def test_without_shuffling_everything_is_in_order(subjects: Any) -> None:
    with loader(subjects, "alternate", shuffle=False) as batches:
        first, second = epoch_of(batches), epoch_of(batches)
    assert first == second
    assert by_name(first) == {name: list(range(rows)) for name, rows in ROWS.items()}


def test_no_two_datasets_are_shuffled_alike(subjects: Any) -> None:
    with loader(dict.fromkeys(("a", "b", "c"), subjects["subj07"]), columns=("row",), batch_size=6) as batches:
        orders = [tuple(rows[0].tolist()) for rows in next(iter(batches)).values()]
    assert len(set(orders)) == 3


@pytest.mark.parametrize("mode", MODES)
def test_the_order_does_not_depend_on_threads_memory_or_output(subjects: Any, mode: str) -> None:
    def run(**options: Any) -> Any:
        with loader(subjects, mode, seed=3, **options) as batches:
            return epoch_of(batches)

    smallest = loader(subjects, mode).plan.smallest_bytes
    assert run(threads=1) == run(threads=5) == run(memory=smallest) == run(output="numpy") != run(batch_size=5)


def test_a_dataset_is_shuffled_as_it_is_without_the_others(subjects: Any) -> None:
    with loader(subjects, "alternate") as several, loader({"subj02": subjects["subj02"]}) as alone:
        assert by_name(epoch_of(several))["subj02"] == by_name(epoch_of(alone))["subj02"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_an_epoch(subjects: Any, mode: str, world_size: int) -> None:
    shares = []
    for rank in range(world_size):
        with loader(subjects, mode, batch_size=3, rank=rank, world_size=world_size) as batches:
            shares.append(epoch_of(batches))
    names = [[[name for name, _ in step] for step in share] for share in shares]
    assert all(each == names[0] for each in names), "every rank gets the same datasets at each step"
    for name, rows in ROWS.items():
        seen = [row for share in shares for row in by_name(share)[name]]
        left = rows % (3 * world_size)
        assert len(seen) == rows + (world_size - left if 0 < left < world_size else 0)
        assert set(seen) == set(range(rows))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "samples", ["all", "shortest", "longest", {"subj01": 9, "subj02": 70, "subj05": 53, "subj07": 2}]
)
def test_resume_after_any_step(subjects: Any, mode: str, samples: Any) -> None:
    check_resume(lambda: loader(subjects, mode, batch_size=13, samples=samples, seed=2, output="numpy"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 3), (3, 1)])
def test_resume_on_another_number_of_ranks(subjects: Any, mode: str, before: int, after: int) -> None:
    first = [loader(subjects, mode, batch_size=2, rank=rank, world_size=before) for rank in range(before)]
    seen: dict[str, list[int]] = {name: [] for name in ROWS}
    running = [iter(each) for each in first]
    for _ in range(5):
        for each in running:
            for name, batch in parts(next(each)):
                seen[name] += rows_of(name, batch)
    states = [json.loads(json.dumps(each.state_dict(), sort_keys=True)) for each in first]
    assert all(state == states[0] for state in states), "every rank saves the same position"
    for each in first:
        each.close()
    for rank in range(after):
        with loader(subjects, mode, batch_size=3, rank=rank, world_size=after) as batches:
            batches.load_state_dict(states[0])
            for name, rows in by_name(epoch_of(batches)).items():
                seen[name] += rows
    for name, rows in seen.items():
        assert set(rows) == set(range(ROWS[name]))
        assert len(rows) < ROWS[name] + before + after, "no more than the padding comes twice"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("samples", ["shortest", "longest", {"subj01": 20, "subj02": 10, "subj05": 53, "subj07": 13}])
def test_every_sample_comes_once_before_any_comes_twice(subjects: Any, mode: str, samples: Any) -> None:
    lengths = {"shortest": dict.fromkeys(ROWS, 6), "longest": dict.fromkeys(ROWS, 53)}.get(str(samples), samples)
    seen: dict[str, list[int]] = {name: [] for name in ROWS}
    with loader(subjects, mode, samples=samples) as batches:
        for _ in range(7):
            epoch = by_name(epoch_of(batches))
            assert {name: len(rows) for name, rows in epoch.items()} == lengths
            for name, rows in epoch.items():
                seen[name] += rows
    for name, rows in ROWS.items():
        passes = [seen[name][begin : begin + rows] for begin in range(0, len(seen[name]) - rows + 1, rows)]
        for each in passes:
            assert sorted(each) == list(range(rows))
        assert len({tuple(each) for each in passes}) == len(passes), "each pass is shuffled anew"


def test_steps_are_equal_where_batch_sizes_differ(subjects: Any) -> None:
    sizes = {"subj01": 7, "subj02": 3, "subj05": 5, "subj07": 2}
    for samples, told in (("longest", -(-38 // 3)), ("shortest", -(-6 // 2))):
        with loader(subjects, batch_size=sizes, samples=samples) as batches:
            epoch = epoch_of(batches)
        assert len(epoch) == told
        assert all(len(step) == len(ROWS) for step in epoch)


def test_a_chunk_is_read_once_a_pass(subjects: Any) -> None:
    with loader({"subj02": subjects["subj02"]}, samples={"subj02": 19}) as batches:
        read = []
        for _ in range(4):
            epoch_of(batches)
            read.append(batches.stats().chunks_read)
    chunks = -(-38 // 5) * -(-14 // 4)
    # Four epochs are two passes; a window that an epoch's end cuts is read again in the next.
    assert 2 * chunks <= sum(read) <= 2 * chunks + 2 * 2 * chunks // 3


@pytest.mark.parametrize("mode", MODES)
def test_states_are_small_json_and_epochs_go_on(subjects: Any, mode: str) -> None:
    with loader(subjects, mode) as batches:
        epoch_of(batches)
        state = batches.state_dict()
        assert (state["epoch"], set(state["samples"].values())) == (1, {0})
        assert len(json.dumps(state)) < 1200
        for _ in batches:
            break
        assert 0 < sum(batches.state_dict()["samples"].values()) < sum(ROWS.values())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed"),
        ({"mode": "alternate"}, "mode"),
        ({"version": 99}, "version"),
        ({"samples": {"subj01": 1}}, "position"),
        ({"samples": {**ROWS, "subj07": 7}}, "position"),
        ({"epoch": -1}, "position"),
        ({"more": 1}, "has an unknown entry 'more'"),
        ({"of": {}}, "datasets"),
    ],
    ids=str,
)
def test_a_foreign_state_is_refused(subjects: Any, change: dict[str, Any], told: str) -> None:
    with loader(subjects) as batches:
        with pytest.raises(StateMismatch, match=told):
            batches.load_state_dict({**batches.state_dict(), **change})
        with pytest.raises(StateMismatch, match="several datasets"):
            batches.load_state_dict(ps.Loader(subjects["subj01"], batch_size=1).state_dict())


def test_a_state_says_what_it_lacks_and_what_differs(subjects: Any) -> None:
    with loader(subjects) as batches:
        state = batches.state_dict()
        with pytest.raises(StateMismatch, match="lacks entry 'epoch'"):
            batches.load_state_dict({name: value for name, value in state.items() if name != "epoch"})
        other = {**state["of"], "subj05": {**state["of"]["subj05"], "rows": 54}}
        with pytest.raises(StateMismatch, match="rows of dataset 'subj05' was 54, here it is 53"):
            batches.load_state_dict({**state, "of": other})
        with ps.Loader(subjects["subj01"], batch_size=1) as one, pytest.raises(StateMismatch, match="by a MultiLoader"):
            one.load_state_dict(state)


@pytest.mark.parametrize("mode", MODES)
def test_progress_is_shown(subjects: Any, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    with loader(subjects, mode, progress=True) as batches:
        epoch_of(batches)
    shown = capfd.readouterr().err
    assert "epoch 0: 100%" in shown
    assert "steps/s" in shown
    assert f"epoch 0: {sum(ROWS.values())} samples" in shown


@pytest.mark.parametrize(
    ("options", "hint"), [({"num_workers": 2}, "threads=8"), ({"batchsize": 3}, "did you mean 'batch_size'")], ids=str
)
def test_unknown_arguments_are_explained(subjects: Any, options: dict[str, Any], hint: str) -> None:
    with pytest.raises(ps.WrongArgument, match=f"MultiLoader has no argument.*{hint}"):
        loader(subjects, **options)


@pytest.mark.parametrize("change", [{"samples": "longest"}, {"shuffle": False}, {"window": 5}], ids=str)
def test_a_state_of_another_order_is_refused(subjects: Any, change: dict[str, Any]) -> None:
    state = loader(subjects).state_dict()
    with pytest.raises(StateMismatch, match="subj0"):
        loader(subjects, **change).load_state_dict(state)


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-reader")]


def open_data_files(folder: Path) -> int:
    descriptors = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(str(each.resolve()).startswith(str(folder)) for each in descriptors)


CTRL_C = """
    import signal, sys, time
    import numpy as np
    import penstock as ps
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have it ignored
    datasets = {name: ps.open(sys.argv[1]) for name in ("a", "b", "c")}
    options = {"batch_size": 1, "memory": "64MiB", "output": "numpy", "threads": 3}
    running = iter(ps.MultiLoader(datasets, mode="alternate", **options))
    print("ready", flush=True)
    for batch in running:
        BODY
"""


def test_ctrl_c_ends_the_process(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3_000_000, 8), np.int8))
    code = textwrap.dedent(CTRL_C.replace("BODY", "pass"))
    command = [sys.executable, "-c", code, str(tmp_path / "a.npy")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=20)
    assert "KeyboardInterrupt" in told
    assert child.returncode != 0


def test_interpreter_exit_with_a_live_iterator(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1000, 8), np.int8))
    code = textwrap.dedent(CTRL_C.replace("BODY", "break"))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.npy")], timeout=20, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


class Stop(Exception):
    """Raised in a loop's body."""


def leave_by_break(batches: ps.MultiLoader) -> None:
    for _ in batches:
        break


def leave_by_exception(batches: ps.MultiLoader) -> None:
    with contextlib.suppress(Stop):
        for _ in batches:
            raise Stop


def drop_the_iterator(batches: ps.MultiLoader) -> None:
    iterator = iter(batches)
    next(iterator)
    del iterator


def close_it(batches: ps.MultiLoader) -> None:
    iterator = iter(batches)
    next(iterator)
    batches.close()
    with pytest.raises(StateMismatch, match="closed"):
        next(iterator)


def go_to_the_end(batches: ps.MultiLoader) -> None:
    iterator = iter(batches)
    for _ in iterator:
        pass
    assert next(iterator, None) is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception, drop_the_iterator, close_it, go_to_the_end])
def test_leaving_leaves_nothing_behind(subjects: Any, tmp_path: Path, mode: str, leave: Callable[[Any], None]) -> None:
    batches = loader(subjects, mode, threads=3)
    for _ in range(10):
        leave(batches)
        assert reader_threads() == []
        assert open_data_files(tmp_path) == 0


def test_there_are_as_many_threads_as_were_asked_for(subjects: Any) -> None:
    with loader(subjects, threads=2) as batches:
        running = iter(batches)
        next(running)
        assert len(reader_threads()) <= 2
        assert batches.plan.threads == 2


def test_a_newer_iteration_or_a_state_ends_the_older(subjects: Any) -> None:
    with loader(subjects) as batches:
        older = iter(batches)
        next(older)
        newer = iter(batches)
        next(newer)
        with pytest.raises(StateMismatch, match="newer"):
            next(older)
        batches.load_state_dict(batches.state_dict())
        with pytest.raises(StateMismatch, match="load_state_dict"):
            next(newer)
        assert len(epoch_of(batches)) == len(batches) - 1


@pytest.mark.parametrize("mode", MODES)
def test_kept_batches_stay_right_and_are_told_once(subjects: Any, mode: str) -> None:
    smallest = loader(subjects, mode, batch_size=2).plan.smallest_bytes
    with loader(subjects, mode, batch_size=2, memory=smallest) as batches, pytest.warns(KeptBatches) as told:
        kept = list(batches)
    assert len(told) == 1
    assert told[0].filename == __file__
    seen = by_name([[(name, rows_of(name, batch)) for name, batch in parts(step)] for step in kept])
    assert {name: sorted(rows) for name, rows in seen.items()} == {name: list(range(n)) for name, n in ROWS.items()}
    assert batches.stats().kept_batches > 0


def test_a_batch_outlives_its_loader(subjects: Any) -> None:
    with loader(subjects) as batches:
        step = next(iter(batches))
        kept = {name: (batch["voxels"], batch["voxels"].clone()) for name, batch in step.items()}
    del batches, step
    gc.collect()
    assert all(torch.equal(values, before) for values, before in kept.values())


@pytest.fixture
def damaged(subjects: dict[str, ps.Dataset], tmp_path: Path) -> dict[str, ps.Dataset]:
    """Three datasets, of one of which rows 10 to 14 cannot be decoded."""
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        values = np.repeat(np.arange(38, dtype=np.float32)[:, None], 14, 1)
        file.create_dataset("voxels", data=values, chunks=(5, 14), compression="gzip")
    with h5py.File(tmp_path / "bad.h5") as file:
        where = file["voxels"].id.get_chunk_info(2)
    with open(tmp_path / "bad.h5", "r+b") as raw:
        raw.seek(where.byte_offset)
        raw.write(b"\xff" * where.size)
    bad = ps.open(tmp_path / "bad.h5")
    joined = ps.join(voxels=bad, row=np.arange(38), subject=np.full(38, 2))
    return {"subj01": subjects["subj01"], "subj02": joined, "subj07": subjects["subj07"]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_bad_samples_of_one_dataset_are_left_out(damaged: Any, mode: str, batch_size: int) -> None:
    expected = {
        "subj01": set(range(53)),
        "subj02": set(range(38)) - set(range(10, 15)),
        "subj05": set(),
        "subj07": set(range(6)),
    }
    with loader(damaged, mode, on_error="skip", batch_size=batch_size) as batches:
        for _ in range(2):
            epoch = epoch_of(batches)
            assert {name: set(rows) for name, rows in by_name(epoch).items()} == expected
            assert all(rows for step in epoch for _, rows in step), "no empty batch where there is one rank"
            stats = batches.stats()
            assert stats.left_out_samples == 5
            assert all("subj02" in str(sample) and "bad.h5" in sample.url for sample in stats.left_out)
            assert stats.samples == 53 + 33 + 6
    check_resume(lambda: loader(damaged, mode, on_error="skip", batch_size=5), stops=[0, 1, 3, 5])


@pytest.mark.parametrize("mode", MODES)
def test_ranks_take_the_same_steps_around_bad_samples(damaged: Any, mode: str) -> None:
    shares = []
    for rank in range(2):
        with loader(damaged, mode, on_error="skip", batch_size=1, rank=rank, world_size=2) as batches:
            shares.append([[name for name, _ in step] for step in epoch_of(batches)])
    assert shares[0] == shares[1]


def test_a_step_that_failed_halfway_was_not_delivered(damaged: Any) -> None:
    """The position stays where the latest whole step left it, though some datasets had come further."""
    whole: list[Any] = []
    with loader(damaged, shuffle=False) as batches:
        with pytest.raises(DataError, match=r"bad\.h5"):
            whole.extend(list(step) for step in batches)
        assert whole == [["subj01", "subj02", "subj07"]] * 2
        assert batches.state_dict()["samples"] == {"subj01": 8, "subj02": 8, "subj07": 6}
        assert reader_threads() == []


@pytest.mark.parametrize("mode", MODES)
def test_bad_samples_raise_where_their_batch_would_come(damaged: Any, mode: str) -> None:
    with loader(damaged, mode) as batches, pytest.raises(DataError, match=r"bad\.h5") as raised:
        epoch_of(batches)
    assert any("subj02" in note for note in raised.value.__notes__)
    with loader(damaged, mode, on_error="skip", max_errors=3) as batches, pytest.raises(DataError):
        epoch_of(batches)


@pytest.mark.parametrize("mode", MODES)
def test_columns_name_every_sample(subjects: Any, mode: str) -> None:
    with loader(subjects, mode, columns=("row", "__index__", "voxels")) as batches:
        for step in batches:
            for name, (row, index, voxels) in parts(step):
                assert torch.equal(row, index)
                assert voxels.shape[1] == VOXELS[name]


def test_one_plan_and_one_account_for_all(subjects: Any) -> None:
    with loader(subjects, threads=2) as batches:
        told = str(batches.plan)
        assert all(f"{name} batches" in told for name in ROWS)
        assert told.count("base") == 1
        assert "budget" in told
        assert batches.plan.planned_bytes <= batches.plan.limit_bytes == 64 * 2**20
        assert "nothing was read" in batches.stats().bottleneck
        epoch_of(batches)
        stats = batches.stats()
    assert stats.samples == sum(ROWS.values())
    assert stats.batches == len(batches)
    assert stats.bytes == sum(rows * (4 * VOXELS[name] + 16) for name, rows in ROWS.items())
    assert stats.budget_bytes == 64 * 2**20
    assert stats.planned_bytes == batches.plan.planned_bytes


def test_the_smallest_budget_is_named_and_works(subjects: Any) -> None:
    with pytest.raises(BudgetExceeded, match="4 datasets together") as refused:
        loader(subjects, memory=1)
    smallest = int(str(refused.value).split("(")[1].split(" bytes")[0].replace(",", ""))
    with loader(subjects, memory=smallest) as batches:
        assert sum(map(len, by_name(epoch_of(batches)).values())) == sum(ROWS.values())
    with pytest.raises(BudgetExceeded):
        loader(subjects, memory=smallest - 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "mixed"}, "mode"),
        ({"batch_size": 0}, "batch_size.*subj01"),
        ({"batch_size": {"subj01": 3}}, "batch_size.*subj02"),
        ({"batch_size": {**ROWS, "subj09": 3}}, "subj09"),
        ({"samples": "most"}, "samples"),
        ({"samples": {**ROWS, "subj05": 0}}, "samples.*subj05"),
        ({"columns": ("voxels", "other")}, r"datasets\['subj01'\].*other"),
        ({"seed": -1}, "seed"),
        ({"shuffle": ps.Shuffled(53)}, "shuffle"),
        ({"on_error": "ignore"}, "on_error"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_meant(subjects: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        loader(subjects, **options)


@pytest.mark.parametrize("datasets", [{}, [], {1: 2}, {"a": "b.npy"}], ids=str)
def test_datasets_come_by_name(datasets: Any) -> None:
    with pytest.raises(ConfigError, match="datasets"):
        loader(datasets)


def test_an_empty_dataset_is_named(subjects: Any) -> None:
    with pytest.raises(ConfigError, match=r"subj05.*no samples"):
        loader({**subjects, "subj05": subjects["subj05"].select([])})


def test_names_of_holders_do_not_collide(subjects: Any) -> None:
    odd = dict(zip(["reading", "base", "planned", ""], subjects.values(), strict=True))
    plain = loader(subjects).plan.planned_bytes
    assert loader(odd).plan.planned_bytes == plain
