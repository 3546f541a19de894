"""Fields joined to others that come in blocks, but can be read row by row: they are read when their batch is wanted."""

import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.dataset.combine import Columns, Concat, Subset
from penstock.dataset.dataset import Dataset
from penstock.dataset.store import Wrapper
from penstock.errors import DecodeFailed
from penstock.loader.readers import deferred_fields
from penstock.testing import check_resume

ROWS, BLOCK, PICTURES = 47, 8, 11
WINDOW = 3 * BLOCK


@pytest.fixture(params=["later", "with their blocks"])
def when(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("penstock.loader.readers.DEFER_FROM_BYTES", 0 if request.param == "later" else 2**40)
    return str(request.param)


@pytest.fixture
def voxels(tmp_path: Path) -> ps.Dataset:
    with h5py.File(tmp_path / "voxels.h5", "w") as file:
        values = np.broadcast_to(np.arange(ROWS)[:, None], (ROWS, 6))
        file.create_dataset("voxels", data=values, chunks=(BLOCK, 3), compression="gzip")
    return ps.open(tmp_path / "voxels.h5")


@pytest.fixture
def pictures(tmp_path: Path) -> ps.Dataset:
    np.save(tmp_path / "picture.npy", np.broadcast_to(np.arange(PICTURES)[:, None, None], (PICTURES, 4, 5)) * 100)
    return ps.open(tmp_path / "picture.npy")


def shown(row: Any) -> Any:
    """Which picture belongs to a row."""
    return row * 7 % PICTURES


def joined(voxels: ps.Dataset, pictures: ps.Dataset) -> ps.Dataset:
    return ps.join(voxels=voxels, picture=(pictures, shown(np.arange(ROWS))), number=np.arange(ROWS))


def loader(ds: ps.Dataset, **options: Any) -> ps.Loader:
    columns = ("voxels", "picture", "number", "__index__")
    given = {"batch_size": 5, "shuffle": True, "window": WINDOW, "memory": "64MiB", "columns": columns, **options}
    return ps.Loader(ds, **given)


def rows_of(batch: Any) -> list[int]:
    values, picture, number, index = batch
    assert (values == index[:, None]).all()
    assert (picture == 100 * shown(index)[:, None, None]).all()
    assert (number == index).all()
    return index.tolist()


class Gated(Wrapper):
    """Pictures of which only some can be read until the gate opens, and one never."""

    def __init__(self, store: Any, before: int = 2**40, broken: int = -1) -> None:
        super().__init__(store)
        self.before, self.broken, self.gate, self.counting = before, broken, threading.Event(), threading.Lock()

    def read(self, rows: np.ndarray, at: np.ndarray, out: Any, share: Any = (0, 1)) -> None:
        with self.counting:
            self.before -= len(rows)
        if self.before < 0:
            assert self.gate.wait(30)
        if self.broken in rows:
            raise DecodeFailed(f"picture {self.broken} is damaged")
        self.store.read(rows, at, out, share)


def test_which_fields_are_free(voxels: ps.Dataset, pictures: ps.Dataset) -> None:
    store = joined(voxels, pictures).store
    free = {"picture", "number"}
    assert store.free_fields == free
    assert voxels.store.free_fields == set()
    assert pictures.store.free_fields == set(pictures.fields)
    assert Columns(store, {"v": "voxels", "p": "picture"}).free_fields == {"p"}
    assert Subset(store, range(3, 20)).free_fields == free
    assert Concat([store, store]).free_fields == free
    backwards = ps.join(number=np.arange(ROWS), voxels=(voxels, np.arange(ROWS)[::-1]))
    assert backwards.store.free_fields == {"number", "voxels"}  # rows were chosen one by one: nothing is in blocks


@pytest.mark.parametrize("batch_size", [1, 5, 20, 100])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.usefixtures("when")
def test_every_row_once_with_all_its_fields(
    voxels: ps.Dataset, pictures: ps.Dataset, batch_size: int, threads: int
) -> None:
    with loader(joined(voxels, pictures), batch_size=batch_size, threads=threads) as batches:
        for _ in range(2):
            assert sorted(row for batch in batches for row in rows_of(batch)) == list(range(ROWS))
            assert batches.stats().samples == ROWS


def test_no_more_rows_at_a_time_than_memory_was_planned_for(
    voxels: ps.Dataset, pictures: ps.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.loader.readers.DEFER_FROM_BYTES", 0)
    ds = joined(voxels, pictures)
    with loader(ds, batch_size=20) as batches:
        found = deferred_fields(ds.store, batches.plan)
        assert found is not None
        assert (found.blocked, found.free) == (("voxels",), ("picture", "number"))
        assert found.rows_per_read == batches.plan.rows_per_read == BLOCK


def test_the_order_is_the_same_either_way(
    voxels: ps.Dataset, pictures: ps.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = []
    for least in (0, 2**40):
        monkeypatch.setattr("penstock.loader.readers.DEFER_FROM_BYTES", least)
        with loader(joined(voxels, pictures)) as batches:
            orders.append([row for batch in batches for row in rows_of(batch)])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.usefixtures("when")
def test_ranks_share_an_epoch(voxels: ps.Dataset, pictures: ps.Dataset, world_size: int) -> None:
    found: list[int] = []
    for rank in range(world_size):
        with loader(joined(voxels, pictures), rank=rank, world_size=world_size) as batches:
            found += [row for batch in batches for row in rows_of(batch)]
    assert set(found) == set(range(ROWS))
    assert len(found) < ROWS + world_size  # repeated so that all ranks have as many


@pytest.mark.usefixtures("when")
def test_resume_after_any_batch(voxels: ps.Dataset, pictures: ps.Dataset) -> None:
    check_resume(lambda **place: loader(joined(voxels, pictures), **place))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_batch_waits_for_its_own_pictures_alone(
    voxels: ps.Dataset, pictures: ps.Dataset, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr("penstock.loader.readers.DEFER_FROM_BYTES", 0)
    gated = Gated(pictures.store, before=5)
    with loader(joined(voxels, Dataset(gated)), threads=threads) as batches:
        each = iter(batches)
        found = rows_of(next(each))
        assert not gated.gate.is_set()
        gated.gate.set()
        found += [row for batch in each for row in rows_of(batch)]
    assert sorted(found) == list(range(ROWS))


@pytest.mark.usefixtures("when")
def test_a_damaged_picture_is_left_out_with_its_samples(voxels: ps.Dataset, pictures: ps.Dataset) -> None:
    damaged = 3
    ds = joined(voxels, Dataset(Gated(pictures.store, broken=damaged)))
    with loader(ds, on_error="skip") as batches:
        found = [row for batch in batches for row in rows_of(batch)]
        lost = [row for row in range(ROWS) if shown(row) == damaged]
        assert sorted(found + lost) == list(range(ROWS))
        assert batches.stats().left_out_samples == len(lost)


@pytest.mark.usefixtures("when")
def test_a_damaged_picture_ends_its_batch_and_no_other(voxels: ps.Dataset, pictures: ps.Dataset) -> None:
    with loader(joined(voxels, pictures), batch_size=1) as sound:
        expected = [row for batch in sound for row in rows_of(batch)]
    before = next(number for number, row in enumerate(expected) if shown(row) == 3)
    with loader(joined(voxels, Dataset(Gated(pictures.store, broken=3))), batch_size=1) as batches:
        each = iter(batches)
        assert [row for _ in range(before) for row in rows_of(next(each))] == expected[:before]
        with pytest.raises(DecodeFailed, match="picture 3 is damaged"):
            next(each)
