"""python -m benchmarks.faults: the same faults, brought to penstock and to what people use, side by side.

Each reader runs in a process of its own, with a deadline, over a small dataset in which one thing is wrong. The outcome
is one of: all samples, an error, fewer samples or wrong bytes without an error, code that ran, memory, a hang.
Readers are used as their documents show, with their defaults; versions are those that are installed.
"""

import hashlib
import importlib.metadata
import io
import json
import os
import pickle
import platform
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from benchmarks import results

SAMPLES, DEADLINE_S = 100, 30
MARKER = "this ran"
MUCH_BYTES = 256 * 2**20

Delivered = Iterator[tuple[str, bytes]]
"""What a reader gave: the sample's name and its bytes."""


# -- readers ----------------------------------------------------------------------------------------------------------


def webdataset(folder: str, package: str = "webdataset", field: str = "npy") -> Delivered:
    """Shards in order, decoded as they are."""
    wds = importlib.import_module(package)
    urls = Path(folder, "urls.txt").read_text().split("\n") if Path(folder, "urls.txt").exists() else None
    shards = urls or sorted(map(str, Path(folder).glob("*.tar")))
    dataset = wds.WebDataset(shards, shardshuffle=False).decode("rgb8").to_tuple("__key__", field)
    for key, array in dataset:
        yield key, np.asarray(array).tobytes()


def torch_h5py(folder: str) -> Delivered:
    """A row a call under torch's own loader."""
    import torch

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.file = h5py.File(Path(folder, "data.h5"))

        def __len__(self) -> int:
            return len(self.file["data"])

        def __getitem__(self, row: int) -> np.ndarray:
            return self.file["data"][row]

    for row, batch in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=1)):
        yield f"{row:06d}", batch[0].numpy().tobytes()


def zarr_python(folder: str) -> Delivered:
    """A row a call."""
    import zarr

    array = zarr.open_array(Path(folder, "data.zarr"), mode="r")
    for row in range(array.shape[0]):
        yield f"{row:06d}", np.asarray(array[row]).tobytes()


def penstock(folder: str, path: str, field: str, manifest: bool = False) -> Delivered:
    """One epoch of a loader, in order."""
    import penstock as ps

    options: dict[str, Any] = {"manifest": Path(folder, "penstock-manifest.json")} if manifest else {}
    urls = Path(folder, "urls.txt")
    source = urls.read_text().split("\n") if urls.exists() else str(Path(folder, path))
    ds = ps.open(source, **options)
    with ps.Loader(ds, batch_size=1, memory="256MiB", output="numpy", columns=("__index__", field)) as loader:
        for rows, values in loader:
            row = int(rows[0])
            yield ds.keys[row] if path.endswith(".tar") else f"{row:06d}", np.asarray(values[0]).tobytes()


# -- datasets ---------------------------------------------------------------------------------------------------------


def value(row: int) -> np.ndarray:
    return np.random.default_rng(row).integers(0, 256, 600, np.uint8)


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def shard(folder: Path) -> Path:
    """100 arrays, 1,536 bytes each with their headers."""
    write_tar(folder / "a.tar", ((f"{row:06d}.npy", npy(value(row))) for row in range(SAMPLES)))
    return folder / "a.tar"


def hdf5(folder: Path) -> Path:
    """100 rows, ten a chunk."""
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("data", data=np.stack([value(row) for row in range(SAMPLES)]), chunks=(10, 600))
    return folder / "data.h5"


def cut_in_member(folder: Path) -> None:
    os.truncate(shard(folder), 40 * 1536 + 700)


def cut_at_edge(folder: Path) -> None:
    os.truncate(shard(folder), 40 * 1536)


def damaged_header(folder: Path) -> None:
    _write(shard(folder), 40 * 1536 + 148, b"\xff" * 6)


def lacking_field(folder: Path) -> None:
    members = [(f"{row:06d}.npy", npy(value(row))) for row in range(SAMPLES)]
    members[40] = ("000040.txt", b"a word")
    write_tar(folder / "a.tar", members)


