"""Slots: lent with a batch, back when the last array of it dies, never overwritten before."""

import gc
import os
import threading
import time
import weakref
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from penstock.base.machine import held_bytes
from penstock.base.scratch import ALIGNMENT
from penstock.base.spec import FieldSpec
from penstock.loader.slots import REST_S, SMALL_BATCH_BYTES, Slots, slot_bytes

MiB = 2**20
FIELDS = {
    "betas": FieldSpec(np.dtype(np.float32), (5,)),
    "image": FieldSpec(np.dtype(np.uint8), (3, 7)),
    "label": FieldSpec(np.dtype(np.int64)),
}


def make(count=3, rows=4, fields=FIELDS):
    return Slots(fields, rows, count)


def free_numbers(slots):
    numbers = list(iter(slots.take, None))
    for number in numbers:
        slots.give_back(number)
    return sorted(numbers)


def take(slots):
    until = time.monotonic() + 5
    while (number := slots.take()) is None:
        assert time.monotonic() < until
    return number


def fill(slots, number, value):
    arrays, begin = slots.memory(number)
    for array in arrays.values():
        array[begin : begin + slots.rows] = value


@pytest.mark.parametrize(("rows", "bytes_"), [(1, 64 + 64 + 64), (4, 128 + 128 + 64), (100, 2048 + 2112 + 832)])
def test_slot_bytes(rows, bytes_):
    assert slot_bytes(FIELDS, rows) == bytes_


def test_planned_slots_lie_in_one_block_field_by_field():
    slots = make(count=3, rows=4)
    assert free_numbers(slots) == [0, 1, 2]
    assert (slots.count, slots.lent, slots.added_peak) == (3, 0, 0)
    for number in range(3):
        arrays, begin = slots.memory(number)
        assert begin == 4 * number
        assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
            name: ((12, *spec.shape), spec.dtype) for name, spec in FIELDS.items()
        }
        assert all(array.ctypes.data % ALIGNMENT == 0 for array in arrays.values())


def test_a_loan_shows_the_first_rows_of_its_slot():
    slots = make(rows=4)
    for number in range(3):
        fill(slots, number, number + 1)
    lent = slots.lend(1, 3)
    assert list(lent) == list(FIELDS)
    for name, array in lent.items():
        assert (array.shape, array.dtype) == ((3, *FIELDS[name].shape), FIELDS[name].dtype)
        assert (array == 2).all()
        assert array.flags.writeable
    assert slots.lent == 1


def test_a_slot_is_back_when_its_last_array_dies():
    slots = make()
    lent = slots.lend(take(slots), 4)
    assert free_numbers(slots) == [1, 2]
    del lent["betas"], lent["label"]
    assert slots.lent == 1
    del lent
    assert slots.lent == 0
    assert free_numbers(slots) == [0, 1, 2]


VIEWS = {
    "slice": lambda array: array[1:3],
    "view of view": lambda array: array[1:].reshape(-1)[1:][::2],
    "other dtype": lambda array: array.view(np.uint8)[:, 1:],
    "transposed": lambda array: array.T,
    "memoryview": memoryview,
    "iterator": iter,
    "tensor": torch.from_numpy,
    "view of tensor": lambda array: torch.from_numpy(array)[1:].reshape(-1)[2:],
    "tensor's array": lambda array: torch.from_numpy(array)[1:].numpy(),
    "tensor's array's tensor": lambda array: torch.from_numpy(torch.from_numpy(array)[1:].numpy()),
    "dlpack": np.from_dlpack,
    "torch dlpack": torch.from_dlpack,
    "detached": lambda array: torch.from_numpy(array).detach().view(-1),
}


@pytest.mark.parametrize("view_of", VIEWS.values(), ids=VIEWS)
def test_any_view_keeps_the_slot(view_of):
    slots = make()
    view = view_of(slots.lend(take(slots), 4)["betas"])
    assert slots.lent == 1
    assert free_numbers(slots) == [1, 2]
    del view
    assert slots.lent == 0, "at once, not with the collector"
    assert free_numbers(slots) == [0, 1, 2]


