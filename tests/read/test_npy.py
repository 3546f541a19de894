"""Arrays in bytes: what NumPy writes is read, what lies about its size or holds objects is refused."""

import contextlib
import io
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Corrupt, DecodeFailed, LimitExceeded, PenstockError, SchemaMismatch, Unsafe
from penstock.read import objects
from penstock.read.kinds import Npy
from penstock.read.npy import (
    NpyHeader,
    decode_npy,
    decode_npz,
    decode_ten,
    encode_npy,
    encode_npz,
    encode_ten,
    is_cut,
)

ARRAYS = {
    "half": np.arange(12, dtype=np.float16).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
    "other end first": np.arange(5, dtype=">i4"),
    "scalar": np.array(7.5),
    "empty": np.empty((0, 3), np.uint8),
    "booleans": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "text": np.array(["ab", "c"]),
    "records": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "noncontiguous": np.arange(20)[::3],
}


def saved(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def same(found, wanted):
    return found.dtype == wanted.dtype and found.shape == wanted.shape and bool((found == wanted).all())


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_npy(array):
    for data in (saved(array), encode_npy(array)):
        found = decode_npy(data)
        assert same(found, array)
        assert found.flags.writeable
        assert found.flags.f_contiguous == np.load(io.BytesIO(data)).flags.f_contiguous


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions_of_the_format(version):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.arange(3), version)
    assert same(decode_npy(stream.getvalue()), np.arange(3))


def test_objects_are_refused():
    objects = np.array([{"a": 1}, None], object)
    for data in (saved(objects, allow_pickle=True), saved(np.array([(1, "x")], dtype=[("a", "O"), ("b", "O")]))):
        with pytest.raises(Unsafe, match="Python objects, which only unpickling could read"):
            decode_npy(data)
    stream = io.BytesIO()
    np.savez(stream, fine=np.arange(3), bad=objects)
    with pytest.raises(Unsafe):
        decode_npz(stream.getvalue())
    with pytest.raises(Unsafe, match="pickled"):
        encode_npy(objects)


def test_a_shape_is_believed_only_as_far_as_there_are_bytes():
    data = saved(np.zeros(4)).replace(b"(4,), }" + b" " * 16, b"(9999999999999,), }    ")
    with pytest.raises(DecodeFailed, match=r"declares float64 of shape \(9999999999999,\).*and 32 follow"):
        decode_npy(data)


@pytest.mark.parametrize("header", [b"{'descr': '<i8', 'shape': (", b"\0" * 30, b"(" * 3000, b"__import__('os')"])
def test_npy_headers_that_are_none(header):
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
    with pytest.raises(DecodeFailed, match=r"npy of [\d,]+ bytes: \S"):
        decode_npy(data)


@pytest.mark.parametrize("left", [0, 3, 8, 20, 100, -1])
def test_cut_npy(left):
    with pytest.raises(DecodeFailed, match=r"npy of \d+ bytes: \S"):
        decode_npy(saved(np.arange(10))[:left])


def test_npz():
    arrays = {"a": np.arange(3), "b.c": np.ones((2, 2), np.float32)}
    for save in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        save(stream, **arrays)
        found = decode_npz(stream.getvalue())
        assert list(found) == list(arrays)
        assert all(same(found[name], arrays[name]) for name in arrays)
    found = dict(np.load(io.BytesIO(encode_npz(arrays))))
    assert all(same(found[name], arrays[name]) for name in arrays)
    assert encode_npz(arrays) == encode_npz(arrays)


def test_npz_that_unpacks_to_too_much():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", bytes(10_000_000))
    assert len(stream.getvalue()) < 20_000
    with pytest.raises(LimitExceeded, match="declares 10,000,000; at most 1,000,000"):
        decode_npz(stream.getvalue(), max_bytes=1_000_000)