def interleaved_keys(folder: Path) -> None:
    first = [(f"{row:06d}.{name}", npy(value(row))) for name in ("cls.npy", "npy") for row in range(SAMPLES)]
    write_tar(folder / "a.tar", first)


def flipped_in_tar(folder: Path) -> None:
    path = shard(folder)
    _manifest(path)
    _flip(path, 40 * 1536 + 700)


def flipped_in_hdf5(folder: Path) -> None:
    path = hdf5(folder)
    _manifest(path)
    with h5py.File(path) as file:
        at = file["data"].id.get_chunk_info(4).byte_offset + 5
    _flip(path, at)


def never_written(folder: Path) -> None:
    with h5py.File(folder / "data.h5", "w") as file:
        data = file.create_dataset("data", (SAMPLES, 600), "u1", chunks=(10, 600))
        for begin in (*range(0, 40, 10), *range(50, 100, 10)):
            data[begin : begin + 10] = np.stack([value(row) for row in range(begin, begin + 10)])


def lost_zarr_chunk(folder: Path) -> None:
    import zarr

    array = zarr.create_array(folder / "data.zarr", shape=(SAMPLES, 600), dtype="u1", chunks=(10, 600))
    array[:] = np.stack([value(row) for row in range(SAMPLES)])
    (folder / "data.zarr" / "c" / "4" / "0").unlink()


def external_link(folder: Path) -> None:
    secret = folder.parent / "secret"
    secret.write_bytes(b"".join(value(row).tobytes() for row in range(SAMPLES)))
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("data", (SAMPLES, 600), "u1", external=[(str(secret), 0, SAMPLES * 600)])


def pickled(folder: Path) -> None:
    payload = pickle.dumps(_Runs(str(folder / MARKER)))
    members = [(f"{row:06d}.{name}", data) for row in range(SAMPLES) for name, data in _with(row, payload)]
    write_tar(folder / "a.tar", members)


def shell(folder: Path) -> None:
    (folder / "urls.txt").write_text(f"pipe:touch '{folder / MARKER}'; cat {shard(folder)}")


def bomb(folder: Path) -> None:
    side = 13_000
    rows = zlib.compress(b"\0" * (side * 3 + 1) * side, 9)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    picture = b"\x89PNG\r\n\x1a\n"
    for kind, data in parts:
        picture += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    write_tar(folder / "a.tar", [("000000.png", picture)])


class _Runs:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.marker, "w")


def _with(row: int, payload: bytes) -> list[tuple[str, bytes]]:
    return [("npy", npy(value(row))), *([("pkl", payload)] if row == 40 else [])]


def _manifest(path: Path) -> None:
    import penstock as ps

    ps.write_manifest(path)


def _flip(path: Path, at: int) -> None:
    byte = path.read_bytes()[at]
    _write(path, at, bytes([byte ^ 1]))


