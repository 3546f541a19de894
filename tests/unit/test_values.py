"""What values of no fixed size take in memory stays below what is planned for them, whatever they say."""

import io
import tracemalloc

import numpy as np
import pytest

from penstock import values


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def several(text, count):
    return f"[{','.join([text] * count)}]".encode()


COSTLY = {
    "text with a rare letter": (values.TEXT, ("a" * 100_000 + "\U0001f600").encode()),
    "lists in lists": (values.JSON, several("[" * 500 + "]" * 500, 100)),
    "lists of lists": (values.JSON, several("[[]]", 10_000)),
    "empty lists": (values.JSON, several("[]", 10_000)),
    "empty dicts": (values.JSON, several("{}", 10_000)),
    "dicts in dicts": (values.JSON, several('{"":' * 300 + "0" + "}" * 300, 100)),
    "dicts of one": (values.JSON, several('{"":0}', 10_000)),
    "dicts of six": (values.JSON, several('{"a":0,"b":0,"c":0,"d":0,"e":0,"f":0}', 10_000)),
    "many keys": (values.JSON, ("{" + ",".join(f'"{number}":0' for number in range(20_000)) + "}").encode()),
    "numbers": (values.JSON, several("999", 10_000)),
    "fractions": (values.JSON, several("1.5", 10_000)),
    "escaped letters": (values.JSON, several('"\\u1234"', 10_000)),
    "bytes": (values.BYTES, bytes(100_000)),
    "arrays": (values.ARRAYS, npz(a=np.zeros(10_000), b=np.zeros(3))),
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
