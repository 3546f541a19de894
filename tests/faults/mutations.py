"""Changes of files that know a little of how files are built, each a pure function of bytes and a random generator.

``fuzzing.py`` changes bits and bytes anywhere; here whole fields, records, regions and words of text are changed, most
of them in what describes the data. Rule: a change never looks at the clock or the disk, so (format, seed) makes the
same file again.
"""

import re
import struct
import zlib
from collections.abc import Callable, Sequence

import numpy as np

Spans = Sequence[Sequence[int]]
"""Ranges of a file's bytes: beginnings and ends."""

Rng = np.random.Generator


def pick(rng: Rng, choices: Sequence):
    return choices[int(rng.integers(len(choices)))]


def place(data: bytes, rng: Rng, focus: Spans, width: int = 1) -> int:
    """A byte to begin at, aligned to ``width``; three times of four within ``focus``."""
    begin, end = pick(rng, focus) if len(focus) and rng.random() < 0.75 else (0, len(data))
    at = int(rng.integers(begin, max(begin + 1, end)))
    return max(0, min(len(data) - width, at - at % width))


def size_of_run(data: bytes, at: int, rng: Rng) -> int:
    return int(min(2 ** rng.uniform(0, 10), max(1, len(data) - at)))


def set_field(data: bytes, rng: Rng, focus: Spans) -> bytes:
    """A number at an aligned place becomes a special one, its neighbour's, or one more or less."""
    width, order = int(pick(rng, (1, 2, 4, 8))), pick(rng, ("little", "little", "big"))
    at = place(data, rng, focus, width)
    now = int.from_bytes(data[at : at + width], order)
    beside = int.from_bytes(data[at + width : at + 2 * width], order)
    most = 256**width - 1
    number = pick(rng, (0, 1, most, most // 2, most // 2 + 1, now + 1, now - 1, beside, now * 2, now // 2, len(data)))
    return data[:at] + (number % (most + 1)).to_bytes(width, order)[: len(data) - at] + data[at + width :]


def swap_fields(data: bytes, rng: Rng, focus: Spans) -> bytes:
    width = int(pick(rng, (2, 4, 8)))
    one, other = sorted((place(data, rng, focus, width), place(data, rng, focus, width)))
    if other < one + width:
        return set_field(data, rng, focus)
    a, b = data[one : one + width], data[other : other + width]
    return data[:one] + b + data[one + width : other] + a + data[other + width :]


def copy_region(data: bytes, rng: Rng, focus: Spans) -> bytes:
    source, goal = place(data, rng, focus, 8), place(data, rng, focus, 8)
    length = min(size_of_run(data, source, rng), len(data) - max(source, goal))
    return data[:goal] + data[source : source + length] + data[goal + length :]


def insert_run(data: bytes, rng: Rng, focus: Spans) -> bytes:
    at = place(data, rng, focus)
    run = pick(rng, (b"\0", b"\xff", rng.bytes(7))) * size_of_run(data, at, rng)
    return data[:at] + run + data[at:]


def delete_run(data: bytes, rng: Rng, focus: Spans) -> bytes:
    at = place(data, rng, focus)
    return data[:at] + data[at + size_of_run(data, at, rng) :]


def cut_and_append(data: bytes, rng: Rng, focus: Spans) -> bytes:
    """As many bytes as before, or about as many, of which the last are others."""
    at = place(data, rng, focus)
    return data[:at] + pick(rng, (b"\0", b"\xff", data[:512])) * max(1, (len(data) - at) // pick(rng, (1, 8, 512)))


def duplicate_record(data: bytes, rng: Rng, focus: Spans) -> bytes:
    """An aligned stretch comes twice: pushed in, or written over what followed it."""
    width = int(pick(rng, (8, 16, 24, 46, 64, 512)))
    at = place(data, rng, focus, width)
    record = data[at : at + width]
    return data[: at + width] + record + data[at + width * pick(rng, (1, 2)) :]


BINARY: tuple[Callable[[bytes, Rng, Spans], bytes], ...] = (
    *(set_field,) * 5, *(swap_fields,) * 2, *(copy_region,) * 2, insert_run, delete_run, cut_and_append,
    *(duplicate_record,) * 2,
)  # fmt: skip


def mutate(data: bytes, rng: Rng, focus: Spans = (), other: bytes = b"") -> bytes:
    """One to three changes, or parts of another valid file of the kind."""
    if other and rng.random() < 0.07:
        at = place(data, rng, focus, 8)
        return data[:at] + other[at:] if rng.random() < 0.5 else data[:at] + other[at : at + 512] + data[at + 512 :]
    for _ in range(int(pick(rng, (1, 1, 1, 2, 3)))):
        if data:
            data = pick(rng, BINARY)(data, rng, focus)
    return data


NUMBER = re.compile(rb"(?<![\w.])-?\d+(?:\.\d+)?")
TEXT = re.compile(rb"\"[^\"\n]*\"|'[^'\n]*'")
ENTRY = re.compile(rb"[\"'][\w. -]+[\"']\s*:\s*(?:\[[^\[\]{}]*\]|\([^()]*\)|[\"'][^\"'\n]*[\"']|[-\w.]+)\s*,?")
NUMBERS = (
    b"0", b"-1", b"1", b"1.5", b"1e400", b"NaN", b"null", b"true", b"4294967296", b"-9223372036854775808",
    b"9" * 30, b"18446744073709551616", b"[]", b"3", b"1000000", b'"7"', b"{}",
)  # fmt: skip
TEXTS = (b'""', b'"|O"', b'"<f8"', b'"<i2"', b'">i2"', b'"|V0"', b'"../x"', b'"default"', b'"bytes"', b'"NaN"', b"5")


def mutate_text(data: bytes, rng: Rng) -> bytes:
    """Words of a document replaced, swapped, left out or said twice."""
    for _ in range(int(pick(rng, (1, 1, 2)))):
        data = pick(rng, (_number, _number, _number, _texts, _text, _left_out, _twice))(data, rng)
    return data


def _replaced(data: bytes, found: Sequence, rng: Rng, by: Sequence[bytes]) -> bytes:
    if not found:
        return data
    word = pick(rng, found)
    return data[: word.start()] + pick(rng, by) + data[word.end() :]


def _number(data: bytes, rng: Rng) -> bytes:
    return _replaced(data, list(NUMBER.finditer(data)), rng, NUMBERS)


def _text(data: bytes, rng: Rng) -> bytes:
    return _replaced(data, list(TEXT.finditer(data)), rng, TEXTS)


def _texts(data: bytes, rng: Rng) -> bytes:
    """One text becomes another of the same document."""
    found = list(TEXT.finditer(data))
    return _replaced(data, found, rng, [each[0] for each in found]) if found else data


def _left_out(data: bytes, rng: Rng) -> bytes:
    return _replaced(data, list(ENTRY.finditer(data)), rng, [b""])


def _twice(data: bytes, rng: Rng) -> bytes:
    """An entry comes again, with another value as a rule."""
    found = list(ENTRY.finditer(data))
    if not found:
        return data
    again = _number(pick(rng, found)[0].rstrip(b", \n") + b", ", rng)
    at = pick(rng, found).start()
    return data[:at] + again + data[at:]


def mutate_same_length(data: bytes, rng: Rng, focus: Spans) -> bytes:
    """A word of text becomes another of as many bytes, so that nothing else moves."""
    begin, end = pick(rng, focus) if len(focus) else (0, len(data))
    found = list(re.compile(rb"\d+|[a-z]+|'[^']*'").finditer(data, begin, end))
    if not found:
        return set_field(data, rng, focus)
    word = pick(rng, found)
    length = word.end() - word.start()
    others = (each[0][:length].ljust(length) for each in found)
    by = (b"9" * length, b"0" * length, b"-" + b"9" * (length - 1), b"7" * length, b" " * length, *others)
    return data[: word.start()] + pick(rng, by) + data[word.end() :]


# Checksums made right again, so that what is behind them is tried too.


def seal_tar(data: bytes) -> bytes:
    out = bytearray(data)
    for at in range(0, len(out) - 511, 512):
        if out[at + 257 : at + 262] == b"ustar":
            total = sum(out[at : at + 148]) + 8 * 32 + sum(out[at + 156 : at + 512])
            out[at + 148 : at + 156] = b"%06o\0 " % total
    return bytes(out)


def seal_png(data: bytes) -> bytes:
    out, at = bytearray(data), 8
    while at + 12 <= len(out):
        (length,) = struct.unpack_from(">I", out, at)
        if at + 12 + length > len(out):
            break
        struct.pack_into(">I", out, at + 8 + length, zlib.crc32(out[at + 4 : at + 8 + length]))
        at += 12 + length
    return bytes(out)


def lookup3(data: bytes) -> int:
    """Bob Jenkins' hash, by which HDF5 seals its newer structures."""
    full = 2**32 - 1

    def rot(value: int, by: int) -> int:
        return (value << by | value >> 32 - by) & full

    a = b = c = (0xDEADBEEF + len(data)) & full
    words = struct.unpack(f"<{-(-len(data) // 12) * 3}I", data.ljust(-(-len(data) // 12) * 12, b"\0"))
    for at in range(0, len(words), 3):
        a, b, c = (a + words[at]) & full, (b + words[at + 1]) & full, (c + words[at + 2]) & full
        if at + 3 == len(words):
            break
        a = (a - c) & full ^ rot(c, 4)
        c = (c + b) & full
        b = (b - a) & full ^ rot(a, 6)
        a = (a + c) & full
        c = (c - b) & full ^ rot(b, 8)
        b = (b + a) & full
        a = (a - c) & full ^ rot(c, 16)
        c = (c + b) & full
        b = (b - a) & full ^ rot(a, 19)
        a = (a + c) & full
        c = (c - b) & full ^ rot(b, 4)
        b = (b + a) & full
    for which, by in ((0, 14), (1, 11), (2, 25), (0, 16), (1, 4), (2, 14), (0, 24)):
        if which == 0:
            c = ((c ^ b) - rot(b, by)) & full
        elif which == 1:
            a = ((a ^ c) - rot(c, by)) & full
        else:
            b = ((b ^ a) - rot(a, by)) & full
    return c


HDF5_SIGNS = tuple(b"OHDR OCHK FAHD FADB EAHD EAIB EADB EASB BTHD BTLF BTIN FRHP".split())


def sealed_spans(data: bytes) -> list[list[int]]:
    """Where structures of an HDF5 file lie that end in a checksum of themselves, the checksum not counted."""
    begins = [match.start() for match in re.finditer(b"|".join(HDF5_SIGNS), data)]
    found = []
    for begin in [0, *begins]:
        for end in range(begin + 8, min(begin + 3000, len(data) - 3)):
            if struct.unpack_from("<I", data, end)[0] == lookup3(data[begin:end]):
                found.append([begin, end])
                break
    return found


def seal_hdf5(data: bytes, spans: Spans) -> bytes:
    out = bytearray(data)
    for begin, end in spans:
        if end + 4 <= len(out):
            struct.pack_into("<I", out, end, lookup3(bytes(out[begin:end])))
    return bytes(out)