def _write(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


# -- who reads what ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One thing that is wrong."""

    told: str
    make: Callable[[Path], None]
    readers: tuple[str, ...]
    field: str = "npy"


TARS = ("webdataset", "penstock.webdataset", "penstock, opened")
HDF5 = ("torch + h5py", "penstock, HDF5")
CASES = (
    Case("tar cut inside sample 40 of 100", cut_in_member, TARS),
    Case("tar cut before sample 40, at the member's edge", cut_at_edge, TARS),
    Case("tar header of sample 40 damaged", damaged_header, TARS),
    Case("sample 40 lacks the field", lacking_field, TARS),
    Case("all first fields, then all second ones", interleaved_keys, TARS),
    Case("a bit flipped in a tar", flipped_in_tar, (*TARS, "penstock, with a manifest")),
    Case("a pickle among the members", pickled, TARS),
    Case("`pipe:` in a list of shards", shell, TARS),
    Case("a PNG of 169 megapixels in a small tar", bomb, TARS, "png"),
    Case("a bit flipped in HDF5 without checksums", flipped_in_hdf5, (*HDF5, "penstock, HDF5, with a manifest")),
    Case("an HDF5 chunk that was never written", never_written, HDF5),
    Case("HDF5 whose data lie in another file outside", external_link, HDF5),
    Case("a Zarr chunk file that is lost", lost_zarr_chunk, ("zarr-python", "penstock, Zarr")),
)  # fmt: skip

READERS: dict[str, Callable[[str, str], Delivered]] = {
    "webdataset": lambda folder, field: webdataset(folder, "webdataset", field),
    "penstock.webdataset": lambda folder, field: webdataset(folder, "penstock.webdataset", field),
    "penstock, opened": lambda folder, field: penstock(folder, "*.tar", field),
    "penstock, with a manifest": lambda folder, field: penstock(folder, "*.tar", field, manifest=True),
    "torch + h5py": lambda folder, field: torch_h5py(folder),
    "penstock, HDF5": lambda folder, field: penstock(folder, "data.h5", "data"),
    "penstock, HDF5, with a manifest": lambda folder, field: penstock(folder, "data.h5", "data", manifest=True),
    "zarr-python": lambda folder, field: zarr_python(folder),
    "penstock, Zarr": lambda folder, field: penstock(folder, "data.zarr", "data"),
}


def child(reader: str, folder: str, field: str) -> None:
    """In the child: what was delivered, and how it ended."""
    import resource

    import torch  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got: dict[str, str] = {}
    error = ""
    try:
        for key, data in READERS[reader](folder, field):
            got[key] = hashlib.sha256(data).hexdigest()
    except Exception as raised:
        error = type(raised).__name__
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(json.dumps({"got": got, "error": error, "grown": grown}))


def outcome(case: Case, reader: str) -> str:
    """One reader and one fault, in words."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "data")
        folder.mkdir()
        case.make(folder)
        job = [sys.executable, "-m", "benchmarks.faults", reader, str(folder), case.field]
        try:
            done = subprocess.run(job, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            return f"**hangs** (over {DEADLINE_S} s)"
        ran = (folder / MARKER).exists()
        shutil.rmtree(folder)
    if ran:
        return "**runs it**"
    if done.returncode:
        return f"**the process dies** ({done.returncode})"
    told = json.loads(done.stdout.splitlines()[-1])
    return _told(told["got"], told["error"], told["grown"], leads_out=case.make is external_link)


def _told(got: dict[str, str], error: str, grown: int, leads_out: bool) -> str:
    right = {f"{row:06d}": hashlib.sha256(value(row).tobytes()).hexdigest() for row in range(SAMPLES)}
    wrong = sum(key not in right or right[key] != digest for key, digest in got.items())
    if error:
        before = f" after {len(got)}" if got else ""
        return f"`{error}`{before}" + (f", **{wrong} wrong ones**" if wrong else "")
    if grown > MUCH_BYTES:
        return f"**{grown / 2**20:,.0f} MiB taken**"
    if wrong:
        return f"**{wrong} wrong, silently**"
    if len(got) < SAMPLES:
        return f"**{len(got)} of {SAMPLES}, silently**"
    return "**reads it**" if leads_out else "all of them"


def main() -> None:
    if len(sys.argv) > 1:
        child(*sys.argv[1:4])
        return
    versions = {name: importlib.metadata.version(name) for name in ("webdataset", "torch", "h5py", "zarr", "penstock")}
    rows = []
    for case in CASES:
        for reader in case.readers:
            rows.append({"label": case.told, "reader": reader, "outcome": outcome(case, reader)})
            print(" | ".join(rows[-1].values()), flush=True)
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    machine = f"{told}; Python {platform.python_version()}, {platform.system()}"
    results.write("faults", "python -m benchmarks.faults", rows, machine=machine)


if __name__ == "__main__":
    main()
