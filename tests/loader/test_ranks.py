"""Never everything on every rank: if the environment has several, the rank must be known."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import penstock as ps
from penstock import webdataset as wds
from penstock.errors import ConfigError
from penstock.loader.ranks import place_of

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


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever started the tests is not their subject."""
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "MV2_", "PMI_")) or name in {
            "RANK",
            "WORLD_SIZE",
            "JOB_COMPLETION_INDEX",
        }:
            monkeypatch.delenv(name)


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


LAUNCHED = [
    ({}, (0, 1)),
    ({"RANK": "1", "WORLD_SIZE": "3"}, (1, 3)),
    ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, (5, 8)),
    # torchrun on each of two nodes: Slurm speaks of the node
    ({"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (5, 8)),
    # mpirun in a batch script
    ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (2, 4)),
    ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4)),
    ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, (0, 2)),
    # a batch script of one task, and a node of Slurm on which a step of one task runs
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (0, 1)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, (0, 1)),
]


@pytest.mark.parametrize(("environment", "place"), LAUNCHED, ids=str)
def test_the_environment_is_asked_on_request(
    environment: dict[str, str], place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert place_of("auto", None) == place_of("auto", place[1]) == place
    with pytest.raises(ConfigError, match=rf"world_size=97: .* has {place[1]}"):
        place_of("auto", 97)
    if place[1] > 1:
        with pytest.raises(ConfigError, match=rf'={place[1]}, but torch.distributed is not started.*rank="auto"'):
            place_of(None, None)
    else:
        assert place_of(None, None) == (0, 1)


def test_an_indexed_job_needs_the_number_of_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    assert place_of("auto", 4) == (2, 4)
    with pytest.raises(ConfigError, match=r"JOB_COMPLETION_INDEX=2.*world_size="):
        place_of("auto", None)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "SLURM_NTASKS=4, but srun did not start"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 and no RANK"),
        ({"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_PROCID=4 of SLURM_STEP_NUM_TASKS=4"),
        ({"PMI_RANK": "one", "PMI_SIZE": "4"}, "PMI_RANK='one'"),
    ],
    ids=str,
)
def test_the_environment_does_not_say(environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told):
        one(rank="auto")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rank": 1}, "give both, or neither"),
        ({"rank": "first"}, "rank='first': expected a whole number"),
        ({"mesh": "dp"}, "mesh='dp': expected a torch.distributed.device_mesh.DeviceMesh"),
        ({"mesh": "any", "rank": 0, "world_size": 2}, "the mesh says both"),
    ],
    ids=lambda each: each if isinstance(each, str) else "-".join(each),
)
def test_places_that_cannot_be_meant(options: dict[str, Any], told: str) -> None:
    for make in (one, several):
        with pytest.raises(ConfigError, match=told):
            make(**options)


class Mesh:
    """A ``DeviceMesh`` as far as a place needs one."""

    def __init__(self, names: tuple[str, ...] | None, shape: tuple[int, ...], at: tuple[int, ...] | None) -> None:
        self.mesh_dim_names, self.shape, self._at = names, shape, at

    def get_coordinate(self) -> list[int] | None:
        return None if self._at is None else list(self._at)


@pytest.mark.parametrize(
    ("mesh", "place"),
    [
        (Mesh(("dp", "tp"), (2, 4), (1, 3)), (1, 2)),
        (Mesh(("tp", "dp"), (2, 4), (1, 3)), (3, 4)),
        (Mesh(("dp_replicate", "dp_shard", "tp"), (2, 3, 4), (1, 2, 0)), (5, 6)),
        (Mesh(("PP", "Data", "context"), (2, 3, 4), (1, 1, 3)), (1, 3)),
        (Mesh(("tp", "pp"), (2, 2), (1, 1)), (0, 1)),
        (Mesh(("anything",), (3,), (2,)), (2, 3)),
        (Mesh(None, (3,), (2,)), (2, 3)),
    ],
)
def test_a_place_in_a_mesh(mesh: Mesh, place: tuple[int, int]) -> None:
    assert place_of(None, None, mesh) == place


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        (Mesh(None, (2, 2), (0, 0)), r"have no names.*mesh\[.dp.\]"),
        (Mesh(("dp", "experts"), (2, 2), (0, 0)), r"does 'experts' divide the data"),
        (Mesh(("dp", "tp"), (2, 2), None), "not part of it"),
    ],
)
def test_a_mesh_that_does_not_say(mesh: Mesh, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        place_of(None, None, mesh)


MESH_CHILD = """
    import sys
    import numpy as np, torch, penstock as ps
    from torch.distributed.device_mesh import init_device_mesh
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=4
    )
    ds = ps.from_arrays(x=np.arange(23))
    for names in (("data", "tensor"), ("tp", "dp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        data = names[0] if names[0] == "data" else "dp"
        rows = []
        for each in (mesh, mesh[data]):
            loader = ps.Loader(ds, batch_size=3, shuffle=True, memory="64MiB", mesh=each)
            rows.append([batch["x"].tolist() for batch in loader])
        print([rows[0], rows[1] == rows[0]])
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_a_mesh_of_four_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(MESH_CHILD)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    told = [[json.loads(line.lower()) for line in rank.communicate(timeout=120)[0].splitlines()] for rank in ranks]
    assert all(same for lines in told for _, same in lines)
    for line, pairs in enumerate([((0, 1), (2, 3)), ((0, 2), (1, 3))]):
        batches = [lines[line][0] for lines in told]
        for one_rank, other in pairs:
            assert batches[one_rank] == batches[other]
        union = [row for pair in pairs for batch in batches[pair[0]] for row in batch]
        assert sorted(union) == list(range(23))


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


@pytest.mark.slow
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


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_filled_batches_have_one_size(tmp_path: Path, world_size: int, shuffle: bool) -> None:
    """Also where rows come in blocks, and a batch repeats rows of an earlier window than that of its first."""
    rows = np.arange(47)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=(4,))
    options: dict[str, Any] = {"batch_size": 6, "memory": "64MiB", "output": "numpy", "shuffle": shuffle, "window": 4}
    loaders = [
        ps.Loader(ps.open(tmp_path / "a.h5"), tail="fill", rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    steps = list(zip(*loaders, strict=True))
    assert all(len(batch["x"]) == 6 for step in steps for batch in step)
    gathered = np.concatenate([batch["x"] for step in steps for batch in step])
    assert np.array_equal(np.sort(gathered[:47]), rows)
    assert np.isin(gathered[47:], gathered[47 // (6 * world_size) * 6 * world_size : 47]).all()
