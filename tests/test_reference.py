"""The reference names what there is, and all that is public; pages link to pages that are there."""

import importlib
import inspect
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
    whole = {name for name in penstock.__all__ if f"penstock.{_home(name)}" in NAMED}  # modules that are shown whole
    assert set(penstock.__all__) <= named | whole


# What of these classes is for other modules alone.
INTERNAL = {
    "Loader": {"origin"},
    "MultiLoader": {"mode"},
    "Dataset": {"store", "casts", "axes", "delivered"},
    "FieldSpec": {"empty"},
    "Plan": {"shares", "batches_filled_together", "batches_per_read", "window_batches", "limit_note"},
}


def _members(name: str) -> set[str]:
    text = "".join(page.read_text() for page in PAGES)
    listed = re.search(
        rf"^::: [\w.]+\.{name}\n    options:\n      members:\n((?:        - \w+\n)+)", text, re.MULTILINE
    )
    return set(re.findall(r"- (\w+)", listed[1])) if listed else set()


@pytest.mark.parametrize("name", INTERNAL)
def test_the_reference_hides_what_is_for_other_modules(name):
    members = _members(name)
    assert members
    assert not members & INTERNAL[name]


@pytest.mark.parametrize("name", INTERNAL)
def test_members_that_the_reference_shows_are_there(name):
    shown = getattr(penstock, name)
    source = inspect.getsource(importlib.import_module(shown.__module__))
    for member in _members(name):
        assert hasattr(shown, member) or re.search(rf"^\s+(self\.)?{member}\b.*[:=]", source, re.MULTILINE), member


def _home(name: str) -> str:
    return getattr(getattr(penstock, name), "__module__", "").removeprefix("penstock.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_are_relative_and_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for goal in re.findall(r"\]\(([^)\s]+)\)", text):
        if not goal.startswith(("http://", "https://", "#")):
            assert (page.parent / goal.partition("#")[0]).exists(), goal


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"(?:- |: )([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in PAGES}
