"""python -m benchmarks [NAME …] [--rounds 3] [--data FOLDER]; without a name, all: volumes-gzip, records, hdf5-zstd …

Makes its data on first use (about 16 GB for all), measures, prints a table, and keeps it under benchmarks/results.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

from benchmarks import data, folders, hdf5, lmdb, nsd, records, several, shards, tiledb, volumes, zarr_stores
from benchmarks.runner import Contestant, Result, side_by_side
from penstock.base.machine import cores
from penstock.base.sizes import format_size

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


def table(results: list[Result]) -> str:
    """Markdown, with each rate as a ratio to the best of the others."""
    best = max(result.rate for result in results if not result.label.startswith("penstock"))
    lines = ["| | samples/s | times the best other | peak memory | runs |", "|---|---:|---:|---:|---|"]
    for result in results:
        runs = ", ".join(map(_rate, result.rates))
        peak = format_size(result.peak_bytes)
        lines.append(f"| {result.label} | {_rate(result.rate)} | {result.rate / best:.2f} | {peak} | {runs} |")
    return "\n".join(lines)


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f}" if samples_per_s >= 20 else f"{samples_per_s:.2f}"


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
    results_folder = HERE / "results"
    results_folder.mkdir(exist_ok=True)
    for name in args.names or BENCHMARKS:
        contestants = BENCHMARKS[name](args.data)
        warm(args.data / (name if (args.data / name).exists() else name.split("-")[0]))
        results = side_by_side(contestants, args.rounds)
        text = table(results)
        machine = f"{platform.machine()}, {cores()} cores, Python {platform.python_version()}"
        (results_folder / f"{name}.md").write_text(f"# {name}\n\n{machine}\n\n{text}\n")
        numbers = {"machine": machine, "results": [vars(result) for result in results]}
        (results_folder / f"{name}.json").write_text(json.dumps(numbers, indent=1) + os.linesep)
        print(f"\n{name} ({machine})\n\n{text}")


if __name__ == "__main__":
    main()
