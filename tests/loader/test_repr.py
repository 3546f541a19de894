"""What a terminal and a notebook show of things: readable, and escaped where it comes from files."""

import base64
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock as ps

EVIL = "<script>alert(1)</script>"


def dataset() -> ps.Dataset:
    return ps.join(image=np.zeros((12, 2, 3), np.uint8), **{EVIL: np.arange(12)})


def loader() -> ps.Loader:
    return ps.Loader(dataset(), batch_size=4, shuffle=True, memory="64MiB", output="numpy")


def multi() -> ps.MultiLoader:
    parts = {"one": dataset(), EVIL: dataset()}
    return ps.MultiLoader(parts, mode="together", batch_size=4, memory="64MiB", output="numpy")


def stats() -> ps.Stats:
    with loader() as batches:
        list(batches)
        return batches.stats()


def forecast() -> Any:
    return ps.plan(dataset(), batch_size=4, memory="64MiB", measure=0)


SHOWN: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "dataset": (dataset, ("Dataset of 12 rows", "image: uint8 (2, 3)")),
    "loader": (loader, ("Loader: 3 batches of 4 samples", "image: uint8 (2, 3)", "64.0 MiB", "epoch 0, 0 of 12")),
    "multi": (multi, ("MultiLoader of 2 datasets", "one: 3 batches of 4", "64.0 MiB")),
    "plan": (lambda: loader().plan, ("batches ", "planned ", "budget ")),
    "joint plan": (lambda: multi().plan, ("planned ", "budget ", EVIL)),
    "forecast": (forecast, ("penstock would hold", "Advice")),
    "stats": (stats, ("epoch 0: 12 samples", "\n  memory: ", "\n  bottleneck: ")),
    "report": (lambda: stats().report, ("checked",)),
    "inspection": (lambda: ps.inspect(dataset()), ("12 rows", "image: uint8 (2, 3)")),
}

# What these are about has names from files in it.
WITH_FIELDS = {"dataset", "loader", "multi", "joint plan", "forecast", "inspection"}


class Tags(HTMLParser):
    """Which elements there are, and whether each is closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("what", SHOWN)
def test_in_a_terminal(what: str) -> None:
    make, expected = SHOWN[what]
    text = repr(make())
    for told in expected:
        assert told in text
    assert "dtype=" not in text
    assert " object at 0x" not in text


@pytest.mark.parametrize("what", SHOWN)
def test_in_a_notebook(what: str) -> None:
    shown = Tags(SHOWN[what][0]()._repr_html_())
    assert shown.open == []
    assert set(shown.seen) <= {"table", "thead", "tbody", "tr", "th", "td", "p", "br", "div", "img"}
    assert "table" in shown.seen or what == "report"
    if what in WITH_FIELDS:
        assert EVIL in shown.text, "as text, not as an element"


def first_picture(shown: str) -> np.ndarray:
    found = re.search(r"src='data:image/png;base64,([^']+)'", shown)
    assert found is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found[1]))))


def test_pictures_are_shown_small() -> None:
    pictures = np.random.default_rng(0).integers(0, 255, (9, 200, 90, 3), np.uint8)
    ds = ps.from_arrays(picture=pictures)
    shown = ds._repr_html_()
    assert shown.count("<img") == 4
    assert np.array_equal(first_picture(shown), pictures[0, ::3, ::3])
    as_floats = ds.cast("picture", "float32", divisor=255).permute("picture", 2, 0, 1)
    close = first_picture(as_floats._repr_html_()).astype(int) - pictures[0, ::3, ::3]
    assert abs(close).max() <= 2


@pytest.mark.parametrize(
    "ds",
    [ps.from_arrays(x=np.zeros((5, 40, 40), np.int16)), ps.from_arrays(x=np.zeros((0, 40, 40, 3), np.uint8)),
     ps.from_arrays(x=np.zeros((5, 4, 40, 3), np.uint8)), ps.from_arrays(x=np.zeros((2, 4000, 4000, 3), np.uint8))],
    ids=["whole numbers", "no rows", "too narrow", "too large"],
)  # fmt: skip
def test_nothing_else_is_read_to_be_shown(ds: ps.Dataset) -> None:
    assert "<img" not in ds._repr_html_()


@pytest.mark.parametrize("what", ["plan", "joint plan", "forecast", "loader", "multi"])
def test_plans_have_bars(what: str) -> None:
    assert "width:100.0%" in SHOWN[what][0]()._repr_html_()


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (ps.FieldSpec(np.dtype("u1"), (224, 224, 3)), "uint8 (224, 224, 3)"),
        (ps.FieldSpec(np.dtype("i8")), "int64"),
        (ps.FieldSpec(np.dtype(object), (), "text", 2048), "text of at most 2.00 KiB"),
    ],
)
def test_fields(spec: ps.FieldSpec, told: str) -> None:
    assert repr(spec) == str(spec) == told
    assert repr({"x": spec}) == f"{{'x': {told}}}"


def test_positions_saved_by_earlier_versions_of_mapped_datasets_still_load() -> None:
    """Fingerprints were made of this text; they must not follow what is shown."""
    made = ps.from_arrays(x=np.arange(6, dtype=np.float32)).map(double)
    assert made.fingerprint == FINGERPRINT


def double(batch: Any) -> Any:
    return {"y": batch["x"] * 2}


FINGERPRINT = "53f98cd223ef3e34"
