"""What a plan foretells, beside what then happens."""

import tarfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.errors import BudgetExceeded, ConfigError
from penstock.files.handles import Handle
from penstock.loader import read_sizes as planning
from penstock.loader.forecast import format_seconds
from penstock.loader.rivals import Habits, LoadingJob, rivals
from penstock.loader.trial import Trial, _summed_up, is_over, is_settled, try_out

ROWS = 48
RNG = np.random.default_rng(7)
MASK = np.zeros((10, 12, 8), bool)
MASK[2:5, 3:9, :4] = True

WORKED = {"betas": ((750, 150, 150, 100), "float32")}
PICTURES = {"picture": ((750, 425, 425, 3), "uint8")}


def values() -> np.ndarray:
    return RNG.integers(-300, 300, (ROWS, 10, 12, 8)).astype(np.int16)


def hdf5(tmp_path: Path, **options: Any) -> ps.Dataset:
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("betas", data=values(), **options)
    return ps.open(str(tmp_path / "*.h5"))


def tar(tmp_path: Path) -> ps.Dataset:
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for number in range(ROWS):
            written = BytesIO()
            np.save(written, values()[0])
            member = tarfile.TarInfo(f"{number:04d}.betas.npy")
            member.size = len(written.getvalue())
            file.addfile(member, BytesIO(written.getvalue()))
    return ps.open(tmp_path / "a.tar")


def npy(tmp_path: Path) -> ps.Dataset:
    np.save(tmp_path / "a.npy", values())
    return ps.open(tmp_path / "a.npy")


def joined(tmp_path: Path) -> ps.Dataset:
    rows = RNG.integers(0, 2 * ROWS, 100)
    return ps.join(betas=(hdf5(tmp_path, chunks=(1, 10, 12, 8)), rows), label=np.arange(100))


def test_the_worked_example_to_the_byte() -> None:
    told = ps.plan(WORKED, files=40, batch_size=32, memory="2GiB")
    assert told.contents.sample_bytes == 9_000_000
    assert told.contents.file_bytes == 6_750_000_000
    assert told.contents.whole_bytes == told.read_bytes == 270_000_000_000
    assert told.batch_bytes == 288_000_000
    assert ps.plan({**WORKED, **PICTURES}, files=40, batch_size=32, memory="2GiB").batch_bytes == 305_340_000
    for figure in ("8.58 MiB", "6.29 GiB", "251 GiB", "275 MiB"):
        assert f" {figure}" in str(told)


@pytest.mark.parametrize(
    "make",
    [
        npy,
        tar,
        hdf5,
        joined,
        lambda path: hdf5(path, chunks=(8, 5, 4, 8), compression="gzip"),
        lambda path: hdf5(path, chunks=(1, 10, 12, 8), compression="gzip", shuffle=True),
        lambda path: hdf5(path, chunks=(ROWS, 1, 1, 1)).select_within("betas", MASK),
        lambda path: hdf5(path).select_within("betas", MASK),
        lambda path: hdf5(path).cast("betas", "float32").select(range(10, 40)),
    ],
    ids=["npy", "tar", "contiguous", "joined", "chunks", "gzip", "voxels", "part", "selected"],
)
def test_bytes_read_are_foretold(tmp_path: Path, make: Any) -> None:
    ds, options = make(tmp_path), {"batch_size": 7, "memory": "64MiB"}
    told = ps.plan(ds, measure=0, **options)
    with ps.Loader(ds, shuffle=True, output="numpy", **options) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert told.read_bytes == pytest.approx(stats.bytes_read, rel=0.02)
    assert told.plan.planned_bytes == loader.plan.planned_bytes
    assert told.contents.whole_bytes == stats.bytes


