"""Changes files at random and reads what becomes of them: ``python fuzzing.py FOLDER KINDS SEED FIRST COUNT``.

Each changed dataset is opened and read in a child of its own, forked from this process so that nothing is imported
twice, under a limit of memory and of time. Prints one line a child: its kind, its number, its seconds of work, and what
came of it; ``right`` or the name of an error of penstock's tree is as it should be, everything else is not.
"""

import importlib
import json
import os
import resource
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

import penstock as ps
from penstock.errors import PenstockError

LIMIT_S = 5
"""Of work; where others have the machine, that takes longer."""
WAIT_S = 60
"""For one that does not work at all."""
MEMORY = "64MiB"
SPARE_BYTES = 192 * 2**20
"""Above the budget: stacks of threads, and what libraries reserve and never touch."""

NUMBERS = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


def change(data: bytes, rng: np.random.Generator, places: list[int] | None = None) -> bytes:
    """A few changes: bits, bytes, numbers, pieces removed, doubled or overwritten; near ``places``, if given."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        if not out:
            break
        at = int(rng.integers(len(out)))
        if places is not None and rng.random() < 0.8:
            at = min(len(out) - 1, int(rng.choice(places)) + int(rng.integers(0, 96)))
        kind = rng.integers(8)
        length = int(min(2 ** rng.uniform(0, 9), len(out) - at))
        if kind <= 1:
            out[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            out[at] = int(rng.integers(256))
        elif kind == 3:
            width = int(rng.choice([1, 2, 4, 8]))
            number = int(rng.choice(np.array(NUMBERS, object))) % 256**width
            out[at : at + width] = number.to_bytes(width, str(rng.choice(["little", "big"])))[: len(out) - at]
        elif kind == 4:
            del out[at : at + length]
        elif kind == 5:
            out[at:at] = out[at : at + length]
        elif kind == 6:
            out[at : at + length] = rng.bytes(length)
        elif rng.random() < 0.3:
            del out[at:]
    return bytes(out)


def change_text(data: bytes, rng: np.random.Generator) -> bytes:
    """A JSON document with some value or name replaced by another."""
    if rng.random() < 0.3:
        return change(data, rng)
    document = json.loads(data)
    spots = list(walk(document))
    if not spots:
        return change(data, rng)
    odd = [None, True, -1, 0, 1.5, 2**70, 1e308, "", "..", "\0", "x" * 5000, [], {}, [[]], "float128", "|O", -(2**63)]
    for _ in range(rng.integers(1, 3)):
        holder, key = spots[rng.integers(len(spots))]
        if isinstance(holder, dict) and rng.random() < 0.2:
            holder[str(rng.choice(["", "shape", "__proto__", "codecs"]))] = holder.get(key)
        elif isinstance(holder, dict) and rng.random() < 0.2:
            holder.pop(key, None)
        elif isinstance(holder, dict) or key < len(holder):
            holder[key] = odd[rng.integers(len(odd))]
    return json.dumps(document).encode()


def walk(document):
    """Every place of a value: what holds it, and under which key."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(items):
        yield document, key
        if isinstance(value, dict | list):
            yield from walk(value)


def deliver(path: Path, **options) -> None:
    """What a loader delivers of it, and single samples too."""
    ds = ps.open(path, index_dir=False, **options)
    ds[len(ds) - 1]
    with ps.Loader(ds, batch_size=5, memory=MEMORY, threads=2, shuffle=True, output="numpy") as loader:
        for _ in loader:
            pass


def changed_file(name: str, places: Callable[[bytes], list[int]] | None = None):
    """A dataset that is one file, or a folder of which one file is changed."""

    def run(folder: Path, scratch: Path, rng: np.random.Generator) -> None:
        source, goal = folder / name, scratch / name
        shutil.copytree(source, goal) if source.is_dir() else shutil.copy(source, goal)
        files = sorted(each for each in goal.rglob("*") if each.is_file()) if goal.is_dir() else [goal]
        file = files[rng.integers(len(files))]
        data = file.read_bytes()
        if file.suffix == ".json" or file.name in (".zarray", ".zgroup", ".zattrs"):
            file.write_bytes(change_text(data, rng))
        else:
            file.write_bytes(change(data, rng, places(data) if places else None))
        deliver(goal)

    return run


def tar_headers(data: bytes) -> list[int]:
    return [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]


def signatures(*marks: bytes) -> Callable[[bytes], list[int]]:
    """Where structures begin."""

    def places(data: bytes) -> list[int]:
        found = [0]
        for mark in marks:
            at = data.find(mark)
            while at >= 0:
                found.append(at)
                at = data.find(mark, at + 1)
        return found

    return places


