"""``on_error="skip"``: what cannot be read is left out, counted and listed, and nothing else changes."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.errors import Changed, ConfigError, DataError, TransformFailed

ROWS = 40
SHAPE = (6, 7)


def write(path: Path, first: int, chunk_rows: int) -> None:
    rows = np.arange(first, first + ROWS, dtype=np.int32)
    with h5py.File(path, "w") as file:
        values = np.ascontiguousarray(np.broadcast_to(rows[:, None, None], (ROWS, *SHAPE)))
        options = {"compression": "gzip", "fletcher32": True}
        file.create_dataset("betas", data=values, chunks=(chunk_rows, *SHAPE), **options)


def damage(path: Path, block: int) -> None:
    """Flip a byte in the middle of a chunk, and leave the file's time as it was expected to be."""
    with h5py.File(path) as file:
        chunk = file["betas"].id.get_chunk_info(block)
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset + chunk.size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x40]))


@pytest.fixture(params=[(1, False), (5, False), (5, True)], ids=["one row", "five rows", "five rows, shared out"])
def damaged(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ps.Dataset, set[int]]:
    """Two files; a chunk of the second cannot be read."""
    rows, shared_out = request.param
    if shared_out:
        monkeypatch.setattr("penstock.loader.plan.SHARE_ABOVE_BYTES", 0)
    for session in range(2):
        write(tmp_path / f"session{session}.h5", session * ROWS, rows)
    damage(tmp_path / "session1.h5", 3)
    bad = set(range(ROWS + 3 * rows, ROWS + 4 * rows))
    return ps.open(tmp_path / "session*.h5"), bad


def loader(ds: ps.Dataset, **options: Any) -> ps.Loader:
    given = {"batch_size": 4, "shuffle": True, "on_error": "skip", "columns": ("betas", "__index__"), "output": "numpy"}
    return ps.Loader(ds, **{**given, "memory": "64MiB", **options})


def rows_of(batch: Any) -> list[int]:
    values, index = batch
    assert (values == index[:, None, None]).all()
    return index.tolist()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_only_what_is_damaged_is_left_out(damaged: tuple[ps.Dataset, set[int]], shuffle: bool, threads: int) -> None:
    ds, bad = damaged
    with loader(ds, shuffle=shuffle, threads=threads) as batches:
        seen = [row for batch in batches for row in rows_of(batch)]
        stats, report = batches.stats(), batches.report()
    assert sorted(seen) == sorted(set(range(2 * ROWS)) - bad)
    assert {sample.row for sample in stats.left_out} == bad
    assert (stats.left_out_samples, stats.samples) == (len(bad), 2 * ROWS - len(bad))
    for sample in stats.left_out:
        assert sample.url.endswith("session1.h5")
        assert "fletcher32" in sample.why
        assert "betas[" in sample.why
    assert f"{len(bad)} samples were left out" in str(stats)
    assert list(report) == list(stats.left_out)
    assert (report.samples, report.unverified) == (len(bad), 0)
    assert all(f"left out: {sample}" in str(report).splitlines() for sample in report)


def test_raising_is_the_default(damaged: tuple[ps.Dataset, set[int]]) -> None:
    ds, _ = damaged
    with (
        loader(ds, on_error="raise") as batches,
        pytest.raises(DataError, match=r"session1\.h5: betas\[.*chunk .*offset"),
    ):
        list(batches)


def test_the_order_of_the_others_stays(damaged: tuple[ps.Dataset, set[int]]) -> None:
    ds, bad = damaged
    order = ps.Shuffled(2 * ROWS, 7)
    with loader(ds, shuffle=order) as batches:
        seen = [rows_of(batch) for batch in batches]
    wanted = order.rows(0, 0, 2 * ROWS).reshape(-1, 4)
    assert seen == [kept for batch in wanted.tolist() if (kept := [row for row in batch if row not in bad])]


def test_resuming_leaves_out_the_same(damaged: tuple[ps.Dataset, set[int]]) -> None:
    ds, bad = damaged
    with loader(ds) as batches:
        whole = [rows_of(batch) for batch in batches]
    for stop in range(len(whole)):
        with loader(ds) as batches:
            iterator = iter(batches)
            begun = [rows_of(next(iterator)) for _ in range(stop)]
            state = json.loads(json.dumps(batches.state_dict()))
        with loader(ds, threads=3) as batches:
            batches.load_state_dict(state)
            assert begun + [rows_of(batch) for batch in batches] == whole
    assert bad.isdisjoint(row for batch in whole for row in batch)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_take_the_same_steps(damaged: tuple[ps.Dataset, set[int]], world: int) -> None:
    ds, bad = damaged
    steps, seen = set(), []
    for rank in range(world):
        with loader(ds, shuffle=False, batch_size=2, rank=rank, world_size=world) as batches:
            delivered = [rows_of(batch) for batch in batches]
        steps.add(len(delivered))
        seen += [row for batch in delivered for row in batch]
    assert len(steps) == 1
    assert set(seen) == set(range(2 * ROWS)) - bad


