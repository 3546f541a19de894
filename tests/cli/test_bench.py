"""``penstock bench``: numbers that are measured, a page that stands by itself, and mistakes in one line."""

import json
import re
import tarfile
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.base import counters
from penstock.cli.bench_report import ReadMap, mixing, page, ticks
from penstock.cli.main import main
from penstock.loader.order import InOrder, Shuffled

ROWS = 60

# Newer Pythons warn of forking beside threads, torch of more workers than cores, webdataset leaves files open.
loaders_may_warn = pytest.mark.filterwarnings(
    "ignore:This process", "ignore:This DataLoader", "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)  # fmt: skip


@pytest.fixture
def session(tmp_path: Path) -> str:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["betas"] = np.zeros((ROWS, 6, 5, 4), np.int16)
        file["label"] = np.arange(ROWS)
    return str(tmp_path / "a.h5")


@pytest.fixture
def shard(tmp_path: Path) -> str:
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for number in range(ROWS):
            written = BytesIO()
            np.save(written, np.full(50, number))
            member = tarfile.TarInfo(f"{number:04d}.vox.npy")
            member.size = len(written.getvalue())
            file.addfile(member, BytesIO(written.getvalue()))
    return str(tmp_path / "a.tar")


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, "--batch-size", "8", "--memory", "64MiB", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_an_epoch_and_what_held_it_up(session: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", session, "--batch-size", "8", "--memory", "64MiB", "--step", "20"]) == 0
    out, err = capsys.readouterr()
    assert "Bottleneck: " in out
    assert "of a budget of 64.0 MiB" in out
    assert "penstock: 100%" in err


def test_numbers(session: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = bench(capsys, session)
    assert told["bytes_read"] == ROWS * 248
    (ours,) = told["runs"]
    assert (ours["name"], ours["samples"]) == ("penstock", ROWS)
    assert 0 <= ours["peak_bytes"] <= told["budget_bytes"] == 64 * 2**20
    assert ours["samples_per_s"] == pytest.approx(ROWS / ours["seconds"])


def test_it_ends_in_time(session: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = bench(capsys, session, "--step", "50", "--seconds", "0.01")
    assert told["runs"][0]["samples"] < ROWS


@loaders_may_warn
@pytest.mark.parametrize("masked", [False, True])
def test_against_dataloader(session: str, tmp_path: Path, masked: bool, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "m.npy", np.ones((6, 5, 4), bool))
    told = bench(
        capsys, session, "--against", "torch", "--workers", "0", *(["--mask", str(tmp_path / "m.npy")] * masked)
    )
    names = [run["name"] for run in told["runs"]]
    assert names == ["penstock", f"DataLoader over {'ds[i]' if masked else 'h5py'}, 0 workers"]
    assert [run["samples"] for run in told["runs"]] == [ROWS, ROWS]


@pytest.mark.slow
@loaders_may_warn
def test_against_webdataset(shard: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = bench(capsys, shard, "--against", "torch,webdataset", "--workers", "1", "--shuffle-buffer", "9")
    assert [run["samples"] for run in told["runs"]] == [ROWS, ROWS, ROWS]
    assert told["runs"][2]["name"] == "WebDataset, 1 worker, shuffle(9)"


class Links(HTMLParser):
    """What a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data", "onload")]
        if tag in ("script", "link", "iframe", "img", "object"):
            self.found.append(tag)


TOLD = {
    "budget_bytes": 1000, "planned_bytes": 900, "bottleneck": "a < b & c", "bytes_read": 5, "threads": 2,
    "stages": {"files": 1.0, "decoding": 0.0}, "samples_per_s_if_never_waiting": 3.0,
    "samples_per_s_of_reading_alone": 4.0,
    "reads": {"files": ["/d/a.h5", "/d/<b>.h5"], "reads": [(0.5, 0, 0.0, 0.5), (1.9, 1, 0.9, 1.0)], "one_of": 4},
    "mixing": {"samples": [(0.0, 0.9), (0.5, 0.1)], "quality": 0.5},
    "runs": [
        {"name": "penstock", "samples_per_s": 9.0, "peak_bytes": 800, "waited": 0.1, "seconds": 2.0,
         "memory": [(1.0, 500), (2.0, 800)]},
        {"name": "<other>", "samples_per_s": 3.0, "peak_bytes": 2000, "waited": 1.0, "seconds": 3.0,
         "memory": [(1.0, 2000), (3.0, 100)]},
    ],
}  # fmt: skip


def test_a_page_needs_nothing_else_and_is_well_formed() -> None:
    written = page(TOLD)
    links = Links()
    links.feed(written)
    assert links.found == []
    assert not any(word in written for word in ("http", "@import", "url("))
    assert ElementTree.fromstring(written.partition("\n")[2]).tag == "html"
    assert 'name="viewport"' in written
    assert "prefers-color-scheme: dark" in written
    assert "a &lt; b &amp; c" in written
    assert "&lt;other&gt;" in written


def drawn(told: dict[str, Any], kind: str, which: str) -> list[ElementTree.Element]:
    tree = ElementTree.fromstring(page(told).partition("\n")[2])
    return [each for each in tree.iter(kind) if each.get("class") == which]


def test_curves_stay_in_the_picture_and_the_budget_is_drawn_where_it_is() -> None:
    curves = drawn(TOLD, "polyline", "memory")
    points = [[tuple(map(float, point.split(","))) for point in curve.attrib["points"].split()] for curve in curves]
    assert [len(curve) for curve in points] == [3, 3]
    for curve in points:
        assert all(96 <= x <= 630 and 14 <= y <= 226 for x, y in curve)
    (budget,) = drawn(TOLD, "line", "budget")
    half = float(budget.attrib["y1"])
    highest, lowest = points[1][1][1], points[1][0][1]
    assert half == pytest.approx((highest + lowest) / 2, abs=0.2), "1000 is half of 2000"


def test_a_budget_far_above_is_told_not_drawn() -> None:
    far = {**TOLD, "budget_bytes": 10**6}
    assert drawn(far, "line", "budget") == []
    assert "is far above" in page(far)


def test_reads_and_samples_are_drawn_where_they_are() -> None:
    (reads,) = drawn(TOLD, "path", "reads")
    marks = [tuple(map(float, re.split("[ v]", mark))) for mark in reads.attrib["d"].split("M")[1:]]
    assert [x for x, _, _ in marks] == [96 + 534 / 4, pytest.approx(96 + 534 * 0.95, abs=0.1)]
    (_, above, long), (_, below, short) = marks
    assert above < below
    assert long > short
    (samples,) = drawn(TOLD, "path", "mixing")
    assert samples.attrib["d"].count("M") == 2
    assert "one read of 4" in page(TOLD)
    assert "file 2 is &lt;b&gt;.h5" in page(TOLD)
    assert "quality is 0.50" in page(TOLD)
    nothing = {**TOLD, "reads": {"files": [], "reads": [], "one_of": 1}}
    assert "read no files itself" in page(nothing)


def test_what_is_read_is_noted_whichever_way(tmp_path: Path) -> None:
    np.save(tmp_path / "small.npy", np.zeros((50, 4)))  # gathered from a mapping
    np.save(tmp_path / "large.npy", np.zeros((4, 20_000)))
    for name, rows, row_bytes in (("small.npy", [3, 40], 32), ("large.npy", [2, 0], 160_000)):
        seen: list[tuple[str, list[int], int]] = []
        with counters.watched(lambda path, begins, count, seen=seen: seen.append((path, list(begins), count))):
            assert len(ps.open(tmp_path / name)[rows]["data"]) == 2
        found = [(path, begin, count) for path, begins, count in seen for begin in begins if count == row_bytes]
        assert sorted(found) == sorted((str(tmp_path / name), 128 + row * row_bytes, row_bytes) for row in rows)


def test_a_map_of_many_reads_keeps_some_of_all() -> None:
    reads = ReadMap()
    for number in range(10_000):
        reads.note("a", (number,), 1)
    reads.note("b", np.arange(8000), 1)
    told = reads.as_json()
    assert told["files"] == ["a", "b"]
    assert 500 <= len(told["reads"]) <= 2000
    assert told["one_of"] == 16
    places = [begin for _, number, begin, _ in told["reads"] if number == 0]
    assert min(places) < 0.01
    assert max(places) > 0.99
    assert sum(number for _, number, _, _ in told["reads"]) == pytest.approx(500, abs=2)


def test_mixing_shows_the_order() -> None:
    assert mixing(InOrder(4))["samples"] == [(0.0, 0.0), (0.25, 0.25), (0.5, 0.5), (0.75, 0.75)]
    cloud = mixing(Shuffled(100_000, 1))["samples"]
    assert len(cloud) == 1500
    assert np.mean([row for _, row in cloud]) == pytest.approx(0.5, abs=0.05)


def test_html_is_written(session: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench(capsys, session, "--html", str(tmp_path / "report.html"))
    assert ElementTree.fromstring((tmp_path / "report.html").read_text().partition("\n")[2]).tag == "html"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gone.h5"], "no such file"),
        (["{}", "--against", "nobody"], "expected some of torch, webdataset"),
        (["{}", "--against", "webdataset"], "expected tar shards"),
        (["{}", "--memory", "1MiB"], "the smallest that works is"),
        (["{}", "--columns", "nothing"], "no field 'nothing'"),
        (["{}", "--html", "/no/such/folder/report.html"], "--html"),
    ],
)
def test_mistakes(arguments: list[str], told: str, session: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *(argument.format(session) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.parametrize("end", [1e-9, 0.013, 0.2, 0.9, 1, 2.5, 9.99, 10, 64, 1080, 5.5e5])
def test_ticks_of_an_axis_are_round_and_differ(end):
    found = ticks(end)
    assert found[0] == 0
    assert found[-1] <= end * (1 + 1e-6)
    assert 3 <= len(found) <= 6
    assert len({f"{at:g}" for at in found}) == len(found)
