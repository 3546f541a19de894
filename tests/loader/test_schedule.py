"""Rows that come in blocks: each block read once, every row once, whatever the batches, ranks and stops."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.base.scratch import CAN_RETURN_PAGES
from penstock.base.spec import FieldSpec
from penstock.dataset.extent_store import ExtentStore
from penstock.errors import BudgetExceeded, DecodeFailed, KeptBatches
from penstock.loader.order import BlockShuffled, InOrder
from penstock.loader.partition import Partition
from penstock.loader.plan import make_plan
from penstock.loader.plan_request import Request
from penstock.loader.schedule import Epoch, reads
from penstock.read import chunk_decode, chunk_groups
from penstock.testing import check_resume

SESSIONS, ROWS_EACH, BLOCK = 3, 22, 5
ROWS = SESSIONS * ROWS_EACH


@pytest.fixture(params=["one by one", "in groups", "shared out"])
def ds(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_policy: Any) -> ps.Dataset:
    """Three files of chunks of five rows, in four pieces each; ``betas[row] == row`` everywhere."""
    read_policy(group_chunks_below_bytes=2**20 if request.param == "in groups" else 0)
    if request.param == "shared out":
        monkeypatch.setattr("penstock.loader.plan.SHARE_ABOVE_BYTES", 0)
    for session in range(SESSIONS):
        rows = np.arange(session * ROWS_EACH, (session + 1) * ROWS_EACH, dtype=np.int16)
        with h5py.File(tmp_path / f"session{session}.h5", "w") as file:
            values = np.broadcast_to(rows[:, None, None], (ROWS_EACH, 6, 7))
            file.create_dataset("betas", data=values, chunks=(BLOCK, 4, 4), compression="gzip")
    return ps.open(tmp_path / "session*.h5").cast("betas", "float32", scale=2)


@pytest.fixture
def chunks_read(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int, int]]:
    counted: Counter[tuple[str, int, int]] = Counter()
    read, read_group = chunk_decode.Decoding.read, chunk_groups.SmallChunks._read_group

    def counting(self: Any, handle: Any, block: int, piece: int, *rest: Any) -> None:
        counted[self.array.file.path, block, piece] += 1
        read(self, handle, block, piece, *rest)

    def counting_group(self: Any, handle: Any, block: int, pieces: np.ndarray, *rest: Any) -> None:
        counted.update((self.array.file.path, block, piece) for piece in pieces.tolist())
        read_group(self, handle, block, pieces, *rest)

    monkeypatch.setattr(chunk_decode.Decoding, "read", counting)
    monkeypatch.setattr(chunk_groups.SmallChunks, "_read_group", counting_group)
    return counted


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks a window."""
    monkeypatch.setattr("penstock.loader.request.WINDOW_BYTES", 3 * BLOCK * 6 * 7 * 2)


def loader(ds: ps.Dataset, **options: Any) -> ps.Loader:
    columns = ("betas", "__index__")
    return ps.Loader(ds, **{"batch_size": 4, "shuffle": True, "memory": "64MiB", "columns": columns, **options})


def rows_of(batch: Any) -> list[int]:
    values, index = batch
    assert (values == 2 * index[:, None, None]).all()
    return index.tolist()


@pytest.mark.parametrize("batch_size", [1, 4, 7, 30, 100])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_row_and_every_chunk_once(ds: ps.Dataset, chunks_read: Counter, batch_size: int, threads: int) -> None:
    with loader(ds, batch_size=batch_size, threads=threads) as batches:
        orders = []
        for _ in range(3):
            chunks_read.clear()
            orders.append([row for batch in batches for row in rows_of(batch)])
            assert sorted(orders[-1]) == list(range(ROWS))
            assert len(chunks_read) == SESSIONS * 5 * 4
            assert set(chunks_read.values()) == {1}
    assert orders[0] != orders[1] != orders[2]
    assert "windows of 15" in str(batches.plan)


def test_in_order_reads_each_chunk_once(ds: ps.Dataset, chunks_read: Counter) -> None:
    with loader(ds, shuffle=False, batch_size=7) as batches:
        assert [row for batch in batches for row in rows_of(batch)] == list(range(ROWS))
    assert set(chunks_read.values()) == {1}


