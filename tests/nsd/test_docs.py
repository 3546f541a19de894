"""The page's snippets run as they stand, on a synthetic subject."""

import re
import shlex
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.nsd import NSD, synthesize
from penstock.nsd.synthetic import Scale

PAGE = Path(__file__).parents[2] / "docs" / "nsd.md"
TUTORIAL = PAGE.parent / "tutorials" / "nsd-decoder.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("docs")
    scale = Scale((9, 11, 10), 24, 3, {1: 3, 2: 2}, shared=4, picture=16, region_voxels=60)
    synthesize(home / "my-nsd", scale)
    return home


def test_snippets_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = {"my_mask": NSD("my-nsd").voxels("V1").mask}
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) >= 4
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), names)
    assert len(names["voxels"])
    assert names["num_train"] + names["num_val"] == 24


@pytest.mark.slow
def test_the_tutorials_decoder_learns(tmp_path, monkeypatch, capsys):
    """Its commands and its programs, one after another: far more right than by chance."""
    monkeypatch.chdir(tmp_path)
    text = TUTORIAL.read_text()
    for command in re.findall(r"^penstock (.*?)(?: +#.*)?$", text, re.MULTILINE):
        assert main(shlex.split(command)) == 0
    names = {}
    for program in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(program, str(TUTORIAL), "exec"), names)
    right, chance = re.search(r"right: (\d+)%; by chance: (\d+)%", capsys.readouterr().out).groups()
    assert int(right) > 2 * int(chance)
