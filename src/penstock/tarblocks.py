"""Many usual tar headers at a time, where a loop in Python takes microseconds for each. Pure: blocks in, values out.

A usual header is that of a file with a short name and a size in digits, perhaps behind a block of pax records that say
nothing but the time to a fraction of a second. Where the first other one stands, this stops; whoever walks understands
that one and comes back.
"""

from dataclasses import dataclass

import numpy as np

from penstock.tarheader import BLOCK

_FILE, _RECORDS = ord("0"), ord("x")
_SPACES = 8 * ord(" ")
_OCTAL = 8 ** np.arange(10, -1, -1, dtype=np.int64)
_CHECKSUM_OCTAL = 8 ** np.arange(5, -1, -1, dtype=np.int64)
_LANES = np.uint64(0x00FF00FF00FF00FF)
_SAYING_MORE = (b"path=", b"size=", b"GNU.sparse.")


@dataclass(frozen=True)
class Usual:
    """Members found, and how many blocks they and their headers take."""

    names: np.ndarray
    """The bytes of all names, one after another."""
    name_lengths: np.ndarray
    bodies: np.ndarray
    """The block at which each member's bytes begin."""
    lengths: np.ndarray
    used: int
    """Blocks up to the first header that was not taken in; may lie beyond the last block."""

    def __len__(self) -> int:
        return len(self.lengths)


def usual(data: np.ndarray, blocks_left: int) -> Usual:
    """The usual members from the first header on, of an archive that has so many blocks from there."""
    count = len(data) // BLOCK
    blocks = data[: count * BLOCK].reshape(count, BLOCK)
    lengths = _lengths(blocks)
    heads, after = _chain(lengths, blocks[:, 156])
    rows = blocks[heads]
    lengths = lengths[heads]
    plain = (rows[:, 156] == _FILE) & (rows[:, 345] == 0) & (rows[:, 99] == 0)
    records = (rows[:, 156] == _RECORDS) & (lengths <= BLOCK) & (heads + 1 < count)
    taken = (plain | records) & _checksums_hold(rows)
    taken &= heads + 1 + -(-lengths // BLOCK) <= blocks_left
    if records.any():
        taken[records] &= _say_little(blocks[heads[records] + 1], lengths[records])
    if not taken.all():
        first = int(taken.argmin())
        heads, after = heads[:first], int(heads[first])
    if len(heads) and records[len(heads) - 1]:  # they belong to a member that was not taken in
        heads, after = heads[:-1], int(heads[-1])
    members = np.flatnonzero(plain[: len(heads)])
    names = rows[members, :100]
    name_lengths = (names == 0).argmax(axis=1)
    letters = names[np.arange(100) < name_lengths[:, None]]
    return Usual(letters, name_lengths, heads[members] + 1, lengths[members], after)


def _lengths(blocks: np.ndarray) -> np.ndarray:
    """The size that each block would declare if it were a header; -1 where it is not in eleven digits."""
    digits = blocks[:, 124:135] - np.uint8(ord("0"))
    written = (digits <= 7).all(axis=1) & (blocks[:, 135] <= ord(" "))
    return np.where(written, digits @ _OCTAL, -1)


def _chain(lengths: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, int]:
    """The blocks that are headers if each says truly how long its body is, and the block after the last."""
    steps = np.where((lengths >= 0) & ((kinds == _FILE) | (kinds == _RECORDS)), 1 + -(-lengths // BLOCK), 0).tolist()
    heads, at, count = [], 0, len(steps)
    while at < count and (step := steps[at]):
        heads.append(at)
        at += step
    return np.array(heads, np.int64), at


def _checksums_hold(rows: np.ndarray) -> np.ndarray:
    """Which headers have the checksum that they store, in six digits."""
    words = rows.view(np.uint64)
    lanes = ((words & _LANES) + (words >> np.uint64(8) & _LANES)).sum(axis=1)  # four sums of 16 bits, none overflows
    sums = lanes.view(np.uint16).reshape(len(rows), 4).sum(axis=1, dtype=np.int64)
    field = rows[:, 148:156]
    digits = field[:, :6] - np.uint8(ord("0"))
    written = (digits <= 7).all(axis=1) & (field[:, 6:] <= ord(" ")).all(axis=1)
    return np.asarray(written & (digits @ _CHECKSUM_OCTAL == sums - field.sum(axis=1, dtype=np.int64) + _SPACES))


def _say_little(bodies: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Which records neither name nor measure the member behind them."""
    text = bodies[:, : lengths.max()]
    if not any(word in text.tobytes() for word in _SAYING_MORE):
        return np.ones(len(bodies), bool)
    said = (row[:length].tobytes() for row, length in zip(bodies, lengths.tolist(), strict=True))
    return np.array([not any(word in each for word in _SAYING_MORE) for each in said])
