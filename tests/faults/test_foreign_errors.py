"""Files whose numbers and nesting break parsers: whatever a library or Python raises for them is an error of ours."""

import gzip
import io
import json
import struct
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

import penstock as ps
from penstock.errors import PenstockError


def npy(descr: Any = "<f8", shape: Any = (4, 2), data: bytes = bytes(64)) -> bytes:
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def deep(length: int = 100_000) -> bytes:
    return b"[" * length + b"]" * length


HEADERS: dict[str, bytes] = {
    **{f"dtype {each}": npy(each) for each in ("|V0", "<U0", "|S0", "|S3", "<U2", "|V8", "<M8[s]", "|b1", "x", 5)},
    "dtype of nothing": npy([]),
    "dtype of fields": npy([("a", "<f8"), ("b", "|V0")]),
    "dtype of arrays": npy([("a", "<f8", (2**40, 2**40))]),
    "dimension 2**63": npy(shape=(2**63,)),
    "dimension 2**63 of rows": npy(shape=(4, 2**63)),
    "product 2**64": npy(shape=(2**32, 2**32)),
    "rows of nothing": npy(shape=(4, 0), data=b""),
    "no rows": npy(shape=(0, 4), data=b""),
    "2**62 rows of nothing": npy(shape=(2**62, 0), data=b""),
    "2**70 rows of nothing": npy(shape=(2**70, 0), data=b""),
    "shape of text": npy(shape="ab"),
    "shape of floats": npy(shape=(2.5,)),
    "deep header": b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"(" * 9000,
    "header not UTF-8": b"\x93NUMPY\x03\x00" + struct.pack("<I", 64) + b"\xff" * 64,
    "cut": npy()[:20],
    "version 9": b"\x93NUMPY\x09\x00" + bytes(100),
}


def packed(members: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


ZARR_2 = {"zarr_format": 2, "shape": [4, 2], "chunks": [1, 2], "dtype": "<f8", "compressor": None, "fill_value": 0,
          "order": "C", "filters": None}  # fmt: skip
ZARR_3 = {
    "zarr_format": 3, "node_type": "array", "shape": [4, 2], "data_type": "float64", "fill_value": 0,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 2]}},
    "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
}  # fmt: skip
CHANGES: dict[str, Any] = {
    "shape": ([2**63, 2], [4, 2**63], [2**32, 2**32], ["a"], [-1, 2], None, [1.5, 2], [4, 0], [[4]], True, {}),
    "chunks": ([0, 2], [2**63, 2], [1], None, ["a", 1], [1, 2**63]),
    "dtype": ("|V0", "<U0", "|S0", "|O", "x", None, 5, [["a", "<f8"]], [["a", "|V0"]], "<f8" * 999, {}),
    "data_type": ("r0", "r8", "string", None, 5, {}, {"name": "x"}),
    "fill_value": ("x", 10**400, [], {}, None, "AAAA", True),
    "compressor": (5, {}, {"id": 5}, {"id": "zlib", "level": "x"}, {"id": "blosc"}),
    "filters": (5, [5], [{}], [{"id": "delta"}]),
    "order": (5, "X", None),
    "codecs": (5, [], [5], [{}], [{"name": "sharding_indexed"}], [{"name": "gzip"}], [{"name": 5}], None),
    "chunk_grid": (5, {}, {"name": "regular"}, None, {"name": "regular", "configuration": {"chunk_shape": [0, 2]}},
                   {"name": "regular", "configuration": {"chunk_shape": [2**63, 2**63]}}),
    "chunk_key_encoding": (5, {}, None, {"name": "v2", "configuration": {"separator": 5}}),
    "attributes": (5, None, []),
}  # fmt: skip


def documents() -> dict[str, tuple[str, bytes]]:
    found = {}
    for name, whole in ((".zarray", ZARR_2), ("zarr.json", ZARR_3)):
        for key, values in CHANGES.items():
            if key in whole or key == "attributes":
                for number, value in enumerate(values):
                    found[f"{name} {key} {number}"] = name, json.dumps({**whole, key: value}).encode()
        for key in whole:
            left = {each: value for each, value in whole.items() if each != key}
            found[f"{name} without {key}"] = name, json.dumps(left).encode()
        for told, content in (("deep", deep()), ("bytes", b"\xff\xfe{"), ("list", b"[]"), ("null", b"null"),
                              ("nothing", b""), ("digits", b'{"shape": ' + b"9" * 5000 + b"}")):  # fmt: skip
            found[f"{name} {told}"] = name, content
        found[f"{name} deep attributes"] = name, json.dumps(whole)[:-1].encode() + b', "attributes": ' + deep() + b"}"
    return found


DOCUMENTS = documents()


def nifti(dims: tuple[int, ...], code: int = 4, offset: float = 352.0) -> bytes:
    head = bytearray(352)
    struct.pack_into("<i", head, 0, 348)
    struct.pack_into("<8h", head, 40, *dims)
    struct.pack_into("<2h", head, 70, code, 16)
    struct.pack_into("<3f", head, 108, offset, 1, 0)
    head[344:348] = b"n+1\0"
    return bytes(head) + bytes(64)