def saved_index(name: str):
    """Tables that are kept between runs, changed while nobody looks."""

    def run(folder: Path, scratch: Path, rng: np.random.Generator) -> None:
        ps.open(folder / name, index_dir=scratch)[0]
        files = sorted(each for each in scratch.rglob("*") if each.is_file())
        assert files, "no index was kept"
        file = files[rng.integers(len(files))]
        file.write_bytes(change(file.read_bytes(), rng, [0, 0, len(file.read_bytes()) // 2]))
        right = ps.open(folder / name, index_dir=False)
        found = ps.open(folder / name, index_dir=scratch)
        for row in range(len(found)):
            got, expected = found[row], right[row]
            for field, value in expected.items():
                if not np.array_equal(got[field], value):
                    raise AssertionError(f"row {row} of a changed index is another")

    return run


def manifest(folder: Path, scratch: Path, rng: np.random.Generator) -> None:
    shutil.copytree(folder / "a.zarr", scratch / "a.zarr")
    written = Path(ps.write_manifest(scratch / "a.zarr"))
    written.write_bytes(change_text(written.read_bytes(), rng))
    deliver(scratch / "a.zarr", manifest=written)
    ps.verify(scratch / "a.zarr", manifest=written)


def state(folder: Path, scratch: Path, rng: np.random.Generator) -> None:
    ds = ps.open(folder / "a.npy")
    loader = ps.Loader(ds, batch_size=5, memory=MEMORY, threads=1, shuffle=True, output="numpy")
    for _ in zip(range(2), loader, strict=False):
        pass
    changed = change_text(json.dumps(loader.state_dict()).encode(), rng)
    try:
        loaded = json.loads(changed)
    except ValueError:
        return
    loader.load_state_dict(loaded)
    for _ in loader:
        pass


KINDS = {
    "tar": changed_file("a.tar", tar_headers),
    "npy": changed_file("a.npy", lambda data: [0]),
    "npz": changed_file("a.npz", signatures(b"PK")),
    "packed-npz": changed_file("packed.npz", signatures(b"PK")),
    "hdf5": changed_file("contiguous.h5", lambda data: [0, 96, 512, 800, 1024, 1400, 2048]),
    "hdf5-chunks": changed_file("chunks.h5", signatures(b"TREE", b"HEAP", b"SNOD")),
    "hdf5-pieces": changed_file("pieces.h5", signatures(b"OHDR", b"FRHP", b"FADB", b"FAHD", b"BTHD", b"EAHD", b"EAIB")),
    "hdf5-library": changed_file("library.h5", signatures(b"TREE", b"HEAP", b"SNOD")),
    "zarr": changed_file("a.zarr"),
    "zarr-shards": changed_file("shards.zarr"),
    "zarr-2": changed_file("old.zarr"),
    "lmdb": changed_file("a.lmdb", lambda data: list(range(0, len(data), 4096))),
    "nifti": changed_file("a.nii", lambda data: [0, 40, 70, 108, 340]),
    "nifti-gz": changed_file("b.nii.gz", lambda data: [0]),
    "pictures": changed_file("pictures"),
    "arrays": changed_file("arrays", lambda data: [0]),
    "tiledb": changed_file("a.tiledb"),
    "parquet": changed_file("a.parquet", lambda data: [0, max(0, len(data) - 600)]),
    "arrow": changed_file("a.arrow", lambda data: [0, max(0, len(data) - 600)]),
    "tar-index": saved_index("a.tar"),
    "hdf5-index": saved_index("many.h5"),
    "folder-index": saved_index("pictures"),
    "manifest": manifest,
    "state": state,
}


def one(run, folder: Path, scratch: Path, rng: np.random.Generator) -> str:
    with open("/proc/self/status") as status:
        data = next(int(line.split()[1]) for line in status if line.startswith("VmData:")) * 1024
    limit = data + 64 * 2**20 + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    try:
        run(folder, scratch, rng)
    except PenstockError as error:
        return type(error).__name__ if str(error) else "an error without a text"
    except BaseException:
        return f"foreign: {traceback.format_exc()[-1500:]!r}"
    return "right"


def prepare() -> None:
    """Import what any child may need."""
    for library in ("h5py", "hdf5plugin", "imagecodecs", "PIL.Image", "zarr", "tiledb", "pyarrow.parquet"):
        importlib.import_module(library)
    assert ps.open
    assert ps.Loader
    assert ps.verify


def main(folder: Path, kind: str, seed: int, first: int, count: int) -> None:
    for number in range(first, first + count):
        scratch = folder / f"changed-{kind}-{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # both end it, wherever it is
            signal.alarm(WAIT_S)
            rng = np.random.default_rng([seed, number, *kind.encode()])
            os.write(writes, one(KINDS[kind], folder, scratch, rng).encode()[:60_000])
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as told:
            found = told.read()
        _, status, used = os.wait4(child, 0)
        ended = f"died of signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
        print(f"{kind}\t{number}\t{used.ru_utime + used.ru_stime:.2f}\t{found or ended}", flush=True)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    prepare()
    for each in sys.argv[2].split(","):
        main(Path(sys.argv[1]), each, *map(int, sys.argv[3:6]))
