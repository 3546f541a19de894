"""Finding everything that cannot be read."""

import os
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.loader.verify import verify


def gzipped(path: Path, broken: list[tuple[int, ...]], rows: int = 24, chunk: tuple[int, ...] = (8, 3, 5)) -> Path:
    """Two fields in gzip chunks, of which those named (by their corner) of the first field are overwritten."""
    rng = np.random.default_rng(3)
    with h5py.File(path, "w") as file:
        for name in ("betas", "other"):
            values = rng.integers(-99, 99, (rows, 6, 10)).astype(np.int16)
            file.create_dataset(name, data=values, chunks=chunk, compression="gzip")
        chunks = [file["betas"].id.get_chunk_info_by_coord(corner) for corner in broken]
    with path.open("r+b") as file:
        for chunk_info in chunks:
            file.seek(chunk_info.byte_offset + 4)
            file.write(b"\xff" * (chunk_info.size - 8))
    return path


def test_nothing_wrong(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    ds = ps.open(gzipped(tmp_path / "a.h5", []))
    verdict = verify(ds, progress=lambda more, bad: seen.append((more, bad)))
    assert (verdict.faults, verdict.unreadable) == ((), 0)
    assert sum(more for more, _ in seen) == 48


def test_every_broken_chunk_is_named(tmp_path: Path) -> None:
    broken = [(0, 0, 0), (16, 0, 5), (16, 3, 5)]
    verdict = verify(ps.open(gzipped(tmp_path / "a.h5", broken)))
    assert verdict.unreadable == 16, "the rows of two blocks of 8, of one field"
    assert {fault.field for fault in verdict.faults} == {"betas"}
    told = [str(fault) for fault in verdict.faults]
    assert len(told) == 3
    for corner in broken:
        assert sum(f"chunk {corner}" in line for line in told) == 1, told
    assert "8 rows from 16 to 23" in told[-1]


def test_one_field_does_not_hide_another(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for number in range(6):
            for name in ("one.npy", "two.npy"):
                written = BytesIO()
                np.save(written, np.full(9, number))
                data = bytearray(written.getvalue())
                if number == 2:
                    data[:6] = b"broken"
                member = tarfile.TarInfo(f"{number:03d}.{name}")
                member.size = len(data)
                file.addfile(member, BytesIO(data))
    verdict = verify(ps.open(tmp_path / "a.tar"))
    assert [(fault.field, fault.rows) for fault in verdict.faults] == [("one.npy", (2,)), ("two.npy", (2,))]


def test_little_memory_unless_more_is_needed(tmp_path: Path) -> None:
    ds = ps.open(gzipped(tmp_path / "a.h5", []))
    with pytest.raises(ps.errors.BudgetExceeded):
        verify(ds, memory="1MiB")
    assert verify(ds, memory="64MiB").unreadable == 0


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = str(gzipped(tmp_path / "a.h5", [])), str(gzipped(tmp_path / "b.h5", [(8, 3, 0)]))
    assert main(["inspect", good, "--deep"]) == 0
    out, err = capsys.readouterr()
    assert "verified: 48 values (one field of one sample each), all can be read" in out
    assert "reading: 100%" in err
    assert main(["inspect", good, bad, "--deep"]) == 1
    out, err = capsys.readouterr()
    assert "cannot be read: betas, 8 rows from 32 to 39: " in out
    assert "b.h5" in out
    assert "verified: 96 values (one field of one sample each), 8 cannot be read" in out
    assert main(["inspect", good, str(tmp_path / "gone.h5"), "--deep"]) == 1
    assert "gone.h5: no such file" in capsys.readouterr().out
    assert main(["inspect", good, "--deep", "--memory", "1MiB"]) == 2
    assert "the smallest that works is" in capsys.readouterr().err


def test_chunks_that_were_never_written_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(str(tmp_path / "a.zarr"), shape=(6, 40), chunks=(1, 40), dtype="i2")
    array[:4] = 1
    assert verify(ps.open(tmp_path / "a.zarr", allow_fill=True)).filled == 2
    assert main(["inspect", str(tmp_path / "a.zarr"), "--deep", "--allow-fill"]) == 0
    assert "never written: 2 chunks" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "a.zarr"), "--deep"]) == 1
    assert "2 cannot be read" in capsys.readouterr().out


def test_ctrl_c_ends_it_at_once_and_tidily(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3_000_000, 2), np.int8))
    code = (
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from penstock.loader import verify; from penstock.cli.main import main\n"
        "verify.BATCH_BYTES = 2\n"
        "sys.exit(main(['inspect', sys.argv[1], '--deep']))"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "a.npy")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=30)
    assert child.returncode == 130
    assert told.endswith(b"\npenstock inspect: interrupted\n")
    assert b"Traceback" not in told


class Threads(ThreadPoolExecutor):
    """Somebody else's engine; counts what it was given."""

    given = 0

    def submit(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.given += 1
        return super().submit(*args, **kwargs)


@pytest.mark.parametrize("mode", ["executor", pytest.param("workers", marks=pytest.mark.slow)])
def test_any_engine_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr("penstock.loader.verify.PIECE_BYTES", 1000)
    broken = [(0, 0, 0), (16, 0, 5), (16, 3, 5), (32, 3, 0)]
    gzipped(tmp_path / "a.h5", broken, rows=48)
    alone, seen = verify(tmp_path / "a.h5"), []
    with Threads(2) as engine:
        how = {"executor": engine, "workers": 2} if mode == "executor" else {"workers": 2}
        found = verify(tmp_path / "a.h5", progress=lambda more, bad: seen.append((more, bad)), **how)
    assert found == alone
    assert found.unreadable == 24
    assert (sum(more for more, _ in seen), seen[-1][1]) == (96, 24)
    assert engine.given == (12 if mode == "executor" else 0), "blocks of 8 rows, of two fields"


def test_any_engine_compares_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.files.manifest.BLOCK_BYTES", 4096)
    monkeypatch.setattr("penstock.loader.verify_files.BLOCK_BYTES", 4096)
    monkeypatch.setattr("penstock.loader.verify_files.PIECE_BYTES", 8192)
    for name in "abc":
        np.save(tmp_path / f"{name}.npy", np.arange(5000))
    ps.write_manifest(str(tmp_path / "*.npy"))
    with (tmp_path / "b.npy").open("r+b") as file:
        file.seek(20_000)
        file.write(b"x")
    (tmp_path / "c.npy").write_bytes(b"short")
    manifest = tmp_path / "penstock-manifest.json"
    alone = verify([tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "c.npy"], manifest=manifest)
    with Threads(2) as engine:
        found = verify(
            [tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "c.npy"], manifest=manifest, executor=engine, workers=2
        )
    assert found == alone
    assert [(os.path.basename(each.file), each.begin) for each in found.damages] == [("b.npy", 16384), ("c.npy", 0)]
    assert engine.given > 6


def test_workers_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(gzipped(tmp_path / "a.h5", [(8, 0, 0)]))
    assert main(["verify", path, "--workers", "1"]) == 1
    assert main(["inspect", path, "--deep", "--workers", "1"]) == 1
    assert capsys.readouterr().out.count("cannot be read: betas, 8 rows from 8 to 15") == 2
    with pytest.raises(SystemExit):
        main(["verify", path, "--workers", "none"])