def test_files_of_unknown_length_are_told_from_a_trial(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(str(tmp_path / "a.zarr"), shape=(40, 6, 50), chunks=(4, 6, 50), dtype="i2")
    array[:] = RNG.integers(0, 9, (40, 6, 50))
    stored = sum(file.stat().st_size for file in (tmp_path / "a.zarr" / "c").rglob("*") if file.is_file())
    ds = ps.open(tmp_path / "a.zarr")
    assert "unknown amount" in str(ps.plan(ds, batch_size=4, memory="64MiB", measure=0))
    assert ps.plan(ds, batch_size=4, memory="64MiB", measure=5).read_bytes == stored
    with ps.Loader(ds, batch_size=4, memory="64MiB", output="numpy") as loader:
        assert loader.stats().codecs == "zstd"


def test_a_short_measurement_tells_the_time(tmp_path: Path) -> None:
    told = ps.plan(npy(tmp_path), batch_size=4, memory="64MiB", measure=0.2)
    assert told.seconds is not None
    assert told.seconds > 0
    assert "measured here just now" in str(told)
    unmeasured = ps.plan(npy(tmp_path), batch_size=4, memory="64MiB", measure=0)
    assert unmeasured.seconds is None
    assert "measured" not in str(unmeasured)


def test_a_trial_of_a_whole_epoch_reads_it_once(tmp_path: Path) -> None:
    with ps.Loader(tar(tmp_path), batch_size=5, shuffle=True, memory="64MiB", output="numpy") as loader:
        trial = try_out(loader, 60)
    assert 0 < trial.samples <= ROWS
    assert trial.epoch_bytes is not None
    assert ROWS * 1920 <= trial.epoch_bytes < ROWS * 2 * 1920


def test_a_trial_ends_in_time_and_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Handle.read_into

    def slowly(handle: Handle, offset: int, *targets: np.ndarray) -> None:
        time.sleep(0.005)
        quick(handle, offset, *targets)

    monkeypatch.setattr(Handle, "read_into", slowly)
    np.save(tmp_path / "slow.npy", np.zeros((200, 10_000)))
    options: dict[str, Any] = {"batch_size": 1, "memory": "64MiB", "threads": 1, "output": "numpy"}
    with ps.Loader(ps.open(tmp_path / "slow.npy"), **options, shuffle=True) as loader:
        trial = try_out(loader, 0.05)
        assert trial.epoch_bytes is None
        assert 0 < trial.bytes_read < 200 * 80_000
        assert sum(len(batch["data"]) for batch in loader) == 200, "the loader is still good"


def test_a_trial_raises_what_reading_raises(tmp_path: Path) -> None:
    ds = npy(tmp_path)
    (tmp_path / "a.npy").write_bytes(b"another file")
    with pytest.raises(ps.errors.PenstockError):
        ps.plan(ds, batch_size=4, memory="64MiB", measure=0.1)


def test_epoch_seconds() -> None:
    assert Trial(0.5, 10, 1000).epoch_seconds(100, 4000) == 2
    assert Trial(0.5, 10, 0).epoch_seconds(100, 4000) == 5
    assert Trial(0.5, 0, 0).epoch_seconds(100, 0) is None


def test_what_came_before_the_rate_settled_is_counted_with_its_own_time() -> None:
    slow_at_first = (3.0, 20, 2000)
    assert Trial(0.5, 10, 1000, slow_at_first).epoch_seconds(100, 4000) == 3 + 1
    assert Trial(0.5, 10, 0, slow_at_first).epoch_seconds(100, 4000) == 3 + 4
    assert Trial(0.5, 10, 1000, slow_at_first, epoch_bytes=3000).epoch_seconds(30, 3000) == 3.5  # it was the whole


def test_ranks_share_what_is_read(tmp_path: Path) -> None:
    whole, shared = (
        ps.plan(npy(tmp_path), batch_size=4, memory="64MiB", measure=0, world_size=world) for world in (1, 4)
    )
    assert shared.read_bytes == whole.read_bytes // 4
    assert "each of 4 ranks" in str(shared)


def test_columns_are_all_that_counts(tmp_path: Path) -> None:
    ds = ps.join(betas=npy(tmp_path), label=np.arange(ROWS))
    told = ps.plan(ds, batch_size=4, memory="64MiB", measure=0, columns=("label", "__index__"))
    assert (told.contents.sample_bytes, told.read_bytes) == (8, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 8}, "h5repack -l betas:CHUNK=1x10x12x8"),
        ({"window": 8}, "--like plan makes such a copy, once: some time to read, and what writing"),
        ({"window": 8, "measure": 0.05}, "--like plan makes such a copy, once: about"),
        ({"memory": "5600kB", "window": 8}, "would let the threads read as far ahead as helps"),
    ],
)
def test_advice_about_chunks(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    ds = hdf5(tmp_path, chunks=(8, 10, 12, 8), compression="gzip")
    assert said in " ".join(ps.plan(ds, batch_size=4, **{"memory": "64MiB", "measure": 0, **options}).advice)


def test_advice_to_keep_and_to_mask(tmp_path: Path) -> None:
    assert any(said.startswith("Keep the files") for said in ps.plan(npy(tmp_path), batch_size=4, measure=0).advice)
    large = ps.plan(WORKED, batch_size=4, memory="2GiB").advice
    assert any("only part of each 'betas'" in said for said in large)


def test_an_ample_budget_is_enough_and_no_more() -> None:
    short = ps.plan(WORKED, batch_size=4, memory="100MB")
    ample = ps.plan(WORKED, batch_size=4, memory=short.ample_bytes)
    assert short.plan.slots < ample.plan.slots == ample.plan.slots_wanted
    assert ample.peak_bytes == short.ample_bytes
    assert any("as far ahead as helps" in said for said in short.advice)
    assert not any("as far ahead as helps" in said for said in ample.advice)


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ({"a": ((3, 0), "f4")}, "no axis below 1"),
        ({"a": ((), "f4")}, "expected the rows first"),
        ({"a": ((3,), "flot32")}, "is not a dtype"),
        ({"a": ((3,), "f4"), "b": ((4,), "f4")}, "the same first axis"),
        ({}, "no shapes"),
        ({"a": ((3,), "S0")}, "no bytes"),
    ],
)
def test_shapes_that_cannot_be_meant(shapes: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ps.plan(shapes, batch_size=2)


def test_shapes_alone_know_no_columns_and_budgets_are_laws() -> None:
    with pytest.raises(ConfigError, match="columns: needs files"):
        ps.plan(WORKED, batch_size=2, columns=("betas",))
    with pytest.raises(BudgetExceeded, match="the smallest that works is"):
        ps.plan(WORKED, batch_size=32, memory="100MB")


# What loaders held at their peak above the process with its libraries imported, in MB: workers, a batch, the peak.
# Volumes with pictures (HDF5 as it lies, and gzip), then rows of 1 to 8 MB in front of a step of 150 ms.
TORCH_MEASURED = [
    (0, 305, 931), (1, 305, 999), (2, 305, 1938), (2, 305, 1660), (4, 305, 3570), (4, 305, 2951),
    (1, 32.8, 111.6), (2, 16.4, 136.3), (4, 16.4, 232.3), (2, 6.55, 68.5),
]  # fmt: skip
# Workers, a batch, a stored sample, the shuffle buffer, the peak. MindEye's shards (JPEG to float32), then npy in tars.
WEBDATASET_MEASURED = [
    (1, 72.4, 0.145, 500, 440), (2, 72.4, 0.145, 500, 848), (1, 679, 0.145, 500, 3526), (2, 679, 0.145, 500, 6094),
    (2, 679, 0.145, 500, 5262), (1, 6.55, 0.205, 100, 81.0), (2, 6.55, 0.205, 100, 146.2), (2, 16.4, 1.024, 50, 281.4),
    (4, 16.4, 1.024, 50, 509.5),
]  # fmt: skip


@pytest.mark.parametrize(("workers", "batch", "measured"), TORCH_MEASURED)
def test_dataloader_within_a_quarter_of_what_it_took(workers: int, batch: float, measured: float) -> None:
    foretold, _ = rivals(LoadingJob(int(batch * 1e6), 9.5e6, 750), Habits(workers))
    assert foretold.peak_bytes == pytest.approx(measured * 1e6, rel=0.25)


@pytest.mark.parametrize(("workers", "batch", "stored", "buffer", "measured"), WEBDATASET_MEASURED)
def test_webdataset_within_a_quarter_of_what_it_took(
    workers: int, batch: float, stored: float, buffer: int, measured: float
) -> None:
    _, foretold = rivals(LoadingJob(int(batch * 1e6), stored * 1e6, 9000), Habits(workers, buffer))
    assert foretold.peak_bytes == pytest.approx(measured * 1e6, rel=0.25)


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.0312, "0.031 s"), (14.2, "14 s"), (150, "2.5 min"), (10_000, "2.8 h")]
)
def test_seconds_as_told(seconds: float, told: str) -> None:
    assert format_seconds(seconds) == told