NIFTIS = {
    "large": nifti((7, *[32767] * 7)), "nan": nifti((3, 2, 2, 2, 1, 1, 1, 1), offset=float("nan")),
    "infinite": nifti((3, 2, 2, 2, 1, 1, 1, 1), offset=float("inf")), "type": nifti((3, 2, 2, 2, 1, 1, 1, 1), 1),
    "none": nifti((0, 1, 1, 1, 1, 1, 1, 1)), "cut": nifti((3, 2, 2, 2, 1, 1, 1, 1))[:100],
}  # fmt: skip

MEMBERS = {
    "deep.json": deep(), "latin.txt": b"\xe9", "nothing.json": b"", "long.cls": b"9" * 60, "text.cls": b"x",
    "bytes.npz": b"PK\x03\x04" + bytes(40), "deflated.npz": packed({"x.npy": npy()}, zipfile.ZIP_DEFLATED)[:60],
    "zero.npz": packed({"x.npy": npy("|V0")}), "empty.png": b"", "cut.png": b"\x89PNG\r\n\x1a\n",
    "cut.jpg": b"\xff\xd8\xff", "cut.tif": b"II*\0\x08\0\0\0", "cut.ppm": b"P6\n9999999999 1\n255\n",
    "cut.jp2": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(30), "digits.ppm": b"P6\n" + b"9" * 5000 + b" 1\n255\n",
    "cut.webp": b"RIFF\0\0\0\0WEBPVP8X", "cut.bmp": b"BM", "cut.gif": b"GIF8",
}  # fmt: skip


def damaged(content: bytes) -> dict[str, bytes]:
    """A file cut, and with its bytes turned in several places."""
    turned = bytearray(content)
    turned[len(content) // 2 :: 7] = bytes(0x5A for _ in turned[len(content) // 2 :: 7])
    early = bytearray(content)
    early[40:60] = b"\xff" * len(early[40:60])
    return {"half": content[: len(content) // 2], "turned": bytes(turned), "early": bytes(early), "end": content[:-3]}


def tables() -> dict[str, tuple[str, bytes]]:
    table, found = pa.table({"x": np.arange(64.0), "y": np.arange(64)}), {}
    for name, write in (("a.parquet", parquet.write_table), ("a.arrow", feather.write_feather)):
        stream = io.BytesIO()
        write(table, stream)
        found |= {f"{name} {how}": (name, content) for how, content in damaged(stream.getvalue()).items()}
    return found


def hdf5() -> bytes:
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        file.create_dataset("x", data=np.arange(64.0).reshape(16, 4), chunks=(2, 4), compression="gzip")
    return stream.getvalue()


FILES: dict[str, tuple[str, bytes]] = {
    **{f"npy: {name}": ("a.npy", content) for name, content in HEADERS.items()},
    **{f"npz: {name}": ("a.npz", packed({"x.npy": content})) for name, content in HEADERS.items()},
    **{f"packed npz: {name}": ("a.npz", packed({"x.npy": content}, zipfile.ZIP_DEFLATED))
       for name, content in HEADERS.items()},
    **{f"tar: {name}": ("a.tar", tar({"a.npy": content})) for name, content in HEADERS.items()},
    **{f"folder: {name}": ("a/a.npy", content) for name, content in HEADERS.items()},
    **{f"zarr: {name}": (f"a.zarr/{file}", content) for name, (file, content) in DOCUMENTS.items()},
    **{f"nifti: {name}": ("a.nii", content) for name, content in NIFTIS.items()},
    **{f"gzipped nifti: {name}": ("a.nii.gz", gzip.compress(content, mtime=0)) for name, content in NIFTIS.items()},
    **{f"gzip: {name}": ("a.nii.gz", content)
       for name, content in damaged(gzip.compress(nifti((3, 2, 2, 2, 1, 1, 1, 1)), mtime=0)).items()},
    **{f"tar of {name}": ("a.tar", tar({f"a.{name.partition('.')[2]}": content})) for name, content in MEMBERS.items()},
    **{f"folder of {name}": (f"a/{name}", content) for name, content in MEMBERS.items() if name[-3:] in ("png", "jpg")},
    **tables(),
    **{f"hdf5: {name}": ("a.h5", content) for name, content in damaged(hdf5()).items()},
    **{f"packed: {name}": ("a.npz", content)
       for name, content in damaged(packed({"x.npy": npy()}, zipfile.ZIP_DEFLATED)).items()},
}  # fmt: skip


def read_all(path: Path) -> None:
    ds = ps.open(path, index_dir=False)
    if len(ds):
        ds[0]
    with ps.Loader(ds, batch_size=2, memory="64MiB", threads=1, output="numpy") as loader:
        for step, _ in enumerate(loader):
            if step == 4:
                break


def write_chunks(folder: Path) -> None:
    """Those of both versions, for documents that happen to be sound."""
    for row in range(4):
        (folder / "c" / str(row)).mkdir(parents=True)
        for chunk in (folder / f"{row}.0", folder / "c" / str(row) / "0"):
            chunk.write_bytes(bytes(16))


@pytest.mark.case(24)
@pytest.mark.parametrize("name", FILES)
def test_only_errors_of_ours(tmp_path: Path, name: str) -> None:
    where, content = FILES[name]
    file = tmp_path / where
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    if name.startswith("zarr"):
        write_chunks(file.parent)
    with suppress(PenstockError):  # nothing else
        read_all(tmp_path / Path(where).parts[0])
