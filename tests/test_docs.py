"""The page "add a format" is right: what it shows is run as it stands."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.formats import registry

PAGE = Path(__file__).parent.parent / "docs" / "add-a-format.md"
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
    registry.of_others.cache_clear()
    yield tmp_path
    sys.modules.pop("my_format", None)
    registry.of_others.cache_clear()


def test_the_format_of_the_page(installed):
    assert len(BLOCKS["python"].splitlines()) <= 60
    assert CHECK is not None
    exec(compile(CHECK[1], str(PAGE), "exec"), {})  # what it asserts is in check_store


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
