"""Decoders and conversions against zlib and plain numpy."""

import zlib

import numpy as np
import pytest

from penstock.base.scratch import overflow_bytes, prepare, release
from penstock.base.spec import Cast
from penstock.errors import ConfigError, DecodeFailed
from penstock.read import codecs
from penstock.read import convert as convert_module
from penstock.read.codecs import Unshuffle, decoder
from penstock.read.convert import BLOCK_ELEMENTS, convert, convert_scratch_bytes

SIZES = [0, 1, 2, 3, 7, 1000, 4097]


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def as_bytes(data):
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("level", [0, 1, 9])
@pytest.mark.parametrize("size", [*SIZES, 300_000])
def test_deflate_undoes_zlib(size, level):
    for original in (noise(size), noise(size) // 64, np.zeros(size, np.uint8)):
        target = np.full(size, 99, np.uint8)
        decoder(("deflate", 0))(as_bytes(zlib.compress(original.tobytes(), level)), target)
        assert np.array_equal(target, original)


PACKED = zlib.compress(noise(1000).tobytes())

BROKEN = {
    "empty": b"",
    "not deflate": bytes(range(100)),
    "cut short": PACKED[:-20],
    "one byte": PACKED[:1],
    "flipped inside": PACKED[:500] + bytes([PACKED[500] ^ 0xFF]) + PACKED[501:],
    "flipped checksum": PACKED[:-1] + bytes([PACKED[-1] ^ 1]),
    "too little inside": zlib.compress(noise(999).tobytes()),
    "too much inside": zlib.compress(noise(1001).tobytes()),
    "far too much inside": zlib.compress(bytes(10**6)),
    "nothing inside": zlib.compress(b""),
}


@pytest.mark.parametrize("packed", BROKEN.values(), ids=BROKEN)
def test_deflate_refuses_what_is_not_exactly_right(packed):
    guarded = np.full(3000, 7, np.uint8)
    with pytest.raises(DecodeFailed, match=r"deflate: .*1,000"):
        decoder(("deflate", 0))(as_bytes(packed), guarded[1000:2000])
    assert (guarded[:1000] == 7).all()
    assert (guarded[2000:] == 7).all(), "nothing is written beyond the target"


def shuffled(elements, width):
    """The oracle: first bytes of all elements, then the second ones …"""
    return elements.reshape(-1, width).T.copy().reshape(-1)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("count", [*SIZES, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1])
def test_unshuffle_undoes_the_shuffle(width, count):
    original = noise(width * count, seed=width)
    target = np.full(width * count, 99, np.uint8)
    decoder(("shuffle", width))(shuffled(original, width), target)
    assert np.array_equal(target, original)


def test_unshuffle_of_several_blocks(monkeypatch):
    monkeypatch.setattr(codecs, "_native_unshuffle", lambda: None)
    monkeypatch.setattr(convert_module, "BLOCK_ELEMENTS", 10)
    for width in (1, 2, 3, 4, 8):
        for count in (9, 10, 11, 20, 35):
            original = noise(width * count)
            target = np.empty(width * count, np.uint8)
            Unshuffle(width)(shuffled(original, width), target)
            assert np.array_equal(target, original), (width, count)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_unshuffle_of_a_piece(width):
    original = noise(width * 100)
    target = np.empty(width * 30, np.uint8)
    Unshuffle(width).piece(shuffled(original, width), slice(50, 80), target)
    assert np.array_equal(target, original[width * 50 : width * 80])


@pytest.mark.parametrize(("width", "source", "target"), [(2, 10, 12), (2, 12, 10), (2, 11, 11), (4, 10, 10), (3, 3, 0)])
def test_unshuffle_refuses_sizes_that_do_not_fit(width, source, target):
    with pytest.raises(DecodeFailed, match=f"shuffle: {source} bytes of elements of {width}"):
        Unshuffle(width)(noise(source), np.empty(target, np.uint8))


@pytest.mark.parametrize("name", ["brotli", "", "Deflate"])
def test_an_unknown_codec_is_refused_with_those_known(name):
    with pytest.raises(ConfigError, match=rf"{name!r}; known: shuffle, deflate, gzip, zstd"):
        decoder((name, 0))


# Conversions.

INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i2", ">u4", "?"]
FLOATS = ["f2", "f4", "f8", ">f4", ">f8"]
CASTS = [(1.0, 0.0), (1 / 255, 0.0), (1.0, -3.5), (1 / 300, 0.25), (0.0, 1.0), (-2.0, 0.0)]


def samples(dtype, count=257):
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return (np.random.default_rng(1).standard_normal(count) * 100).astype(dtype)
    if dtype.kind == "b":
        return noise(count) % 2 == 1
    return noise(count * dtype.itemsize).view(dtype)


def oracle(source, dtype, scale, offset):
    """The promise as written: ``value.astype(dtype) * scale + offset``, computed in that dtype (half in single)."""
    dtype = np.dtype(dtype)
    if dtype == np.float16 and (scale, offset) != (1, 0):
        return oracle(source, np.float32, scale, offset).astype(np.float16)
    values = source.astype(dtype)
    if scale != 1:
        values = values * dtype.type(scale)
    if offset != 0:
        values = values + dtype.type(offset)
    return values


@pytest.mark.parametrize(("scale", "offset"), CASTS)
@pytest.mark.parametrize("target", ["f4", "f8", "c8"])
@pytest.mark.parametrize("source", [*INTEGERS, *FLOATS])
def test_converted_as_numpy_does(source, target, scale, offset):
    values = samples(source)
    out = np.full(len(values), 99, target)
    convert(values, out, Cast(np.dtype(target), scale, offset))
    expected = oracle(values, target, scale, offset)
    assert out.dtype == expected.dtype
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(("scale", "offset"), CASTS)
@pytest.mark.parametrize("source", ["i1", "u1", "?", "f2", "f4", "f8"])
def test_converted_to_half_precision_is_rounded_once(source, scale, offset):
    values = samples(source)
    out = np.empty(len(values), np.float16)
    convert(values, out, Cast(out.dtype, scale, offset))
    assert np.array_equal(out, oracle(values, np.float16, scale, offset))


def test_half_precision_scales_values_that_half_precision_could_not_hold():
    values = np.array([0, 100_000, -200_000], np.int32)
    out = np.empty(3, np.float16)
    convert(values, out, Cast(out.dtype, scale=1e-3, offset=1))
    assert out.tolist() == [1, 101, -199]


@pytest.mark.parametrize("target", ["i1", "u1", "i2", "u4", "i8", "?"])
@pytest.mark.parametrize("source", INTEGERS)
def test_converted_between_whole_numbers(source, target):
    values = samples(source)
    out = np.empty(len(values), target)
    convert(values, out, Cast(np.dtype(target)))
    assert np.array_equal(out, values.astype(target))


@pytest.mark.parametrize("target", ["f2", "f4"])
def test_converted_in_blocks_within_the_scratch_promised(target):
    values = noise(2 * BLOCK_ELEMENTS + 5)
    out = np.empty(len(values), target)
    prepare(convert_scratch_bytes(len(values), Cast(out.dtype, 1 / 255, -0.5)))
    convert(values, out, Cast(out.dtype, 1 / 255, -0.5))
    overflow = overflow_bytes()
    release()
    assert np.array_equal(out, oracle(values, target, 1 / 255, -0.5))
    assert overflow == 0


def test_nothing_to_convert():
    out = np.empty(0, np.float32)
    convert(np.empty(0, np.int16), out, Cast(out.dtype, 2.0))
    assert out.size == 0
