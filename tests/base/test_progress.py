"""How far an epoch is, shown while it runs."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.base import progress

ROWS = 30


@pytest.fixture
def ds(tmp_path: Path) -> ps.Dataset:
    np.save(tmp_path / "a.npy", np.arange(ROWS))
    return ps.open(tmp_path / "a.npy")


def loader(ds: ps.Dataset, **options: Any) -> ps.Loader:
    return ps.Loader(ds, batch_size=7, memory="64MiB", output="numpy", **options)


def test_silent_unless_asked(ds: ps.Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    with loader(ds) as batches:
        assert len(list(batches)) == 5
    assert capsys.readouterr() == ("", "")


def test_lines_where_there_is_no_terminal(ds: ps.Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    with loader(ds, progress=True) as batches:
        for _ in batches:
            pass
        for _ in batches:
            pass
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 4
    for epoch, (last, whole) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        assert last.startswith(f"epoch {epoch}: 100%, ")
        assert "/64 MiB, waited " in last
        assert whole.startswith(f"epoch {epoch}: 30 samples in ")
    assert "\r" not in err


def test_an_epoch_that_is_left_ends_quietly(ds: ps.Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    with loader(ds, progress=True) as batches:
        for _ in batches:
            break
    assert "samples in" not in capsys.readouterr().err


def test_going_on_counts_what_is_left(
    ds: ps.Dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0)
    with loader(ds, progress=True) as batches:
        batches.load_state_dict({**batches.state_dict(), "samples": 14})
        assert sum(len(batch["data"]) for batch in batches) == 16
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()[:3]] == [
        "epoch 0: 33%", "epoch 0: 67%", "epoch 0: 100%",
    ]  # fmt: skip


def test_one_rank_shows(ds: ps.Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        with loader(ds, progress=True, rank=rank, world_size=2) as batches:
            list(batches)
        assert ("epoch 0: 100%" in capsys.readouterr().err) == (rank == 0)


def test_a_bar_on_a_terminal(ds: ps.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with loader(ds, progress=True) as batches:
        list(batches)
    shown = terminal.getvalue()
    assert "epoch 0" in shown
    assert "100%|" in shown
    assert "/64 MiB" in shown
    assert shown.splitlines()[-1].startswith("epoch 0: 30 samples in ")


def test_an_error_ends_the_bar(ds: ps.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loader(ds, progress=True) as batches:
        (tmp_path / "a.npy").write_bytes(b"another file")
        with pytest.raises(ps.errors.PenstockError):
            list(batches)
    assert "samples in" not in capsys.readouterr().err


def test_a_widget_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel of Jupyter runs and ipywidgets is installed, the bar is tqdm's widget."""
    made: list[dict[str, Any]] = []

    class Widget:
        def __init__(self, **options: Any) -> None:
            made.append(options)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    found = progress.importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "ipykernel", type(sys)("ipykernel"))
    monkeypatch.setitem(sys.modules, "tqdm.notebook", type(sys)("tqdm.notebook"))
    monkeypatch.setattr(sys.modules["tqdm.notebook"], "tqdm", Widget, raising=False)
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: name == "ipywidgets" or found(name))
    bar = progress.Bar("epoch 0", 10, "samples")
    bar.add(10)
    bar.close()
    assert [(options["total"], options["unit"]) for options in made] == [(10, " samples")]


def test_lines_in_a_notebook_without_widgets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = progress.importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "ipykernel", type(sys)("ipykernel"))
    monkeypatch.setattr(
        progress.importlib.util, "find_spec", lambda name: None if name == "ipywidgets" else found(name)
    )
    progress.Bar("epoch 0", 10, "samples").add(10)
    assert capsys.readouterr().err.startswith("epoch 0: 100%, ")
