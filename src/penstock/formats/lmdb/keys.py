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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.base.text_column import TextColumn, cut, decoded, same_as_before
from penstock.formats.tar.members import MemberTable
from penstock.formats.tar.samples import NOT_THERE, SampleTable, find_dots

# With more fields than this, or if more than a fifth of the samples lack one, the parts are names of samples.
MOST_FIELDS = 64
MOST_CELLS_PER_KEY = 1.25

# Keys about the database itself: ``__len__`` and ``__keys__`` come from tensorpack, ``num-samples`` from text
# recognition, ``length`` from image generation.
_ABOUT = re.compile(rb"__\w+__|(num|n|total)?[-_]?(samples|examples)|(sample[-_])?(count|length|len|size|keys)", re.I)

_SEPARATORS = "-_/:. "

# Longer digits exceed 64 bits: they are a name, not a number.
MOST_DIGITS = 18

# How the names that ``_ABOUT`` matches can end: only keys that end so are compared with it.
_ABOUT_ENDS = np.frombuffer(b"_shtneSHTNE", np.uint8)


class _Split(NamedTuple):
    """Where in the buffer of all keys the parts of each key are."""

    sample_begins: np.ndarray
    sample_ends: np.ndarray
    field_begins: np.ndarray
    field_ends: np.ndarray
    pattern: Callable[[bytes], bytes]
    """From the bytes of a field to its pattern."""
    is_numbered: bool = True
    """Whether samples are numbers."""


def group(members: MemberTable, is_known: Callable[[str], bool]) -> SampleTable:
    """Group keys into samples; ``is_known`` recognises suffixes that determine the kind of a value."""
    about = _find_about_database(members.names)
    kept = members
    if len(about):
        rows = np.delete(np.arange(len(members)), about)
        kept = MemberTable(members.path, members.names.take(rows), members.offsets[rows], members.lengths[rows])
    for split in (_split_at_dot, _split_number_last, _split_number_first):
        parts = split(kept.names) if len(kept) else None
        found = parts and _group_by(kept, parts, is_known, len(about))
        if found:
            return found
    return SampleTable(
        kept.path, ("*",), kept.names, kept.offsets[:, None], kept.lengths[:, None], passed_over=len(about)
    )


def _find_about_database(keys: TextColumn) -> np.ndarray:
    """Which keys are about the database itself."""
    filled = np.flatnonzero(keys.ends > keys.begins)
    likely = filled[np.isin(keys.buffer[keys.ends[filled] - 1], _ABOUT_ENDS)]
    return np.array([each for each in likely.tolist() if _ABOUT.fullmatch(keys.raw(each))], np.int64)


def side_by_side(databases: Sequence[tuple[str, MemberTable]]) -> SampleTable | None:
    """One field per database; None if their keys differ."""
    _, first = databases[0]
    for _, other in databases[1:]:
        if not np.array_equal(first.names.ends, other.names.ends):
            return None
        if not np.array_equal(first.names.buffer, other.names.buffer):
            return None
    order = (
        np.arange(len(first)) if (numbers := _find_numbers(first.names)) is None else np.argsort(numbers, kind="stable")
    )
    offsets = np.stack([each.offsets[order] for _, each in databases], axis=1)
    lengths = np.stack([each.lengths[order] for _, each in databases], axis=1)
    patterns = tuple(f"{name}:*" for name, _ in databases)
    return SampleTable(first.path, patterns, first.names.take(order), offsets, lengths)


def _find_numbers(keys: TextColumn) -> np.ndarray | None:
    """The numbers at the end of keys, if all have the same prefix."""
    parts = _split_number_last(keys) if len(keys) else None
    if parts is None or not same_as_before(keys.buffer, parts.field_begins, parts.field_ends)[1:].all():
        return None
    return _parse_digits(keys.buffer, parts.sample_begins, parts.sample_ends)


def field_names(patterns: Sequence[str]) -> list[str]:
    """``image-*`` becomes ``image``. An empty name stays empty."""
    short = [pattern.replace("*", "", 1).strip(_SEPARATORS).lower() for pattern in patterns]
    return short if len(set(short)) == len(short) else list(patterns)


