"""The reference names what there is, and all that is public; pages link to pages that are there."""

import importlib
import re
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAMED = sorted({name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)})


@pytest.mark.parametrize("name", NAMED)
def test_what_the_reference_names_is_there_and_explained(name):
    home, _, last = name.rpartition(".")
    try:
        found = importlib.import_module(name)
    except ImportError:
        found = getattr(importlib.import_module(home), last)
    assert found.__doc__


def test_all_that_is_public_is_in_the_reference():
    named = {name.rpartition(".")[2] for name in NAMED}
    assert set(penstock.__all__) <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_are_relative_and_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for goal in re.findall(r"\]\(([^)\s]+)\)", text):
        if not goal.startswith(("http://", "https://", "#")):
            assert (page.parent / goal.partition("#")[0]).exists(), goal


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in PAGES}