def header_of(dtype, shape, fortran=False, version=(1, 0)):
    text = repr({"descr": dtype, "fortran_order": fortran, "shape": shape}).encode()
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_a_header_of_any_version(version):
    data = header_of("<f4", (2, 3), version=version)
    assert NpyHeader.parse(data + bytes(24)) == NpyHeader(np.dtype("f4"), (2, 3), False, len(data))
    assert [is_cut(data[:left]) for left in (0, 7, 9, 20, len(data) - 1)] == [True] * 5
    assert not is_cut(data)
    assert not is_cut(b"<html>404</html>")


@pytest.mark.parametrize(("shape", "expected"), [((3, 4), True), ((5,), False), ((1, 5, 1), False), ((), False)])
def test_fortran_order_counts_only_where_it_differs(shape, expected):
    assert NpyHeader.parse(header_of("<f4", shape, fortran=True)).is_fortran is expected


REFUSED = {
    "S0": ("|S0", (3,), SchemaMismatch, "take no bytes"),
    "U0": ("<U0", (3,), SchemaMismatch, "take no bytes"),
    "V0": ("|V0", (3,), SchemaMismatch, "take no bytes"),
    "beyond 63 bits": ("<f8", (2**62,), Corrupt, "no array can have that shape"),
    "beyond 63 bits but for an empty axis": ("<f8", (0, 2**61), Corrupt, "no array can have that shape"),
    "negative": ("<f8", (-1, 4), Corrupt, "no array can have that shape"),
    "truth for a size": ("<f8", (True, 4), Corrupt, "no array can have that shape"),
    "objects": ("|O", (3,), Unsafe, "Python objects"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("use", [NpyHeader.parse, decode_npy, Npy.of, objects.ARRAY.decode])
def test_a_header_is_refused_by_all_who_read_one(case, use):
    dtype, shape, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        use(header_of(dtype, shape) + bytes(64))


def test_damaged_npz():
    data = encode_npz({"a": np.arange(1000)})
    for broken in (b"", data[:50], data[:-30], data[:100] + b"xxxx" + data[104:]):
        with pytest.raises(DecodeFailed, match=r"npz of [\d,]+ bytes: \S"):
            decode_npz(broken)


TEN = [
    np.arange(6, dtype=np.float16).reshape(2, 3),
    np.array(5, np.uint8),
    np.empty((0, 4)),
    np.arange(100, dtype="i8"),
]


def test_ten():
    found = decode_ten(encode_ten(TEN))
    assert len(found) == len(TEN)
    assert all(map(same, found, TEN))
    assert same(decode_ten(encode_ten(TEN[0]))[0], TEN[0]), "one array is a list of one"
    assert decode_ten(b"") == []


def test_ten_is_theirs():
    theirs = pytest.importorskip("webdataset.tenbin")
    assert encode_ten(TEN) == bytes(theirs.encode_buffer(TEN))
    data = encode_ten([array for array in TEN if array.ndim])  # it cannot read single numbers
    assert all(map(same, decode_ten(data), theirs.decode_buffer(data)))


def test_damaged_ten():
    data = encode_ten(TEN)
    lies = bytearray(data)
    lies[40:48] = struct.pack("<q", 2**60)  # the first dimension
    for broken in (data[:10], data[:70], b"x" + data[1:], data[:200], bytes(lies)):
        with pytest.raises(DecodeFailed, match=r"ten of [\d,]+ bytes: \S"):
            decode_ten(broken)
    with pytest.raises(Unsafe, match="plain numbers"):
        encode_ten(np.array(["text"]))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(decode_npy, saved(np.arange(20))), (decode_ten, encode_ten(TEN)),
                     (decode_npz, encode_npz({"a": np.arange(9)}))]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=3),
    st.floats(0, 1),
)  # fmt: skip
def test_any_damage_is_an_error_of_ours_or_none(case, changes, left):
    decode, data = case
    damaged = bytearray(data)
    for place, value in changes:
        damaged[int(place * len(damaged))] = value
    with contextlib.suppress(PenstockError):
        decode(bytes(damaged[: int(left * len(damaged))]))
