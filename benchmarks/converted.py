"""python -m benchmarks.converted [--megabytes 256] [--rounds 5] [--data FOLDER]

Is a converted dataset read as fast as the npy file that it was made of? For rows of 4 KB to 4.5 MB, an npy file is
converted to Zarr with default settings, and with each compression. Then shuffled epochs of all of them are read in
turns, by loaders of one process, with everything in the page cache. One value of each page of a batch is touched. The
ratio is the median over rounds of the time that npy took by the time that Zarr took in the same round; CPU likewise,
also for the first epoch of a loader, in which chunks are compared with their checksums.

Noise is what zstd cannot make much smaller; "smooth" are volumes like those of other benchmarks; "half empty" ones have
a background.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import penstock as ps
from benchmarks import data, results

HERE = Path(__file__).resolve().parent
MEMORY = "1GiB"
BATCH_BYTES = 16 << 20

Make = Callable[[np.random.Generator, int], np.ndarray]


def noise(dtype: str, width: int) -> Make:
    """Rows of normally distributed numbers."""

    def make(rng: np.random.Generator, rows: int) -> np.ndarray:
        values = rng.standard_normal((rows, width), np.float32)
        return values if dtype == "float32" else (values * 1000).astype(dtype)

    return make


def smooth(rng: np.random.Generator, rows: int) -> np.ndarray:
    return np.stack([data.volume(rng) for _ in range(rows)])


def half_empty(rng: np.random.Generator, rows: int) -> np.ndarray:
    volumes = smooth(rng, rows)
    volumes[:, :75] = 0
    return volumes


ROWS: dict[str, Make] = {
    "4 KB, float32 noise": noise("float32", 1_000),
    "40 KB, float32 noise": noise("float32", 10_000),
    "600 KB, int16 noise": noise("int16", 300_000),
    "4.5 MB, int16 noise": noise("int16", 2_250_000),
    "4.5 MB, smooth int16": smooth,
    "4.5 MB, half empty int16": half_empty,
}
COMPRESSIONS = ("auto", "blosc", "zstd")


def make_npy(path: Path, make: Make, megabytes: int) -> int:
    """An npy file of about so many megabytes; returns the bytes of a row."""
    rng = np.random.default_rng(5)
    first = make(rng, 1)
    row_bytes = first.nbytes
    rows = max(16, megabytes * 1_000_000 // row_bytes)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.lib.format.open_memmap(f"{path}.part", "w+", first.dtype, (rows, *first.shape[1:]))
        step = max(1, 16_000_000 // row_bytes)
        for begin in range(0, rows, step):
            values[begin : begin + step] = make(rng, min(step, rows - begin))
        values.flush()
        Path(f"{path}.part").rename(path)
    return row_bytes


def epoch(loader: ps.Loader) -> tuple[float, float]:
    """Seconds by the clock, and of CPU."""
    began, cpu = time.perf_counter(), time.process_time()
    for batch in loader:
        values = next(iter(batch.values())).reshape(-1)
        values[:: 4096 // values.itemsize].sum()  # one value of every page
    return time.perf_counter() - began, time.process_time() - cpu


def first_epoch(path: Path | str, options: dict[str, object]) -> tuple[float, float]:
    """The same with a loader of its own, which takes fresh memory, and checks every chunk by its checksum."""
    with ps.Loader(ps.open(path), **options) as loader:
        return epoch(loader)


def compare(folder: Path, make: Make, megabytes: int, rounds: int) -> list[dict[str, object]]:
    """One line per compression: its size, and its rate by that of npy."""
    row_bytes = make_npy(folder / "rows.npy", make, megabytes)
    source = ps.open(folder / "rows.npy")
    batch = max(4, min(256, BATCH_BYTES // row_bytes))
    options = {"batch_size": batch, "shuffle": True, "memory": MEMORY, "output": "numpy"}
    plain = ps.Loader(source, **options)
    epoch(plain)
    lines: list[dict[str, object]] = []
    for compression in COMPRESSIONS:
        done = ps.convert(source, folder / f"{compression}.zarr", compression=compression, verify=False)
        (cut,) = done.plan.cuts.values()
        stored = sum(path.stat().st_size for path in Path(done.path).rglob("*") if path.is_file())
        first = [(first_epoch(folder / "rows.npy", options), first_epoch(done.path, options)) for _ in range(rounds)]
        with ps.Loader(ps.open(done.path), **options) as loader:
            epoch(loader)
            pairs = [(epoch(plain), epoch(loader)) for _ in range(rounds)]
        lines.append(
            {
                "compression": compression if compression == cut.compression else f"{compression}: {cut.compression}",
                "size_ratio": stored / (len(source) * row_bytes),
                "npy_bytes_per_s": len(source) * row_bytes / statistics.median(npy[0] for npy, _ in pairs),
                "rate_ratio": statistics.median(npy[0] / own[0] for npy, own in pairs),
                "first_epoch_cpu_ratio": statistics.median(npy[1] / own[1] for npy, own in first),
                "cpu_ratio": statistics.median(npy[1] / own[1] for npy, own in pairs),
            }
        )
    plain.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.converted", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=HERE / "data" / "converted-rows")
    parser.add_argument("--only", help="part of the name of the rows to measure")
    args = parser.parse_args()
    rows = []
    for label, make in ROWS.items():
        if args.only and args.only not in label:
            continue
        folder = args.data / label.replace(",", "").replace(" ", "-")
        for line in compare(folder, make, args.megabytes, args.rounds):
            rows.append({"label": f"{label}; {line['compression']}", **line})
            print(
                f"{rows[-1]['label']}: {line['size_ratio']:.2f} of the size, {line['rate_ratio']:.2f} of npy's rate "
                f"({line['npy_bytes_per_s'] / 1e9:.1f} GB/s), {line['cpu_ratio']:.2f} by CPU "
                f"({line['first_epoch_cpu_ratio']:.2f} in a first epoch)",
                flush=True,
            )
    if not args.only:
        results.write("converted", "python -m benchmarks.converted", rows, about=__doc__.split("\n\n")[1])


if __name__ == "__main__":
    main()
