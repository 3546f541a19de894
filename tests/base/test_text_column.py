"""Many texts in one buffer, compared with a list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base import text_column
from penstock.base.text_column import TextColumn

some = st.lists(st.text(st.sampled_from("ab/ü\udcff\0"), max_size=4), max_size=20)


def made(words):
    raws = [word.encode("utf-8", "surrogateescape") for word in words]
    return TextColumn(np.frombuffer(b"".join(raws), np.uint8), np.cumsum([len(raw) for raw in raws], dtype=np.int64))


@given(some)
@settings(deadline=None)
def test_it_is_the_list(words):
    found = made(words)
    assert list(found) == words
    assert [found[index] for index in range(-len(words), len(words))] == words + words
    assert found[1:-1:2] == words[1:-1:2]
    assert [word.encode("utf-8", "surrogateescape") for word in words] == list(found.raws())
    assert "not there" not in found


@given(some)
@settings(deadline=None)
def test_each_is_found_where_it_first_is(words):
    found = made(words)
    assert [found.find(word) for word in words] == [words.index(word) for word in words]
    assert found.find("not there") is None
    assert found.find("\ud800") is None
    repeats = [index for index, word in enumerate(words) if word in words[:index]]
    assert found.first_repeat() == (repeats[0] if repeats else None)


def test_texts_with_the_same_checksum_are_told_apart(monkeypatch):
    monkeypatch.setattr(text_column.zlib, "crc32", lambda raw: 7)
    found = made(["a", "b", "c", "b"])
    assert [found.find(word) for word in "abcd"] == [0, 1, 2, None]
    assert found.first_repeat() == 3
    assert made(["a", "b", "c"]).first_repeat() is None


def test_more_than_are_cut_at_once():
    words = [str(number) for number in range(10_000)]
    assert list(made(words)) == words


def test_no_text_beyond_the_last():
    with pytest.raises(IndexError):
        made(["a"])[1]
    with pytest.raises(ValueError, match="where each ends"):
        TextColumn(np.zeros(3, np.uint8), np.array([2]))