@pytest.mark.parametrize(
    ("rates", "settled"),
    [
        ([5, 5, 5, 5], True),
        ([9, 2, 5, 5], True),  # what comes first does not count
        ([5, 5, 5, 7], False),
        ([5, 5, 0, 5], False),
        ([5, 5, 5, 0], False),
    ],
)
def test_a_trial_ends_early_where_the_rate_has_settled(rates: list[int], settled: bool) -> None:
    looks, passed = [(0.0, 0, 0)], 0
    for number in range(20):
        passed += rates[number // 5]
        looks.append((0.02 * (number + 1), 0, passed))
    assert is_settled(looks) == settled
    assert is_settled([(time, passed, 0) for time, _, passed in looks]) == settled
    assert is_over(looks, fresh=10, seconds=1.0) == settled
    assert not is_over(looks[:10], fresh=10, seconds=1.0)  # too early to say


@pytest.mark.parametrize(
    ("fresh", "seconds"),
    [(0, 0.26), (100, 0.7), (200, 1.2), (300, 1.7), (390, 2.15), (2000, 0.26)],  # 2000 would take 10 s
)
def test_a_trial_goes_on_until_memory_is_no_longer_fresh(fresh: int, seconds: float) -> None:
    looks = [(0.02 * number, 4 * number, 4000 * number) for number in range(200)]
    ends = next(number for number in range(1, 200) if is_over(looks[:number], fresh, seconds=1.0))
    assert looks[ends - 1][0] == pytest.approx(seconds, abs=0.025)


def test_a_trial_that_never_settles_ends() -> None:
    looks = [(0.02 * number, number * number, 0) for number in range(200)]
    assert [is_over(looks[:number], 30, seconds=1.0) for number in (40, 55)] == [False, True]
    assert [is_over([(0.0, 0, 0), (passed, 0, 0)], 30, seconds=1.0) for passed in (4.9, 5.1)] == [False, True]


def test_a_few_large_reads_are_no_rate_yet() -> None:
    looks = [(0.02 * number, 0, 1000 * (number // 5)) for number in range(21)]
    assert not is_settled(looks)


def test_where_no_batch_is_whole_yet_bytes_of_the_second_half_count() -> None:
    looks = [(0.0, 0, 0), (0.5, 0, 0), (1.0, 0, 500)]
    assert _summed_up(looks, 8, None) == Trial(0.5, 0, 500, (0.5, 0, 0))
    assert _summed_up([(0.0, 0, 0), (0.5, 8, 400), (1.0, 8, 500)], 8, None) == Trial(1.0, 8, 500)
    filled = [(0.0, 0, 0), (0.2, 9, 200), (0.5, 20, 400), (0.7, 31, 450), (1.0, 40, 500)]
    assert _summed_up(filled, 8, None) == Trial(0.8, 31, 300, (0.2, 9, 200))
    assert _summed_up(filled, 30, None) == Trial(1.0 - 0.7, 9, 50, (0.7, 31, 450))  # not what came before
    assert _summed_up(filled, 99, None) == Trial(0.5, 20, 100, (0.5, 20, 400))


def test_a_trial_counts_rows_before_a_batch_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "JOIN_BELOW_BYTES", 0)
    monkeypatch.setattr(planning, "SPLIT_ABOVE_BYTES", 0)  # eight reads a batch

    def slow(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(0.03)
        return batch

    np.save(tmp_path / "a.npy", np.zeros((400, 100)))
    ds = ps.open(tmp_path / "a.npy").map(slow)
    with ps.Loader(ds, batch_size=8, memory="64MiB", output="numpy", threads=1) as loader:
        assert loader.plan.rows_per_read == 1
        tried = try_out(loader, 0.1)
        assert 0 < tried.samples < 8
        assert abs(tried.bytes_read - tried.samples * 800) <= 800  # one may be done between the two looks


def test_bytes_of_a_store_in_blocks_whose_files_nobody_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zarr = pytest.importorskip("zarr")
    values = RNG.normal(size=(400, 30, 20)).astype(np.float32)
    zarr.create_array(str(tmp_path / "a.zarr"), data=values, chunks=(4, 30, 20))

    def slow(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(0.02)
        return batch

    ds = ps.open(tmp_path / "a.zarr").map(slow)
    told = ps.plan(ds, batch_size=8, memory="64MiB", threads=2, measure=0.3)
    stored = sum(path.stat().st_size for path in (tmp_path / "a.zarr").rglob("*") if path.is_file())
    assert told.seconds is not None
    assert told.read_bytes == pytest.approx(stored, rel=0.03)
