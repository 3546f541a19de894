"""Every page has an example that runs: all blocks marked ``python``, in order, in a folder with the page's files.

Blocks marked ``py`` are fragments, which are not run.
"""

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import samples

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

FILES: dict[str, tuple[Callable[[], None], ...]] = {
    "README.md": (samples.photos, samples.nsd),
    "docs/index.md": (samples.photos,),
    "docs/databases-and-folders.md": (samples.photos,),
    "docs/how-to/lightning.md": (samples.lightning,),
    "docs/tutorials/nsd-decoder.md": (samples.nsd,),
    "docs/webdataset.md": (samples.shards,),
}
# Run by tests of their own; written by `make figures`; without code.
ELSEWHERE = {"docs/add-a-format.md", "docs/nsd.md"}
WITHOUT_CODE = {"docs/benchmarks.md"}
NEEDS = {f"docs/how-to/{engine}.md": engine for engine in ("lightning", "accelerate", "ray", "dask")}

TASKS = {
    "own HDF5 with augmentation": ("docs/tutorials/own-hdf5.md", samples.scans),
    "shards": ("docs/tutorials/shards.md", samples.shards),
    "NSD": ("docs/tutorials/nsd-decoder.md", samples.nsd),
    "Lightning with resume": ("docs/how-to/lightning.md", samples.lightning),
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def code_of(page: Path) -> str:
    """All lines of blocks that run, where they are on the page, so that errors name the right line."""
    running, lines = False, []
    for line in page.read_text().splitlines():
        running = running and line != "```"
        lines.append(line if running else "")
        running = running or line == "```python"
    return "\n".join(lines)


RUN = [page for page in PAGES if name_of(page) not in ELSEWHERE | WITHOUT_CODE]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run(page: Path, code: str) -> dict[str, object]:
    if (needed := NEEDS.get(name_of(page))) and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}: make engines")
    names: dict[str, object] = {"__name__": "example"}
    try:
        exec(compile(code, str(page), "exec"), names)
    finally:
        sys.modules.pop("model", None)
    return names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_examples_run(page: Path, here: Path) -> None:
    assert blocks(page), "a page without an example that runs"
    for make in FILES.get(name_of(page), ()):
        make()
    run(page, code_of(page))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", TASKS)
def test_tasks_of_newcomers_take_twelve_lines(task: str, here: Path) -> None:
    name, make = TASKS[task]
    found = re.search(rf"<!-- task: {task} -->\n```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert found is not None
    assert len([line for line in found[1].splitlines() if line.strip()]) <= 12
    make()
    run(ROOT / name, found[1])


def test_readme_is_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