def test_the_order_depends_on_neither_batches_nor_memory_nor_columns(ds: ps.Dataset) -> None:
    def order(**options: Any) -> list[int]:
        with loader(ds, **options) as batches:
            return [row for batch in batches for row in batch[-1].tolist()]

    labelled = ps.join(betas=ds, label=np.arange(ROWS))
    expected = order()
    assert expected == order(batch_size=9) == order(memory="1GiB") == order(threads=5)
    with loader(labelled, columns=("label",)) as batches:
        assert sorted(row for (label,) in batches for row in label.tolist()) == list(range(ROWS))


def test_the_smallest_budget_works(ds: ps.Dataset) -> None:
    with pytest.raises(BudgetExceeded, match="blocks of 5"):
        loader(ds, memory=1)
    smallest = loader(ds).plan.smallest_bytes
    with loader(ds, memory=smallest) as batches:
        assert sorted(row for batch in batches for row in rows_of(batch)) == list(range(ROWS))


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"rank": 1, "world_size": 3}),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"shuffle": False}, {"drop_last": True})),
    ],
    ids=str,
)
def test_resume_after_any_batch(ds: ps.Dataset, options: dict[str, Any]) -> None:
    check_resume(lambda: loader(ds, batch_size=6, **options))


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_share_an_epoch(ds: ps.Dataset, world_size: int) -> None:
    shares = []
    for rank in range(world_size):
        with loader(ds, batch_size=3, rank=rank, world_size=world_size) as batches:
            shares.append([rows_of(batch) for batch in batches])
    assert len({len(share) for share in shares}) == 1
    assert {row for share in shares for batch in share for row in batch} == set(range(ROWS))
    with loader(ds, batch_size=3 * world_size) as alone:
        whole = [rows_of(batch) for batch in alone]
    for step, batch in enumerate(whole[:-1]):
        assert [row for share in shares for row in share[step]] == batch


