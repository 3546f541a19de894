"""Data of ``benchmarks.small_machine``: about 3.5 GB, made in two minutes on first use."""

import os
import subprocess
from pathlib import Path

import h5py
import numpy as np

from benchmarks import data, shards

SESSIONS, TRIALS, STIMULI = 6, 40, 100
GUESSED_ROWS = 94
RECORDS, WIDTH = 200_000, 1024
FILES, ROWS_PER_FILE = 1000, 20


def make_all(root: Path, grain: str | None) -> dict[str, str]:
    """Folders and files by name; read once, so that they are in memory."""
    found = {
        "volumes": data.once(root / "small-volumes", _volumes),
        "shards": shards.make_shards(root),
        "vectors": data.once(root / "small-records", _records) / "vectors.npy",
        "rows": root / "small-records" / "rows.npy",
        "files": data.once(root / "small-files", _files),
        "many shards": data.once(root / "small-shards", _shards),
    }
    records = root / "shards-records"
    if grain and not records.exists():
        code = (
            f"from pathlib import Path; from benchmarks import shards; shards.records(Path({str(found['shards'])!r}))"
        )
        project = Path(__file__).resolve().parent.parent
        env = {**os.environ, "PYTHONPATH": str(project / "src")}
        subprocess.run([grain, "-c", code], check=True, cwd=project, env=env)
    for path in [*found.values(), records]:
        _read(path)
    return {name: str(path) for name, path in {**found, "records of shards": records}.items()}


def _read(path: Path) -> None:
    for each in [path] if path.is_file() else path.rglob("*"):
        if each.is_file():
            with open(each, "rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def _volumes(folder: Path) -> None:
    rng = np.random.default_rng(1)
    (folder / "contiguous").mkdir()
    some = np.stack([data.volume(rng) for _ in range(TRIALS)])
    for session in range(SESSIONS):
        with h5py.File(folder / "contiguous" / f"betas_session{session:02d}.hdf5", "w") as file:
            file["betas"] = np.roll(some, session, axis=0)
    with h5py.File(folder / "nsd_stimuli.hdf5", "w") as file:
        file["imgBrick"] = rng.integers(0, 256, (STIMULI, data.IMAGE, data.IMAGE, 3), np.uint8)
    np.save(folder / "stimulus_of_trial.npy", rng.integers(0, STIMULI, SESSIONS * TRIALS))
    with h5py.File(folder / "guessed.hdf5", "w") as file:
        shape = (GUESSED_ROWS, *data.VOLUME)
        chunks = (47, 10, 10, 7)  # what h5py guesses for a session of 750
        stored = file.create_dataset("betas", shape, "i2", chunks=chunks, compression="gzip", compression_opts=4)
        for begin in range(0, GUESSED_ROWS, 47):
            stored[begin : begin + 47] = np.concatenate([some, some])[: min(47, GUESSED_ROWS - begin)]


def _records(folder: Path) -> None:
    rng = np.random.default_rng(2)
    np.save(folder / "vectors.npy", rng.standard_normal((RECORDS, WIDTH), dtype=np.float32))
    np.save(folder / "rows.npy", rng.standard_normal((RECORDS, 256), dtype=np.float32))


def _files(folder: Path) -> None:
    rng = np.random.default_rng(3)
    for number in range(FILES):
        with h5py.File(folder / f"part{number:04d}.h5", "w") as file:
            file["x"] = rng.random((ROWS_PER_FILE, 256), np.float32)
            file["y"] = np.arange(ROWS_PER_FILE) + number * ROWS_PER_FILE


def _shards(folder: Path) -> None:
    from penstock.webdataset import ShardWriter

    rng = np.random.default_rng(4)
    with ShardWriter(str(folder / "part-%04d.tar"), maxcount=ROWS_PER_FILE) as writer:
        for number in range(FILES * ROWS_PER_FILE):
            writer.write({"__key__": f"{number:06d}", "x.npy": rng.random(256, np.float32), "y.cls": number})
