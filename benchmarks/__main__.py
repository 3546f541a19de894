"""python -m benchmarks [NAME …] [--rounds 3] [--data FOLDER]; without a name, all: volumes-gzip, records, hdf5-zstd …

Makes its data on first use (about 16 GB for all), measures, prints a table, and keeps the numbers under
benchmarks/results; `make figures` then renews the pages that show them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks import data, folders, hdf5, lmdb, nsd, records, results, several, shards, tiledb, volumes, zarr_stores
from benchmarks.runner import Contestant, side_by_side

HERE = Path(__file__).resolve().parent

BENCHMARKS: dict[str, Callable[[Path], list[Contestant]]] = {
    "volumes-contiguous": lambda root: volumes.contestants(data.volumes(root), "contiguous"),
    "volumes-gzip": lambda root: volumes.contestants(data.volumes(root), "gzip"),
    "records": lambda root: records.contestants(data.records(root)),
    **hdf5.BENCHMARKS,
    **lmdb.BENCHMARKS,
    **tiledb.BENCHMARKS,
    **folders.BENCHMARKS,
    **nsd.BENCHMARKS,
    **shards.BENCHMARKS,
    "several": lambda root: several.contestants(several.subjects(root)),
    **zarr_stores.BENCHMARKS,
}


def warm(root: Path) -> None:
    """Read everything once, so that all start from the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=HERE / "data")
    args = parser.parse_args()
    for name in args.names or BENCHMARKS:
        contestants = BENCHMARKS[name](args.data)
        warm(args.data / (name if (args.data / name).exists() else name.split("-")[0]))
        found = side_by_side(contestants, args.rounds)
        results.write(name, f"python -m benchmarks {name}", [vars(each) for each in found])
        print(f"\n{name} ({results.machine()})\n\n{results.table(results.read(name))}")


if __name__ == "__main__":
    main()