def test_chosen_rows_keep_their_blocks(ds: ps.Dataset, chunks_read: Counter) -> None:
    chosen = np.array([row for row in range(ROWS) if row % 3])
    with loader(ds.select(chosen)) as batches:
        seen = [int(value) // 2 for values, _ in batches for value in values[:, 0, 0]]
    assert sorted(seen) == chosen.tolist()
    assert set(chunks_read.values()) == {1}


def test_kept_batches_stay_right(ds: ps.Dataset) -> None:
    with loader(ds) as batches:
        kept = list(batches)
        again = list(batches)
    assert sorted(row for batch in kept for row in rows_of(batch)) == list(range(ROWS))
    assert sorted(row for batch in again for row in rows_of(batch)) == list(range(ROWS))


def test_a_damaged_block_spares_other_batches(ds: ps.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ExtentStore.read

    def failing(self: Any, rows: np.ndarray, *rest: Any) -> None:
        if 2 in rows // BLOCK and self.origin(0).url.endswith("session1.h5"):
            raise DecodeFailed("block 2 of session 1")
        read(self, rows, *rest)

    monkeypatch.setattr(ExtentStore, "read", failing)
    bad = set(range(ROWS_EACH + 2 * BLOCK, ROWS_EACH + 3 * BLOCK))
    order = [int(row) for row in _order(ds)]
    first_bad = min(order.index(row) for row in bad)
    with loader(ds) as batches:
        delivered: list[int] = []
        with pytest.raises(DecodeFailed, match="block 2"):
            delivered.extend(row for batch in batches for row in rows_of(batch))
    assert delivered == order[: first_bad // 4 * 4]


def _order(ds: ps.Dataset) -> np.ndarray:
    return ps.BlockShuffled(ROWS, ds.store.blocks, 3, 0).rows(0, 0, ROWS)


@settings(deadline=None)
@given(
    block=st.integers(1, 9), blocks=st.integers(1, 12), window=st.integers(1, 4), batch=st.integers(1, 25),
    world=st.integers(1, 3), slow=st.integers(0, 3), seed=st.integers(0, 5),
)  # fmt: skip
def test_where_memory_is_tight_no_more_rows_are_filled_than_planned(
    block: int, blocks: int, window: int, batch: int, world: int, slow: int, seed: int
) -> None:
    """Whatever the sizes, and however late the caller takes a batch: that is what the plan counts."""
    order = BlockShuffled(block * blocks, np.arange(0, block * blocks, block), window, seed)
    partition = Partition(len(order), batch, rank=seed % world, world_size=world)
    request = Request(
        fields={"x": FieldSpec(np.dtype(np.uint8), (2**20,))}, batch_rows=min(batch, len(order)), steps=partition.steps,
        threads=1, limit_bytes=2**40, scratch_bytes=lambda rows: 0, block_rows=block,
        window_rows=min(window * block, len(order)),
    )  # fmt: skip
    plan = make_plan(replace(request, limit_bytes=make_plan(request).smallest_bytes))
    assume(plan.is_tight)
    free, filled, complete, kept = list(range(plan.slots)), Counter(), [], []
    most = 2 * plan.batch_rows - 1 + plan.window_rows
    taken, idle = 0, 0
    for read in reads(Epoch(0, order, partition), plan, lambda: free.pop() if free else None):
        if read is not None:
            for number, one in enumerate(read.batches):
                filled[one.slot] += len(read.of_batch(number).rows)
                one.reads_left -= 1
                complete += [one] if one.reads_left == 0 else []
            assert sum(filled.values()) <= most
        idle += 1
        while read is None or idle > slow:  # the caller takes the next batch, and drops the one before
            idle, next_one = 0, next((one for one in complete if one.step == taken), None)
            if next_one is None:
                assert read is not None or kept, "reading waits for ever"
                break
            taken += 1
            complete.remove(next_one)
            for one in kept:
                del filled[one.slot]
                free.append(one.slot)
            kept = [next_one]
            if read is None:
                break
    assert taken + len(complete) == partition.steps


@pytest.mark.skipif(not CAN_RETURN_PAGES, reason="only Linux takes pages back at once")
def test_where_memory_is_tight_batches_are_the_same(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 99, (60, 300, 500), np.int16)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(12, 100, 100), compression="gzip", compression_opts=1)
    ds = ps.open(tmp_path / "x.h5").cast("x", "float32")
    smallest = ps.plan(ds, batch_size=8, shuffle=True, memory="1GiB", window=12).plan.smallest_bytes
    tight = loader(ds, batch_size=8, memory=smallest, columns=("x", "__index__"), window=12, processes=0)
    usual = loader(ds, batch_size=8, memory="1GiB", columns=("x", "__index__"), window=12, processes=0)
    assert tight.plan.is_tight
    assert not usual.plan.is_tight
    assert tight.plan.holders["batches"] < tight.plan.slots * tight.plan.batch_bytes
    for _ in range(2):
        for (x, rows), (same, same_rows) in zip(tight, usual, strict=True):
            assert rows.tolist() == same_rows.tolist()
            assert (x == same).all()
            assert (x.numpy() == values[rows]).all()
    with pytest.warns(KeptBatches):
        kept = list(tight)
    assert all((x.numpy() == values[rows]).all() for x, rows in kept)


def test_an_order_is_computed_once_all_slots_of_a_read_are_there() -> None:
    """Until then the caller may have use for the core, and for the interpreter's lock."""

    class Counted(InOrder):
        calls = 0

        def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
            self.calls += 1
            return super().at(epoch, positions)

    order = Counted(8 * 3000)
    partition = Partition(len(order), 8)
    request = Request(
        fields={"x": FieldSpec(np.dtype(np.uint8), (100,))}, batch_rows=8, steps=partition.steps, threads=1,
        limit_bytes=2**40, scratch_bytes=lambda rows: 0,
    )  # fmt: skip
    slots = [None, None, 0, None, 1, None, 2]  # the first read has one batch, the second has two
    found = reads(Epoch(0, order, partition), make_plan(request), lambda: slots.pop(0))
    assert [next(found), next(found)] == [None, None]
    assert order.calls == 0
    assert [batch.slot for batch in next(found).batches] == [0]
    assert [next(found), next(found)] == [None, None]
    assert [batch.slot for batch in next(found).batches] == [1, 2]


def test_the_first_batch_waits_for_no_others() -> None:
    """Small batches are read together, but an epoch begins with one by itself."""
    order = InOrder(8 * 3000)
    partition = Partition(len(order), 8)
    request = Request(
        fields={"x": FieldSpec(np.dtype(np.uint8), (100,))}, batch_rows=8, steps=partition.steps, threads=1,
        limit_bytes=2**40, scratch_bytes=lambda rows: 0,
    )  # fmt: skip
    slots = iter(range(partition.steps))
    found = list(reads(Epoch(0, order, partition), make_plan(request), lambda: next(slots)))
    assert [len(read.batches) for read in found[:11]] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256]
    assert [batch.step for read in found for batch in read.batches] == list(range(partition.steps))
    assert np.concatenate([read.rows for read in found]).tolist() == list(range(len(order)))