def test_a_batch_of_which_nothing_is_left_does_not_come(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", 0, 20)
    damage(tmp_path / "a.h5", 0)
    with loader(ps.open(tmp_path / "a.h5"), shuffle=False) as batches:
        seen = [rows_of(batch) for batch in batches]
    assert seen == [list(range(first, first + 4)) for first in range(20, 40, 4)]


def test_nothing_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", 0, 20)
    for block in (0, 1):
        damage(tmp_path / "a.h5", block)
    with loader(ps.open(tmp_path / "a.h5"), batch_size=1) as batches:
        assert list(batches) == []
        assert batches.stats().left_out_samples == ROWS


def test_too_many_errors_are_raised(damaged: tuple[ps.Dataset, set[int]]) -> None:
    ds, bad = damaged
    with loader(ds, max_errors=len(bad)) as batches:
        assert sum(len(rows_of(batch)) for batch in batches) == 2 * ROWS - len(bad)
    with loader(ds, max_errors=len(bad) - 1) as batches, pytest.raises(DataError) as caught:
        list(batches)
    assert f"max_errors={len(bad) - 1}" in "".join(caught.value.__notes__)


def test_a_replaced_file_is_left_out(tmp_path: Path) -> None:
    for session in range(2):
        write(tmp_path / f"session{session}.h5", session * ROWS, 1)
    ds = ps.open(tmp_path / "session*.h5")
    with loader(ds, shuffle=False) as batches:
        iterator = iter(batches)
        seen = rows_of(next(iterator))
        write(tmp_path / "other.h5", 1000, 1)
        (tmp_path / "other.h5").rename(tmp_path / "session1.h5")
        seen += [row for batch in iterator for row in rows_of(batch)]
        left_out = batches.stats().left_out
    assert set(seen) | {sample.row for sample in left_out} == set(range(2 * ROWS))
    assert all("after it was opened" in sample.why for sample in left_out)
    with loader(ds, on_error="raise") as batches, pytest.raises(Changed):
        list(batches)


def test_a_report_of_nothing_left_out(tmp_path: Path) -> None:
    write(tmp_path / "checked.h5", 0, 4)
    with loader(ps.open(tmp_path / "checked.h5")) as batches:
        assert len(list(batches)) == ROWS // 4
        assert not batches.report()
        assert str(batches.report()) == "every sample was delivered, and checked"
    np.save(tmp_path / "plain.npy", np.zeros((ROWS, 3)))
    with ps.Loader(ps.open(tmp_path / "plain.npy"), batch_size=4, memory="64MiB", output="numpy") as batches:
        list(batches)
        assert batches.report().unverified == ROWS
        assert str(batches.report()) == f"delivered without a checksum or manifest to check: {ROWS} values of 'data'"


def test_mistakes_of_the_program_are_not_left_out(damaged: tuple[ps.Dataset, set[int]]) -> None:
    def fails(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if (batch["betas"][:, 0, 0] == 7).any():
            raise ValueError("seven")
        return batch

    with loader(damaged[0].map(fails)) as batches, pytest.raises(TransformFailed, match="seven"):
        list(batches)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    write(tmp_path / "session0.h5", 0, 1)
    (tmp_path / "session1.h5").write_bytes(b"\x89HDF\r\n\x1a\n and no more")
    paths = [tmp_path / f"session{number}.h5" for number in range(3)]
    with pytest.raises(DataError):
        ps.open(paths)
    ds = ps.open(paths, on_error="skip").select(range(10))
    assert sorted(str(why).split(":")[0][-11:] for why in ds.left_out) == ["session1.h5", "session2.h5"]
    with loader(ds) as batches:
        assert sorted(row for batch in batches for row in rows_of(batch)) == list(range(10))
        assert len(batches.stats().files_left_out) == 2
        assert "2 files were left out" in str(batches.stats())
        assert str(batches.report()).count("file left out: ") == 2
    with pytest.raises(ConfigError, match="files could be opened"):
        ps.open(paths[1:], on_error="skip")


def test_only_the_two_are_known(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", 0, 1)
    refused = r'on_error=.*expected "raise" or "skip"'
    with pytest.raises(ConfigError, match=refused):
        ps.open(tmp_path / "a.h5", on_error="ignore")  # type: ignore[arg-type]
    ds = ps.open(tmp_path / "a.h5")
    with pytest.raises(ConfigError, match=refused):
        loader(ds, on_error="ignore")