COPIES = {
    "copy": lambda array: array.copy(),
    "arithmetic": lambda array: array * 2,
    "picked": lambda array: array[[0, 2]],
    "clone": lambda array: torch.from_numpy(array).clone(),
}


@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
def test_a_copy_does_not(copy_of):
    slots = make()
    copied = copy_of(slots.lend(take(slots), 4)["betas"])
    assert slots.lent == 0
    assert len(copied)


def test_a_lent_slot_is_not_written_to_by_others():
    slots = make(count=2)
    first = take(slots)
    fill(slots, first, 1)
    kept = slots.lend(first, 4)["betas"][1:]
    for value in range(2, 20):
        number = take(slots)
        assert number != first
        fill(slots, number, value)
        batch = slots.lend(number, 4)
        assert (batch["betas"] == value).all()
        del batch
    assert (kept == 1).all()


def test_a_slot_in_a_cycle_comes_back_with_the_collector():
    slots = make()
    batch = slots.lend(take(slots), 4)
    batch["self"] = batch
    del batch
    gc.collect()
    assert slots.lent == 0


def test_kept_batches_get_slots_added():
    slots = make(count=2)
    kept = [slots.lend(take(slots), 4) for _ in range(2)]
    slots.ensure(1)
    assert (slots.count, slots.lent, slots.added_peak) == (3, 2, 1)
    assert free_numbers(slots) == [2]
    slots.ensure(1)
    assert slots.count == 3
    kept.append(slots.lend(take(slots), 4))
    slots.ensure(2)
    assert (slots.count, slots.lent, slots.added_peak) == (5, 3, 3)
    for value, batch in enumerate(kept):
        batch["betas"][:] = value
    assert [batch["betas"][0, 0] for batch in kept] == [0, 1, 2]


def test_nothing_is_added_without_need():
    slots = make(count=2)
    slots.ensure(2)
    batch = slots.lend(take(slots), 4)
    slots.ensure(1)
    assert (slots.count, slots.added_peak) == (2, 0)
    del batch


def test_added_slots_go_back_to_the_system():
    slots = make(count=2)
    kept = []
    for _ in range(10):
        slots.ensure(1)
        kept.append(slots.lend(take(slots), 4))
    assert slots.count == 10
    kept.clear()
    for _ in range(20):  # whatever was still queued is used once, then given back
        slots.ensure(1)
        slots.lend(take(slots), 4)
    assert slots.count == slots.planned == 2
    assert free_numbers(slots) == [0, 1]
    assert slots.added_peak == 8


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_added_memory_goes_back_to_the_system():
    large = {"image": FieldSpec(np.dtype(np.uint8), (MiB,))}
    slots = Slots(large, 4, 2)
    gc.collect()
    before = held_bytes()
    kept = []
    for _ in range(12):
        slots.ensure(1)
        kept.append(slots.lend(take(slots), 4))
        kept[-1]["image"][:] = 1
    assert held_bytes() - before > 40 * MiB
    kept.clear()
    for _ in range(20):
        slots.lend(take(slots), 4)
    assert held_bytes() - before < 2 * 4 * MiB + 4 * MiB


def test_returned_from_another_thread():
    slots = make(count=2)
    batches = [slots.lend(take(slots), 4) for _ in range(2)]
    got = []
    wake_ups = SimpleQueue()
    slots.wake(wake_ups)  # also for what is lent already

    def wait():
        wake_ups.get(timeout=10)
        got.append(slots.take())

    waiting = threading.Thread(target=wait)
    waiting.start()
    other = threading.Thread(target=batches.pop)
    other.start()
    other.join()
    waiting.join()
    assert got == [1]
    assert slots.lent == 1


def test_threads_are_woken_once_there_are_enough_slots_for_a_read():
    slots, wake_ups = Slots(FIELDS, 4, 6, wake_from=3), SimpleQueue()
    slots.wake(wake_ups)
    batches = [slots.lend(take(slots), 4) for _ in range(6)]
    del batches[:2]
    assert not slots.ensure(1)
    assert wake_ups.empty()
    del batches[:1]
    assert wake_ups.empty()  # the end of a loan alone wakes nobody
    for _ in range(2):
        assert not slots.ensure(1)
        assert wake_ups.qsize() == 1
    assert len(free_numbers(slots)) == 3


