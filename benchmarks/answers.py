"""python -m benchmarks.answers [--data FOLDER]: how long ``penstock inspect`` and ``penstock plan`` take to answer.

On 40 files of 700,000 chunks (3 GB), and on a folder of 1,000,000 pictures (4 GB, a million inodes), for the first time
and again. As root, the page cache is dropped before each first time.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from benchmarks import data, results

FILES, ROWS, ROWS_A_CHUNK = 40, 750, 15
VOLUME = (10, 14, 100)
FOLDERS = PICTURES_EACH = 1000
COMMANDS = (["inspect"], ["plan", "--memory", "2GiB"])


def many_chunks(root: Path) -> Path:
    """Sessions of 700,000 chunks each, of 30 bytes: as much index as real ones have, and little else."""

    def make(folder: Path) -> None:
        first = folder / "session01.hdf5"
        with h5py.File(first, "w") as file:
            betas = file.create_dataset("betas", (ROWS, *VOLUME), "i2", chunks=(ROWS_A_CHUNK, 1, 1, 1))
            betas[...] = np.arange(betas.size).reshape(betas.shape).astype(np.int16)
        for number in range(2, FILES + 1):
            shutil.copy(first, folder / f"session{number:02d}.hdf5")

    return data.once(root / "many-chunks", make)


def many_files(root: Path) -> Path:
    def make(folder: Path) -> None:
        written = io.BytesIO()
        Image.new("RGB", (32, 32)).save(written, "JPEG")
        for number in range(FOLDERS):
            inner = folder / f"class{number:04d}"
            inner.mkdir()
            for picture in range(PICTURES_EACH):
                (inner / f"{picture:04d}.jpg").write_bytes(written.getvalue())

    return data.once(root / "many-files", make)


def drop_page_cache() -> str:
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return "page cache warm"
    return "page cache dropped"


def seconds(command: list[str], path: str, cache: str) -> float:
    began = time.perf_counter()
    env = os.environ | {"PENSTOCK_CACHE": cache}
    subprocess.run([sys.executable, "-m", "penstock", *command, path], env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def answers(label: str, path: str) -> Iterator[dict[str, Any]]:
    for command in COMMANDS:
        with tempfile.TemporaryDirectory() as cache:
            how = drop_page_cache()
            first = seconds(command, path, cache)
            again = min(seconds(command, path, cache) for _ in range(3))
        yield {"label": f"{command[0]}, {label} ({how})", "first_s": first, "again_s": again}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answers", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent / "data")
    parser.add_argument("--only", choices=["chunks", "files"])
    args = parser.parse_args()
    made: dict[str, tuple[str, Callable[[Path], Path], str]] = {
        "chunks": (f"{FILES} files x 700,000 chunks", many_chunks, "*.hdf5"),
        "files": ("1,000,000 files", many_files, ""),
    }
    rows = [
        row
        for which, (label, make, pattern) in made.items()
        if args.only in (None, which)
        for row in answers(label, str(make(args.data) / pattern))
    ]
    command = "python -m benchmarks.answers" + (f" --only {args.only}" if args.only else "")
    results.write("answers", command, rows)
    print(results.table(results.read("answers")))


if __name__ == "__main__":
    main()
