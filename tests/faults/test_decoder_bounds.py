"""Decoders of chunks read no byte beyond a chunk that was cut short: it lies before a page that nobody may touch."""

import pytest

PROGRAM = """
import ctypes, io, mmap, resource, sys
import h5py, hdf5plugin, imagecodecs, numcodecs
import numpy as np
from penstock.errors import PenstockError
from penstock.read import codecs

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
libc = ctypes.CDLL(None)
PAGE = mmap.PAGESIZE

def guarded(data):
    pages = -(-len(data) // PAGE)
    block = np.frombuffer(mmap.mmap(-1, (pages + 1) * PAGE), np.uint8)
    assert libc.mprotect(ctypes.c_void_p(block.ctypes.data + pages * PAGE), PAGE, 0) == 0
    own = block[pages * PAGE - len(data) : pages * PAGE]
    own[:] = np.frombuffer(data, np.uint8)
    return own

def of_hdf5(values, **filters):
    file = h5py.File(io.BytesIO(), "w")
    chunk = file.create_dataset("x", data=values, chunks=values.shape, **filters)
    return chunk.id.read_direct_chunk((0,))[1]

ENCODERS = {
    "deflate": imagecodecs.zlib_encode,
    "gzip": imagecodecs.gzip_encode,
    "zstd": imagecodecs.zstd_encode,
    "blosc": lambda values: numcodecs.Blosc(cname=CNAME, shuffle=int(CNAME == "lz4")).encode(values.view("i4")),
    "lzf": imagecodecs.lzf_encode,
    "lz4": lambda values: of_hdf5(values.view("i4"), **hdf5plugin.LZ4(nbytes=1024)),
    "lz4-sized": lambda values: numcodecs.LZ4().encode(values),
    "bitshuffle-lz4": lambda values: of_hdf5(values.view("i4"), **hdf5plugin.Bitshuffle(cname="lz4")),
    "bitshuffle-zstd": lambda values: of_hdf5(values.view("i4"), **hdf5plugin.Bitshuffle(cname="zstd")),
}
NAME, CNAME = sys.argv[1:]
assert set(ENCODERS) >= codecs.COMPRESSORS
plain = np.arange(1500, dtype="i4").view("u1")
noise = np.random.default_rng(0).integers(0, 256, 6000, np.uint8)
for values in (plain, noise):
    whole = bytes(ENCODERS[NAME](values))
    goal = guarded(bytes(len(values)))
    codecs.decoder((NAME, 4))(guarded(whole), goal)
    assert (goal == values).all()
    for length in [*range(40), *range(40, len(whole), 97), *range(len(whole) - 20, len(whole))]:
        try:
            codecs.decoder((NAME, 4))(guarded(whole[:length]), goal)
        except PenstockError:
            continue
        assert (goal == values).all(), (length, len(whole))
print("done")
"""


@pytest.mark.case(6)
@pytest.mark.parametrize(
    ("codec", "inner"),
    [
        *((each, "") for each in ("deflate", "gzip", "zstd", "lzf", "lz4", "lz4-sized")),
        *((each, "") for each in ("bitshuffle-lz4", "bitshuffle-zstd")),
        *(("blosc", each) for each in ("lz4", "zstd", "zlib", "blosclz")),
    ],
)
def test_chunks_cut_anywhere(apart, codec, inner):
    done = apart(PROGRAM, codec, inner)
    assert (done.code, done.out) == (0, "done\n"), done.err
