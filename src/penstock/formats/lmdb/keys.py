"""Groups the keys of a key-value database into samples, by the usual ways of naming them.

1. ``000012.jpg``, ``000012.cls``: as in tar archives, if every suffix is a known one.
2. ``image-000000012``, ``label-000000012``: the text before the number is the field, the number is the sample.
3. ``12_image``, ``12_label``: the other way round.
4. Anything else: every key is a sample, and there is one field.

Numbered samples are in the order of their numbers, so that row 10 is key ``10`` and not ``2``; others in the order of
the database. Keys that count or list the samples (``num-samples``, ``__len__``) are skipped, and counted.

A field is kept as a pattern, ``image-*``, so that every value can be named as the database names it.
"""

import re
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from penstock.base.text_column import TextColumn, decoded
from penstock.formats.tar.members import MemberTable
from penstock.formats.tar.samples import NOT_THERE, SampleTable, split_name

# Beyond so many fields, or if more than a fifth of the samples lack one, the parts are names of samples.
MOST_FIELDS = 64
MOST_CELLS_PER_KEY = 1.25

# Keys about the database itself: ``__len__`` and ``__keys__`` come from tensorpack, ``num-samples`` from text
# recognition, ``length`` from image generation.
_ABOUT = re.compile(rb"__\w+__|(num|n|total)?[-_]?(samples|examples)|(sample[-_])?(count|length|len|size|keys)", re.I)

_SEPARATORS = "-_/:. "

# Digits that exceed 64 bits are a name, not a number.
_NUMBER_LAST = re.compile(rb"(.*?)([0-9]{1,18})", re.DOTALL)
_NUMBER_FIRST = re.compile(rb"([0-9]{1,18})([-_/:][^0-9].*)", re.DOTALL)

_Split = Callable[[bytes], tuple[bytes, bytes] | None]
"""From a key to the pattern of its field and its sample; None if it has no such parts."""


def group(members: MemberTable, is_known: Callable[[str], bool]) -> SampleTable:
    """Group keys into samples; ``is_known`` recognises suffixes that determine the kind of a value."""
    about = np.fromiter((_ABOUT.fullmatch(key) is not None for key in members.names.raws()), bool, len(members))
    kept, passed_over = _only(members, ~about), int(np.count_nonzero(about))
    ways: list[tuple[_Split, bool]] = [(_ending(is_known), False), (_number_last, True), (_number_first, True)]
    for split, numbered in ways:
        found = _grouped(kept, split, numbered, passed_over)
        if found is not None:
            return found
    return SampleTable(
        kept.path, ("*",), kept.names, kept.offsets[:, None], kept.lengths[:, None], passed_over=passed_over
    )


def side_by_side(databases: Sequence[tuple[str, MemberTable]]) -> SampleTable | None:
    """One field per database; None if their keys differ."""
    _, first = databases[0]
    for _, other in databases[1:]:
        if not np.array_equal(first.names.ends, other.names.ends):
            return None
        if not np.array_equal(first.names.buffer, other.names.buffer):
            return None
    numbers = _numbers(first.names)
    order = np.arange(len(first)) if numbers is None else np.argsort(numbers, kind="stable")
    offsets = np.stack([each.offsets[order] for _, each in databases], axis=1)
    lengths = np.stack([each.lengths[order] for _, each in databases], axis=1)
    patterns = tuple(f"{name}:*" for name, _ in databases)
    return SampleTable(first.path, patterns, _taken(first.names, order), offsets, lengths)


def _numbers(keys: TextColumn) -> np.ndarray | None:
    """The numbers at the end of keys, if all have the same prefix."""
    found, prefix = array("q"), None
    for key in keys.raws():
        parts = _NUMBER_LAST.fullmatch(key)
        if parts is None or parts[1] != (prefix if found else parts[1]):
            return None
        prefix = parts[1]
        found.append(int(parts[2]))
    return np.frombuffer(found, np.int64)


def field_names(patterns: Sequence[str]) -> list[str]:
    """``image-*`` becomes ``image``. An empty name stays empty."""
    short = [pattern.replace("*", "", 1).strip(_SEPARATORS).lower() for pattern in patterns]
    return short if len(set(short)) == len(short) else list(patterns)


def _ending(is_known: Callable[[str], bool]) -> _Split:
    def split(key: bytes) -> tuple[bytes, bytes] | None:
        parts = split_name(key)
        return (b"*." + parts[1], parts[0]) if parts and is_known(decoded(parts[1]).lower()) else None

    return split


def _number_last(key: bytes) -> tuple[bytes, bytes] | None:
    parts = _NUMBER_LAST.fullmatch(key)
    return (parts[1] + b"*", parts[2]) if parts else None


def _number_first(key: bytes) -> tuple[bytes, bytes] | None:
    parts = _NUMBER_FIRST.fullmatch(key)
    return (b"*" + parts[2], parts[1]) if parts else None


def _grouped(members: MemberTable, split: _Split, numbered: bool, passed_over: int) -> SampleTable | None:
    """The samples, if every key splits in this way and samples have most fields."""
    fields: dict[bytes, int] = {}
    columns, samples, texts, ends = array("i"), array("q"), bytearray(), array("q")
    before: bytes | None = None
    for key in members.names.raws():
        parts = split(key)
        if parts is None or len(fields) > MOST_FIELDS:
            return None
        pattern, sample = parts
        columns.append(fields.setdefault(pattern, len(fields)))
        samples.append(int(sample) if numbered else len(samples) and samples[-1] + (sample != before))
        texts += sample
        ends.append(len(texts))
        before = sample
    names = TextColumn(np.frombuffer(texts, np.uint8), np.frombuffer(ends, np.int64))
    which, first, rows = np.unique(np.frombuffer(samples, np.int64), return_index=True, return_inverse=True)
    keys = _taken(names, first)
    cells = len(which) * len(fields)
    if not cells or cells > MOST_CELLS_PER_KEY * len(members) or keys.first_repeat() is not None:
        return None
    at = rows * len(fields) + np.frombuffer(columns, np.int32)
    if len(np.unique(at)) != len(at):  # 1 and 01: names after all
        return None
    offsets = np.full(cells, NOT_THERE, np.int64)
    lengths = offsets.copy()
    offsets[at], lengths[at] = members.offsets, members.lengths
    shape = (len(which), len(fields))
    patterns = tuple(decoded(pattern) for pattern in fields)
    return SampleTable(
        members.path, patterns, keys, offsets.reshape(shape), lengths.reshape(shape), passed_over=passed_over
    )


def _only(members: MemberTable, kept: np.ndarray) -> MemberTable:
    if kept.all():
        return members
    rows = np.flatnonzero(kept)
    return MemberTable(members.path, _taken(members.names, rows), members.offsets[rows], members.lengths[rows])


def _taken(texts: TextColumn, rows: np.ndarray) -> TextColumn:
    begins = np.concatenate([[0], texts.ends[:-1]]).astype(np.int64)
    sizes = (texts.ends - begins)[rows]
    ends = np.cumsum(sizes)
    at = np.repeat(begins[rows] - (ends - sizes), sizes) + np.arange(int(sizes.sum()))
    return TextColumn(texts.buffer[at], ends)
