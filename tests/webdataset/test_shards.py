"""Which shards are meant."""

import io
import os
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, Unavailable
from penstock.formats.paths import expand_braces
from penstock.webdataset import shards as names
from penstock.webdataset.shards import expand, expand_urls, scheme_of

BRACES = {
    "a.tar": ["a.tar"],
    "t_{000..002}.tar": ["t_000.tar", "t_001.tar", "t_002.tar"],
    "{8..11}": ["8", "9", "10", "11"],
    "{08..11..2}": ["08", "10"],
    "{3..1}": ["3", "2", "1"],
    "{-1..1}": ["-1", "0", "1"],
    "{a..c}": ["a", "b", "c"],
    "{train,val}-{0..1}": ["train-0", "train-1", "val-0", "val-1"],
    "{a,{1..2},c}": ["a", "1", "2", "c"],
    "{a,}x": ["ax", "x"],
    "{x}": ["{x}"],
    "{}": ["{}"],
    r"\{a,b\}": ["{a,b}"],
    r"{a\,b,c}": ["a,b", "c"],
    "{1.5..2}": ["{1.5..2}"],
}


@pytest.mark.parametrize(("pattern", "expanded"), BRACES.items(), ids=BRACES)
def test_braces(pattern, expanded):
    assert list(expand_braces(pattern)) == expanded


@pytest.mark.parametrize("pattern", ["a{b", "a}b", "{a,{b}", "}{"])
def test_braces_without_partner(pattern):
    with pytest.raises(ConfigError, match="brace"):
        list(expand_braces(pattern))


@given(st.lists(st.sampled_from(["{", "}", ",", "..", "0", "12", "-", "a", "/", "{0..2}", "{a,b}"]), max_size=8))
def test_braces_agree_with_their_package(pieces):
    package = pytest.importorskip("braceexpand")
    pattern = "".join(pieces)
    try:
        ours = list(expand_braces(pattern))
    except ConfigError:  # theirs lets some pass that open and close as often, in the wrong order
        return
    assert ours == list(package.braceexpand(pattern))


def test_patterns_joined():
    assert expand_urls("a-{0..1}.tar::b.tar") == ["a-0.tar", "a-1.tar", "b.tar"]


def test_the_environment(monkeypatch):
    monkeypatch.setenv("WDS_ROOT", "/data/${YEAR}")
    monkeypatch.setenv("WDS_YEAR", "2024")
    assert expand_urls("${ROOT}/x-{0..1}.tar") == ["/data/2024/x-0.tar", "/data/2024/x-1.tar"]
    monkeypatch.delenv("WDS_YEAR")
    with pytest.raises(ConfigError, match=r"\$\{YEAR\}, set the environment variable WDS_YEAR"):
        expand_urls("${ROOT}/x.tar")


def test_every_way_of_naming_shards():
    stream = io.BytesIO()
    assert [shard["url"] for shard in expand("x-{0..1}.tar")] == ["x-0.tar", "x-1.tar"]
    assert [shard["url"] for shard in expand(["x-{0..1}.tar", Path("y.tar")])] == ["x-{0..1}.tar", "y.tar"]
    assert [shard["url"] for shard in expand(Path("y.tar"))] == ["y.tar"]
    assert [shard["url"] for shard in expand(iter(["a", "b"]))] == ["a", "b"]
    (only,) = expand(stream)
    assert only["url"] == "<stream 0>"
    assert only["stream"].take() is stream
    with open(os.devnull, "rb") as named:
        assert expand([named])[0]["url"] == os.devnull


def test_a_file_object_gives_its_bytes_once():
    (shard,) = expand(io.BytesIO())
    shard["stream"].take()
    with pytest.raises(Unavailable, match="was read already"):
        shard["stream"].take()


@pytest.mark.parametrize("urls", [None, 7, [], [3], {"datasets": []}], ids=repr)
def test_what_names_no_shards(urls):
    with pytest.raises(ConfigError, match=r"shards|expected"):
        expand(urls)


@pytest.mark.parametrize("url", ["pipe:cat x.tar", "pipe:curl x | tee y", ["a.tar", "pipe:touch marker"]], ids=str)
def test_commands_are_refused_when_named(url):
    with pytest.raises(ConfigError, match="scheme pipe: would run a command"):
        expand(url)


def test_a_folder_is_not_a_shard():
    with pytest.raises(ConfigError, match="is a folder"):
        expand("data/")


def test_a_pattern_of_too_many(monkeypatch):
    monkeypatch.setattr(names, "MAX_SHARDS", 50)
    assert len(expand_urls("{0..9}{0..4}")) == 50
    with pytest.raises(ConfigError, match="more than 50 shards"):
        expand_urls("{0..9}{0..999999}")
    assert list(islice(expand_braces("{0..999999999999}"), 2)) == ["0", "1"], "none is made before it is asked for"


@pytest.mark.parametrize(
    ("url", "scheme"), [("a.tar", ""), ("C:/a.tar", ""), ("http://x", "http"), ("S3://x", "s3"), ("/a:b", "")]
)
def test_schemes(url, scheme):
    assert scheme_of(url) == scheme
