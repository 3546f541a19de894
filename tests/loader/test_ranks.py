"""Never everything on every rank: where the environment tells of several, somebody says which one this is."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock import webdataset as wds
from penstock.errors import ConfigError

ROWS = 12


def dataset() -> ps.Dataset:
    return ps.from_arrays(x=np.arange(ROWS))


def one(**options: Any) -> ps.Loader:
    return ps.Loader(dataset(), batch_size=2, memory="64MiB", **options)


def several(**options: Any) -> ps.MultiLoader:
    return ps.MultiLoader({"a": dataset()}, mode="together", batch_size=2, memory="64MiB", **options)


@pytest.fixture
def shards(tmp_path: Path) -> str:
    with wds.TarWriter(str(tmp_path / "a.tar")) as to:
        for row in range(ROWS):
            to.write({"__key__": f"{row:03}", "nsdgeneral.npy": np.full(4, row, np.float32)})
    return str(tmp_path / "a.tar")


def mindeye(url: str, **options: Any) -> tuple[ps.Loader, ps.Loader]:
    return wds.get_dataloaders(2, train_url=url, val_url=url, to_tuple=["voxels"], memory="64MiB", **options)[:2]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("output", ["torch", "numpy"])
@pytest.mark.parametrize("make", [one, several])
def test_a_loader_made_too_early_is_refused(make: Any, output: str) -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=3.*init_process_group.*rank= and world_size="):
        make(output=output)
    assert len(make(output=output, rank=1, world_size=3)) == ROWS // 6
    assert len(make(output=output, rank=0, world_size=1)) == ROWS // 2


@pytest.mark.usefixtures("launched")
def test_loaders_of_shards_made_too_early_are_refused(shards: str) -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=3.*init_process_group"):
        mindeye(shards)
    assert [len(loader) for loader in mindeye(shards, local_rank=2, world_size=3)] == [2, 2]
    assert [len(loader) for loader in mindeye(shards, world_size=1)] == [6, 6]


@pytest.mark.usefixtures("launched")
def test_what_reads_everything_on_purpose_does(shards: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(ROWS))
    assert ps.plan(tmp_path / "a.npy", batch_size=2, measure=0).world_size == 1
    assert ps.verify(tmp_path / "a.npy").sound
    assert len(ps.open(tmp_path / "a.npy")[:]["data"]) == ROWS


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK='x'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 of WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
    ],
    ids=str,
)
def test_environments_that_cannot_be_meant(
    environment: dict[str, str], told: str, shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told):
        one()
    with pytest.raises(ConfigError, match=told):
        list(wds.WebDataset(shards, nodesplitter=wds.split_by_node))


@pytest.mark.parametrize("world_size", ["", "1"])
def test_one_rank_is_no_reason_to_ask(world_size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("RANK", "0" if world_size else "")
    assert len(one()) == ROWS // 2


def test_shards_are_split_by_what_the_environment_says(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    seen = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        seen += [sample["__key__"] for sample in wds.WebDataset(shards, nodesplitter=wds.split_by_node)]
    assert sorted(seen) == [f"{row:03}" for row in range(ROWS)]


CHILD = """
    import sys
    import numpy as np, torch, penstock as ps
    rank = int(sys.argv[1])
    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    for output in ("torch", "numpy"):
        loader = ps.Loader(ps.from_arrays(x=np.arange(12)), batch_size=2, memory="64MiB", output=output)
        print(output, [int(row) for batch in loader for row in batch["x"]])
    torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_arrays_are_shared_out_as_tensors_are(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(CHILD)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]
    assert told[0] == ["torch [0, 1, 4, 5, 8, 9]", "numpy [0, 1, 4, 5, 8, 9]"]
    assert told[1] == ["torch [2, 3, 6, 7, 10, 11]", "numpy [2, 3, 6, 7, 10, 11]"]