def _split_at_dot(keys: TextColumn) -> _Split | None:
    """``000012.jpg``; None if some key has no dot."""
    begins, ends = keys.begins, keys.ends
    dots = find_dots(keys.buffer, begins, ends)
    if (dots < 0).any():
        return None
    return _Split(begins, dots, dots + 1, ends, lambda field: b"*." + field, is_numbered=False)


def _split_number_last(keys: TextColumn) -> _Split | None:
    """``image-12``; None if some key does not end with a number."""
    begins, ends = keys.begins, keys.ends
    others = np.append(-1, np.flatnonzero(~_is_digit(keys.buffer)))
    last = others[np.searchsorted(others, ends) - 1]
    numbers = np.maximum(np.maximum(last + 1, begins), ends - MOST_DIGITS)
    if (numbers == ends).any():
        return None
    return _Split(numbers, ends, begins, numbers, lambda field: field + b"*")


def _split_number_first(keys: TextColumn) -> _Split | None:
    """``12_image``; None if some key does not begin with a number."""
    begins, ends = keys.begins, keys.ends
    is_digit = _is_digit(keys.buffer)
    others = np.append(np.flatnonzero(~is_digit), len(is_digit))
    after = others[np.searchsorted(others, begins)]
    digits = after - begins
    if (digits < 1).any() or (digits > MOST_DIGITS).any() or (after + 1 >= ends).any():
        return None
    if not np.isin(keys.buffer[after], np.frombuffer(b"-_/:", np.uint8)).all() or is_digit[after + 1].any():
        return None
    return _Split(begins, after, after, ends, lambda field: b"*" + field)


def _is_digit(letters: np.ndarray) -> np.ndarray:
    return (letters >= ord("0")) & (letters <= ord("9"))


def _parse_digits(letters: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The numbers that digits stand for."""
    values = np.zeros(len(begins), np.int64)
    for place in range(int((ends - begins).max())):
        here = begins + place
        values = np.where(here < ends, 10 * values + letters[np.minimum(here, ends - 1)] - ord("0"), values)
    return values


def _group_by(
    members: MemberTable, parts: _Split, is_known: Callable[[str], bool], passed_over: int
) -> SampleTable | None:
    """The samples, if there are few fields, all of a known kind unless samples are numbered, that most samples have."""
    letters = members.names.buffer
    found = _assign_columns(letters, parts)
    if found is None:
        return None
    fields, columns = found
    if parts.is_numbered:
        samples = _parse_digits(letters, parts.sample_begins, parts.sample_ends)
    elif all(is_known(decoded(field).lower()) for field in fields):
        samples = np.cumsum(~same_as_before(letters, parts.sample_begins, parts.sample_ends))
    else:
        return None
    which, first, rows = np.unique(samples, return_index=True, return_inverse=True)
    keys = cut(letters, parts.sample_begins[first], parts.sample_ends[first])
    cells = len(which) * len(fields)
    if cells > MOST_CELLS_PER_KEY * len(members) or keys.first_repeat() is not None:
        return None
    at = rows * len(fields) + columns
    if len(np.unique(at)) != len(at):  # 1 and 01: names after all
        return None
    offsets = np.full(cells, NOT_THERE, np.int64)
    lengths = offsets.copy()
    offsets[at], lengths[at] = members.offsets, members.lengths
    shape = (len(which), len(fields))
    patterns = tuple(decoded(parts.pattern(field)) for field in fields)
    return SampleTable(
        members.path, patterns, keys, offsets.reshape(shape), lengths.reshape(shape), passed_over=passed_over
    )


def _assign_columns(letters: np.ndarray, parts: _Split) -> tuple[list[bytes], np.ndarray] | None:
    """The different fields, and which of them each key has; None if there are too many."""
    fields: dict[bytes, int] = {}
    heads = np.flatnonzero(~same_as_before(letters, parts.field_begins, parts.field_ends))
    columns, text = [], letters.tobytes()
    for begin, end in zip(parts.field_begins[heads].tolist(), parts.field_ends[heads].tolist(), strict=True):
        columns.append(fields.setdefault(text[begin:end], len(fields)))
        if len(fields) > MOST_FIELDS:
            return None
    return list(fields), np.repeat(columns, np.diff(heads, append=len(parts.field_begins)))
