"""Published numbers are those of the results files."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import figures, picture, results  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_pages_and_pictures_show_the_stored_results() -> None:
    assert list(figures.differing()) == [], "run make figures"


@pytest.mark.parametrize("name", sorted(figures.SUMMARY))
def test_another_result_would_be_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in results.FOLDER.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    changed = json.loads((tmp_path / f"{name}.json").read_text())
    changed["results"][0]["rates"] = [rate * 1.5 for rate in changed["results"][0]["rates"]]
    (tmp_path / f"{name}.json").write_text(json.dumps(changed))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    wrong = {path.name for path in figures.differing()}
    assert wrong == {"README.md", "index.md", "benchmarks.md", "results.svg"}


@pytest.mark.parametrize("name", results.names())
def test_results_say_how_they_were_made(name: str) -> None:
    found = results.read(name)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.date)
    assert found.machine
    module = re.match(r"python -m (benchmarks(?:\.\w+)?)", found.command)
    assert module is not None
    home = ROOT.joinpath(*module[1].split("."))
    assert home.with_suffix(".py").exists() or (home / "__main__.py").exists()


def test_rows_of_any_kind_become_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    rows = [{"label": "a", "peak_bytes": 2**20, "first_batch_s": 1.5, "rows_per_s": 1234.5, "memory_ratio": 1.25}]
    results.write("new", "python -m benchmarks.new", [*rows, {"label": "b", "threads": 4}], title="New")
    table = results.table(results.read("new"))
    assert "| a | 1.00 MiB | 1.5 s | 1,234 | 1.2 \N{MULTIPLICATION SIGN} |  |" in table
    assert "| b |  |  |  |  | 4 |" in table
    assert "### New\n" in figures.page([results.read("new")], [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_rates_are_written_by_the_generator_alone(page: Path) -> None:
    """Measured numbers in prose would drift: they belong on the page of benchmarks."""
    text = page.read_text()
    if page.name == "benchmarks.md":
        return
    text = re.sub(f"{re.escape(figures.BEGIN)}.*?{re.escape(figures.END)}", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^>.*$", "", text, flags=re.MULTILINE)  # quoted output
    assert re.findall(r"[\d,.]+\s?(?:samples|rows|records|volumes)(?:/s| per second| a second)", text) == []


@pytest.mark.parametrize("top", [3, 9.9, 10, 64, 199, 1176, 2190, 40_000, 1e6])
def test_ticks_are_few_and_differ(top: float) -> None:
    step = picture.tick_step(top)
    assert 2 <= top / step < 5.5
