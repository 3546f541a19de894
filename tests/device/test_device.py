"""A loader's own suite with a device: ``pytest tests/device``.

On CUDA where there is a device, read by threads and by processes. Elsewhere the processor takes the device's place: the
same copies, without streams and pinned memory.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.loader import runtime as runtime_module
from penstock.loader.loader import runtime_of
from penstock.loader.outputs import DeviceOutput

ROWS, SHAPE = 300, (60, 50)
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

Make = Callable[..., ps.Loader]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device") / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values(np.arange(ROWS)), chunks=(1, *SHAPE), compression="gzip", shuffle=True)
        file.create_dataset("row", data=np.arange(ROWS))
    return path


def values(rows: Any) -> np.ndarray:
    """What a row holds."""
    ramp = np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    return ((ramp + np.asarray(rows)[:, None, None] * 37) % 20011).astype(np.int16)


@pytest.fixture
def dataset(stored: Path) -> ps.Dataset:
    return ps.open(stored).cast("x", "float32", scale=1 / 300)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_CUDA)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[0, 2], ids=["threads", "processes"])
def make(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Loaders with a device, whose processes are up before they read."""
    made: list[ps.Loader] = []
    if device == "cpu":
        monkeypatch.setattr(runtime_module, "make_output", lambda *_: DeviceOutput(torch.device("cpu")))

    def load(ds: ps.Dataset, **options: Any) -> ps.Loader:
        options = {"batch_size": 16, "shuffle": True, "memory": "512MiB", "threads": 4, **options}
        loader = ps.Loader(ds, device=None if device == "cpu" else device, processes=request.param, **options)
        made.append(loader)
        runtime_of(loader).start_processes(60)
        return loader

    yield load
    for loader in made:
        loader.close()


def check(batch: Any, device: str) -> list[int]:
    """Every value of a batch, compared where it is; its rows."""
    rows = batch["row"].cpu().numpy()
    expected = torch.from_numpy(values(rows)).to(device).to(torch.float32).mul_(1 / 300)
    assert batch["x"].device.type == device
    assert torch.equal(batch["x"], expected)
    return [int(row) for row in rows]


def test_every_value_of_two_epochs(dataset: ps.Dataset, make: Make, device: str) -> None:
    loader = make(dataset)
    first, second = ([row for batch in loader for row in check(batch, device)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second


def test_the_order_is_that_of_a_loader_without_a_device(dataset: ps.Dataset, make: Make, device: str) -> None:
    rows = [int(row) for batch in make(dataset, seed=4) for row in batch["row"].cpu()]
    plain = ps.Loader(dataset, batch_size=16, shuffle=True, seed=4, memory="64MiB", output="numpy", processes=0)
    assert rows == [int(row) for batch in plain for row in batch["row"]]


@pytest.mark.filterwarnings("ignore::penstock.errors.KeptBatches")
def test_batches_that_are_kept(dataset: ps.Dataset, make: Make, device: str) -> None:
    kept = list(make(dataset))
    assert sorted(row for batch in kept for row in check(batch, device)) == list(range(ROWS))


def test_batches_that_are_dropped_at_once(dataset: ps.Dataset, make: Make, device: str) -> None:
    """While later copies are under way, nothing may be written over what was delivered."""
    held: list[Any] = []
    for number, batch in enumerate(make(dataset, batch_size=4)):
        if number % 3 == 0:
            held.append(batch)
        if len(held) > 4:
            check(held.pop(0), device)
    for batch in held:
        check(batch, device)


def test_a_loop_that_is_left(dataset: ps.Dataset, make: Make, device: str) -> None:
    loader = make(dataset)
    for number, batch in enumerate(loader):
        check(batch, device)
        if number == 3:
            break
    assert sorted(row for batch in loader for row in check(batch, device)) == list(range(ROWS))


def test_an_error_comes_where_its_batch_would_have(stored: Path, tmp_path: Path, make: Make, device: str) -> None:
    data = bytearray(stored.read_bytes())
    with h5py.File(stored) as file:
        place = file["x"].id.get_chunk_info(100).byte_offset
    data[place + 20 : place + 60] = bytes(40)
    (tmp_path / "bad.h5").write_bytes(data)
    ds = ps.open(tmp_path / "bad.h5").cast("x", "float32", scale=1 / 300)
    seen = 0
    with pytest.raises(ps.DataError, match=r"bad\.h5"):  # noqa: PT012
        for batch in make(ds, shuffle=False):
            seen += len(check(batch, device))
    assert seen == 96
    rows = [row for batch in make(ds, on_error="skip") for row in check(batch, device)]
    assert sorted(rows) == sorted(set(range(ROWS)) - {100})


def test_a_resume(dataset: ps.Dataset, make: Make, device: str) -> None:
    loader = make(dataset)
    going = iter(loader)
    before = [row for _ in range(5) for row in check(next(going), device)]
    state = loader.state_dict()
    loader.close()
    other = make(dataset, batch_size=10)
    other.load_state_dict(state)
    after = [row for batch in other for row in check(batch, device)]
    assert sorted(before + after) == list(range(ROWS))


def test_several_loaders_at_once(dataset: ps.Dataset, make: Make, device: str) -> None:
    rows: list[list[int]] = [[], []]
    for pair in zip(make(dataset, seed=1), make(dataset, seed=2), strict=True):
        for seen, batch in zip(rows, pair, strict=True):
            seen += check(batch, device)
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(ROWS))


def test_memory_is_unlocked_with_its_loader(dataset: ps.Dataset, make: Make, device: str) -> None:
    """A next one at the same address could otherwise not be pinned, or copied from pages that are gone."""
    for _ in range(6):
        loader = make(dataset)
        check(next(iter(loader)), device)
        del loader
        gc.collect()
    assert sorted(row for batch in make(dataset) for row in check(batch, device)) == list(range(ROWS))


def test_normalized_there(stored: Path, make: Make, device: str) -> None:
    mean, spread = np.random.default_rng(0).random((2, *SHAPE)).astype(np.float32) + 1
    ds = ps.open(stored).normalize("x", mean, spread)
    for batch in make(ds):
        expected = torch.from_numpy(ds[batch["row"].cpu().numpy()]["x"])
        assert torch.equal(batch["x"].cpu(), expected)


def test_lists_stay_here(make: Make, device: str) -> None:
    ds = ps.from_arrays(x=np.arange(40.0), row=np.arange(40))
    names = [int(row) for batch in make(ds, columns=("row", "__index__")) for row in batch[1].cpu()]
    assert sorted(names) == list(range(40))