def test_threads_rest_while_a_caller_takes_small_batches(monkeypatch):
    """Unless the caller waits, or has needed long for the batches that were ready."""
    now = [100.0]
    monkeypatch.setattr("penstock.loader.slots.time.monotonic", lambda: now[0])
    slots, wake_ups = Slots(FIELDS, 4, 6, wake_from=3), SimpleQueue()
    slots.wake(wake_ups)
    slots.wake_at_once()
    wake_ups.get_nowait()
    assert not slots.ensure(1)
    assert wake_ups.empty()
    now[0] += REST_S
    assert not slots.ensure(1)
    assert wake_ups.qsize() == 1


def test_threads_never_rest_where_batches_are_large():
    slots, wake_ups = Slots(FIELDS, 1 + SMALL_BATCH_BYTES // 21, 6, wake_from=3), SimpleQueue()
    slots.wake(wake_ups)
    for _ in range(2):
        assert not slots.ensure(1)
        wake_ups.get_nowait()


def test_many_threads_lend_and_return():
    slots = make(count=4, rows=1, fields={"label": FieldSpec(np.dtype(np.int64))})
    wrong = []

    def work(mark):
        for turn in range(500):
            number = take(slots)
            value = mark * 1000 + turn
            fill(slots, number, value)
            batch = slots.lend(number, 1)
            view = batch["label"][:]
            del batch
            if view[0] != value:
                wrong.append(value)
            del view

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert slots.lent == 0
    assert free_numbers(slots) == [0, 1, 2, 3]


def test_given_back_without_a_loan():
    slots = make(count=2)
    number = take(slots)
    slots.give_back(number)
    assert free_numbers(slots) == [0, 1]


def test_closed_while_lent_keeps_what_is_lent():
    slots = make(count=3)
    number = take(slots)
    fill(slots, number, 7)
    batch = slots.lend(number, 4)
    tensor = torch.from_numpy(slots.lend(take(slots), 4)["label"])
    tensor[:] = 9
    slots.close()
    del slots
    gc.collect()
    scribbled = [np.full(100, 255, np.uint8) for _ in range(1000)]
    assert all((array == 7).all() for array in batch.values())
    assert tensor.tolist() == [9] * 4
    del batch, tensor, scribbled


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_closed_memory_goes_with_its_last_array():
    gc.collect()
    before = held_bytes()
    slots = Slots({"image": FieldSpec(np.dtype(np.uint8), (MiB,))}, 16, 2)
    fill(slots, 0, 1)
    fill(slots, 1, 2)
    kept = slots.lend(take(slots), 16)["image"]
    slots.close()
    assert kept.min() == kept.max() == 1
    assert held_bytes() - before > 30 * MiB
    del kept
    gc.collect()
    assert held_bytes() - before < 8 * MiB


def test_planned_memory_is_pinned_and_unpinned_once():
    log = []

    def pin(block):
        log.append(("pinned", block.nbytes))
        return lambda: log.append(("unpinned", block.nbytes))

    slots = Slots(FIELDS, 4, 3, pin)
    kept = []
    for _ in range(5):
        slots.ensure(1)
        kept.append(slots.lend(take(slots), 4))
    slots.close()
    slots.close()
    assert [what for what, _ in log] == ["pinned", "unpinned"]


def test_memory_that_nobody_closed_is_unpinned_before_it_goes():
    log = []

    def pin(block):
        there = weakref.ref(block)
        return lambda: log.append(there() is not None)

    slots = Slots(FIELDS, 4, 3, pin)
    batch = slots.lend(take(slots), 4)
    del slots
    gc.collect()
    assert log == []  # the batch still lies in it
    del batch
    gc.collect()
    assert log == [True]


def test_fields_without_elements():
    slots = Slots({"none": FieldSpec(np.dtype(np.float32), (0, 3)), "label": FieldSpec(np.dtype(np.int64))}, 4, 2)
    batch = slots.lend(take(slots), 2)
    assert batch["none"].shape == (2, 0, 3)
    assert batch["label"].shape == (2,)
