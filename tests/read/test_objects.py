"""What values of no fixed size take in memory stays below what is planned for them, whatever they say."""

import io
import random
import tracemalloc
import zipfile

import numpy as np
import pytest

from penstock.errors import DecodeFailed, PenstockError
from penstock.read import objects


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def several(text, count):
    return f"[{','.join([text] * count)}]".encode()


def packed_list(item, count):
    return b"\xdc" + count.to_bytes(2, "big") + item * count


COSTLY = {
    "text with a rare letter": (objects.TEXT, ("a" * 100_000 + "\U0001f600").encode()),
    "lists in lists": (objects.JSON, several("[" * 500 + "]" * 500, 100)),
    "lists of lists": (objects.JSON, several("[[]]", 10_000)),
    "empty lists": (objects.JSON, several("[]", 10_000)),
    "empty dicts": (objects.JSON, several("{}", 10_000)),
    "dicts in dicts": (objects.JSON, several('{"":' * 300 + "0" + "}" * 300, 100)),
    "dicts of one": (objects.JSON, several('{"":0}', 10_000)),
    "dicts of six": (objects.JSON, several('{"a":0,"b":0,"c":0,"d":0,"e":0,"f":0}', 10_000)),
    "many keys": (objects.JSON, ("{" + ",".join(f'"{number}":0' for number in range(20_000)) + "}").encode()),
    "numbers": (objects.JSON, several("999", 10_000)),
    "fractions": (objects.JSON, several("1.5", 10_000)),
    "escaped letters": (objects.JSON, several('"\\u1234"', 10_000)),
    "msgpack lists in lists": (objects.MSGPACK, packed_list(b"\x91" * 400 + b"\xc0", 100)),
    "msgpack empty dicts": (objects.MSGPACK, packed_list(b"\x80", 10_000)),
    "msgpack dicts in dicts": (objects.MSGPACK, packed_list(b"\x81\xa0" * 300 + b"\xc0", 100)),
    "msgpack extensions": (objects.MSGPACK, packed_list(b"\xd4\x05\x00", 10_000)),
    "bytes": (objects.BYTES, bytes(100_000)),
    "arrays": (objects.ARRAYS, npz(a=np.zeros(10_000), b=np.zeros(3))),
}


@pytest.mark.parametrize("case", COSTLY)
def test_a_value_takes_no_more_than_planned(case):
    kind, data = COSTLY[case]
    if tracemalloc.is_tracing():
        pytest.skip("somebody else traces")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        value = kind.decode(data)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert value is not None
    assert taken <= kind.most_bytes(len(data)), f"{taken / len(data):.1f} bytes for each byte stored"


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01", b"\x01\x01", b"\x91" * 5000 + b"\xc0", b"\xa2\xff\xff"])
def test_what_is_not_msgpack_is_told(data):
    with pytest.raises(DecodeFailed, match="not msgpack"):
        objects.MSGPACK.decode(data)


def packed(method):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        inner = io.BytesIO()
        np.save(inner, np.arange(50))
        archive.writestr("a.npy", inner.getvalue())
    return stream.getvalue()


@pytest.mark.filterwarnings("ignore")  # numpy's, of what mutants say in their headers
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_npz_is_an_error_of_ours(method):
    """Only those can be left out of a batch."""
    rng, whole, failed = random.Random(0), packed(method), 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 4])):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 255, rng.randrange(256)])
        try:
            objects.as_arrays(bytes(data))
        except PenstockError:
            failed += 1
    assert failed > 50
