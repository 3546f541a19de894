"""What holds a loader up, told right where it is known: each situation is made, not found."""

import io
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.files.handles import Handle
from penstock.loader.stats import Stats
from penstock.read.chunk_decode import Decoding

ROWS = 24
SLOW_S = 0.03  # long beside what starting a thread takes on a busy machine


@pytest.fixture(autouse=True)
def one_read_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are many reads, and starting up does not count."""
    monkeypatch.setattr("penstock.loader.read_sizes.JOIN_BELOW_BYTES", 0)


@pytest.fixture
def gzipped(tmp_path: Path) -> ps.Dataset:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        values = np.arange(ROWS * 20_000, dtype=np.int32).reshape(ROWS, 20_000)
        file.create_dataset("betas", data=values, chunks=(1, 20_000), compression="gzip", shuffle=True)
    return ps.open(tmp_path / "a.h5")


@pytest.fixture
def plain(tmp_path: Path) -> ps.Dataset:
    np.save(tmp_path / "a.npy", np.zeros((ROWS, 20_000), np.int32))
    return ps.open(tmp_path / "a.npy")


def slow(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    quick = getattr(owner, name)

    def later(*args: Any, **options: Any) -> Any:
        time.sleep(SLOW_S)
        return quick(*args, **options)

    monkeypatch.setattr(owner, name, later)


def epoch(ds: ps.Dataset, step_s: float = 0, **options: Any) -> Stats:
    given = {"batch_size": 2, "memory": "64MiB", "threads": 2, "output": "numpy", **options}
    with ps.Loader(ds, **given) as loader:
        for _ in loader:
            time.sleep(step_s)
        return loader.stats()


def test_slow_storage(plain: ps.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, Handle, "fill")
    stats = epoch(plain)
    assert "waiting for files: faster storage" in stats.bottleneck
    assert stats.file_seconds > stats.decoding_seconds
    assert stats.file_seconds >= len(range(0, ROWS, 2)) * SLOW_S


def test_slow_codec(gzipped: ps.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loader.runtime.cores", lambda: 2)  # a codec that sleeps looks like one that waits
    slow(monkeypatch, Decoding, "_decode")
    stats = epoch(gzipped)
    assert "decoding and converting (shuffle, deflate): more cores, a quicker codec" in stats.bottleneck
    assert stats.decoding_seconds >= ROWS * SLOW_S


def test_slow_function(plain: ps.Dataset) -> None:
    def slowly(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(SLOW_S)
        return arrays

    stats = epoch(plain.map(slowly))
    assert "in your own function" in stats.bottleneck
    assert stats.function_seconds >= len(range(0, ROWS, 2)) * SLOW_S


def test_threads_that_wait_for_the_lock_are_told_from_those_that_decode(plain: ps.Dataset) -> None:
    measured = replace(
        epoch(plain), seconds=10.0, waited_for_data=8.0, waited_for_first=0.1, threads=8, threads_wanted=8, cores=16,
        readers_busy=78.0, file_seconds=4.0, function_seconds=0.0, bytes_read=16 * 10**9, processes=0,
    )  # fmt: skip
    assert "waiting for the interpreter's lock" in replace(measured, computing_seconds=20.0).bottleneck
    assert "processes=2 or more would help" in replace(measured, computing_seconds=20.0).bottleneck
    assert "decoding and converting" in replace(measured, computing_seconds=70.0).bottleneck
    waits = replace(measured, computing_seconds=5.0, file_seconds=70.0, bytes_read=10**9)
    assert "waiting for files" in waits.bottleneck


def test_slow_decoder(tmp_path: Path) -> None:
    def slowly(data: bytes) -> np.ndarray:
        time.sleep(SLOW_S / 2)
        return np.frombuffer(data, np.uint8)

    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for row in range(ROWS):
            member = tarfile.TarInfo(f"{row:02d}.x")
            member.size = 10
            archive.addfile(member, io.BytesIO(bytes(10)))
    stats = epoch(ps.open(tmp_path / "a.tar", decoders={"x": slowly}, index_dir=False))
    assert "in your own function" in stats.bottleneck
    assert stats.function_seconds >= ROWS * SLOW_S / 2


def test_slow_training_step(plain: ps.Dataset) -> None:
    stats = epoch(plain, step_s=2 * SLOW_S, batch_size=1)
    told = replace(stats, waited_for_data=stats.waited_for_data - stats.waited_for_first)  # which a busy machine delays
    assert "your training step takes 9" in told.bottleneck or "your training step takes 100%" in told.bottleneck


def test_starving_budget(plain: ps.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, Handle, "fill")
    with ps.Loader(plain, batch_size=8, memory="64MiB", threads=8, output="numpy") as ample:
        smallest = ample.plan.smallest_bytes
    stats = epoch(plain, batch_size=8, threads=8, memory=smallest)
    assert "leaves room for 1 reading thread of 8; a larger one would let all read" in stats.bottleneck


def told(**changed: Any) -> Stats:
    usual = {
        "epoch": 0, "batches": 9, "samples": 90, "bytes": 900, "seconds": 10.0, "waited_for_data": 5.0,
        "readers_busy": 4.0, "readers_waited": 3.0, "threads": 2, "short_of_slots": False, "peak_bytes": 1,
        "planned_bytes": 1, "budget_bytes": 2**20, "kept_batches": 0, "threads_wanted": 2,
    }  # fmt: skip
    return Stats(**{**usual, **changed})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"batches": 0}, "nothing was read yet"),
        ({"waited_for_data": 0.1}, "your training step takes 99% of the time"),
        ({}, "waits 50% of the time for data although its 2 reading threads are only 20% busy"),
        ({"waited_for_first": 4.0}, "most of it for the first batch: once that is there, reading keeps up"),
        (
            {"waited_for_first": 4.0, "function_seconds": 3.0},
            "most of it for the first batch: its 2 reading threads spend 75% of their time in your own function",
        ),
        ({"function_seconds": 3.0}, "for data: its 2 reading threads spend 75% of their time in your own function"),
        ({"function_seconds": 1.0}, "although its 2 reading threads are only 20% busy"),
        ({"short_of_slots": True}, "a larger memory budget than 1.00 MiB would let them run further ahead"),
        ({"threads": 1, "threads_wanted": 4, "readers_busy": 9.0}, "1 reading thread of 4"),
        ({"readers_busy": 18.0, "file_seconds": 16.0}, "90% busy, 89% of that waiting for files"),
        (
            {"readers_busy": 18.0, "file_seconds": 16.0, "computing_seconds": 17.0},
            "89% of that copying from files that are in memory already",
        ),
        ({"readers_busy": 18.0, "function_seconds": 12.0}, "67% of that in your own function"),
        ({"readers_busy": 18.0, "codecs": "zstd"}, "100% of that decoding and converting (zstd)"),
        ({"threads": 1, "threads_wanted": 1, "readers_busy": 9.0}, "1 reading thread is 90% busy"),
    ],
)
def test_sentences(changed: dict[str, Any], said: str) -> None:
    assert said in told(**changed).bottleneck


def test_the_rate_without_waiting() -> None:
    assert told().samples_per_s_at_most == 18


def test_several_datasets_are_summed(gzipped: ps.Dataset, plain: ps.Dataset) -> None:
    def slowly(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(SLOW_S)
        return arrays

    options = {"batch_size": 2, "memory": "64MiB", "threads": 2, "output": "numpy"}
    alone = epoch(gzipped)
    parts = {"one": gzipped, "two": plain.map(slowly)}
    with ps.MultiLoader(parts, mode="together", **options) as loader:
        batches = sum(len(step) for step in loader)
        stats = loader.stats()
    assert (stats.batches, stats.samples, batches) == (ROWS // 2, 2 * ROWS, ROWS)
    assert stats.bytes == 2 * alone.bytes
    assert (stats.chunks_read, stats.codecs) == (alone.chunks_read, "shuffle, deflate")
    assert stats.bytes_read > alone.bytes_read
    assert stats.function_seconds >= len(range(0, ROWS, 2)) * SLOW_S


def test_the_report_has_what_the_statistics_count(plain: ps.Dataset) -> None:
    report = replace(epoch(plain), restarts=2, chunks_filled=3).report
    assert (report.restarts, report.chunks_filled) == (2, 3)
    assert "reader processes died 2 times" in str(report)
    assert "3 chunks that were never written" in str(report)
