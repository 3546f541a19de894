"""Pages tell the truth: "add a format" is run as it stands, and files that pages name exist."""

import re
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import penstock
import penstock as ps
import penstock.formats
from penstock.formats import registry

PAGE = Path(__file__).parents[2] / "docs" / "add-a-format.md"
BLOCKS = dict(re.findall(r"```(\w+)\n(\"\"\"Vectors.*?|\[project.*?)```", PAGE.read_text(), re.DOTALL))
CHECK = re.search(r"## Check it\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The page's module, as a package that pip would have installed."""
    (tmp_path / "my_format.py").write_text(BLOCKS["python"])
    about = tmp_path / "my_format-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-format\nVersion: 1.0\n")
    group, entry = BLOCKS["toml"].split("\n")[:2]
    assert group == '[project.entry-points."penstock.formats"]'
    (about / "entry_points.txt").write_text(f"[penstock.formats]\n{entry.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.plugin_formats.cache_clear()
    yield tmp_path
    sys.modules.pop("my_format", None)
    registry.plugin_formats.cache_clear()


def test_the_format_of_the_page(installed):
    assert len(BLOCKS["python"].splitlines()) <= 60
    assert CHECK is not None
    exec(compile(CHECK[1], str(PAGE), "exec"), {})  # what it asserts is in check_store


def test_the_chunks_of_the_page(tmp_path):
    """The fragment with ``Chunks``, over a file as it describes it."""
    (fragment,) = re.findall(r"```py\n(table = KnownTable.*?)```", PAGE.read_text(), re.DOTALL)
    values = np.broadcast_to(np.arange(1000, dtype="<f4")[:, None, None], (1000, 64, 64))
    stored = [zlib.compress(values[begin : begin + 10].tobytes(), 1) for begin in range(0, 1000, 10)]
    (tmp_path / "x.chunks").write_bytes(b"".join(stored))
    lengths = np.array([[len(each)] for each in stored])
    files = penstock.formats.Files()
    given = {name: getattr(penstock.formats, name) for name in ("Chunks", "KnownTable")}
    given |= {"np": np, "name": "x", "file": files.identify(str(tmp_path / "x.chunks"))}
    given |= {"lengths": lengths, "offsets": np.cumsum(lengths)[:, None] - lengths}
    exec(compile(fragment, str(PAGE), "exec"), given)
    rows = np.array([999, 0, 10, 457])
    out = np.empty((4, 64, 64), "f4")
    penstock.formats.ExtentStore({"x": given["array"]}, files).read_into(rows, np.arange(4), {"x": out})
    assert np.array_equal(out, values[rows])


def test_the_page_imports_from_the_public_modules_alone():
    sources = re.findall(r"^(?:from|import) (penstock[\w.]*)", PAGE.read_text(), re.MULTILINE)
    assert set(sources) <= {"penstock", "penstock.errors", "penstock.formats", "penstock.testing"}
    assert 'open(path, "rb")' not in PAGE.read_text(), "data files are opened by Files"


@pytest.mark.parametrize("name", penstock.formats.__all__)
def test_names_for_authors_of_formats_are_there_and_explained(name):
    assert getattr(penstock.formats, name).__doc__


def test_the_page_names_all_that_there_is_for_authors():
    known = set(re.findall(r"\w+", PAGE.read_text()))
    assert set(penstock.formats.__all__) - known <= {"FileId", "Files", "OpenOptions"}, "types of arguments"


def test_its_errors(installed):
    import my_format

    path = installed / "x.vecs"
    my_format.write(path, np.zeros((4, 3), "f4"))
    assert list(ps.open(path, fields=["v"]).fields) == ["v"]
    data = path.read_bytes()
    for bad, kind in [(data[:10], "Corrupt"), (data[:-1], "Truncated"), (b"VECS" + bytes(20), "Corrupt")]:
        path.write_bytes(bad)
        with pytest.raises(getattr(ps.errors, kind), match=r"x\.vecs"):
            ps.open(path)


def test_an_entry_point_that_is_no_format(installed):
    (installed / "my_format.py").write_text("VECS = 5")
    with pytest.raises(ps.errors.ConfigError, match=r"entry point 'vecs'.*expected a Format"):
        ps.open(PAGE)


ROOT = PAGE.parent.parent
TREE = ROOT / "src" / "penstock"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.-]+)`",
                                                       (ROOT / "CONTRIBUTING.md").read_text()))))  # fmt: skip
def test_files_that_contributors_are_told_to_read_exist(name):
    assert (ROOT / name).exists()


@pytest.mark.parametrize(("what", "most"), [("a format", 3), ("a codec", 2), ("another shuffle", 2),
                                            ("a step after batching", 3)])  # fmt: skip
def test_few_files_are_read_first(what, most):
    (row,) = re.findall(rf"^\| {what} \|(.*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert 1 <= row.count("`") // 2 <= most


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+/)+\w+(?:\.py)?)`",
                                                       (ROOT / "docs" / "design.md").read_text()))))  # fmt: skip
def test_modules_of_the_map_exist(name):
    assert (TREE / name).exists() or (ROOT / name).exists()


def test_the_map_lists_every_package():
    listed = re.findall(r"^\| `(\w+)(?:\.py)?` \|", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    there = {path.stem for path in TREE.iterdir() if path.suffix in ("", ".py") and not path.name.startswith("__")}
    assert set(listed) >= there


def test_the_version_to_cite_is_this_one():
    assert f"\nversion: {ps.__version__}\n" in (ROOT / "CITATION.cff").read_text()
