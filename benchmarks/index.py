"""python -m benchmarks.index [--data FOLDER]: forty files of 699,192 chunks, opened for the first time and again.

The forty are links to one file, so that they take one file's space; each is walked through and indexed by itself.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import h5py

from benchmarks import results
from benchmarks.hdf5 import make_voxel_major
from penstock.base.machine import held_bytes

FILES, WALKED = 40, 4


def main() -> None:
    import penstock as ps

    parser = argparse.ArgumentParser(prog="python -m benchmarks.index", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent / "data")
    session = make_voxel_major(parser.parse_args().data) / "betas_session01.hdf5"
    with tempfile.TemporaryDirectory(dir=session.parent) as folder:
        paths = [Path(folder, f"betas_session{number:02d}.hdf5") for number in range(1, FILES + 1)]
        for path in paths:
            os.link(session, path)
        began = time.perf_counter()
        for path in paths[:WALKED]:
            with h5py.File(path) as file:
                file["betas"].id.chunk_iter(lambda chunk: None)
        bare = (time.perf_counter() - began) / WALKED
        first = _seconds(lambda: ps.open(paths[:WALKED], index_dir=folder)) / WALKED
        ps.open(paths, index_dir=folder)
        before = held_bytes()
        again = _seconds(lambda: ps.open(paths, index_dir=folder))
        held = max(0, held_bytes() - before)
    rows = [
        {"label": "h5py, a walk through the chunk index", "per_file_s": bare},
        {"label": "penstock, first opening", "per_file_s": first},
        {"label": "penstock, again, all 40 files", "per_file_s": again / FILES, "in_all_s": again, "held_bytes": held},
    ]
    results.write("index", "python -m benchmarks.index", rows)
    print(results.table(results.read("index")))


def _seconds(do: object) -> float:
    began = time.perf_counter()
    do()  # type: ignore[operator]
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
