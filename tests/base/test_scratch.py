"""Buffers and scratch: aligned, private, lent as a stack, and measured."""

import gc
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base import scratch as memory
from penstock.base.machine import held_bytes
from penstock.base.scratch import ALIGNMENT, aligned, borrow, buffer, overflow_bytes, peak_bytes, prepare, release

patient = settings(deadline=None)  # a busy machine is no failure

MiB = 2**20


@pytest.fixture(autouse=True)
def _own_scratch():
    release()
    yield
    release()


@pytest.mark.parametrize(("bytes_", "rounded"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128), (10**12, 10**12)])
def test_rounded_up_to_a_cache_line(bytes_, rounded):
    assert aligned(bytes_) == rounded


@pytest.mark.parametrize("bytes_", [0, 1, 63, 64, 4096, 4097, 3 * MiB])
def test_a_buffer_is_aligned_writable_bytes(bytes_):
    block = buffer(bytes_)
    assert (block.dtype, block.shape) == (np.uint8, (bytes_,))
    assert block.ctypes.data % ALIGNMENT == 0
    assert block.flags.writeable
    block[:] = 7
    assert (block == 7).all()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_buffer_is_private():
    block = buffer(8192)
    block[:] = 1
    child = os.fork()
    if child == 0:
        seen = int(block.sum())
        block[:] = 2
        os._exit(0 if seen == 8192 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (block == 1).all(), "a child must not write into its parent's memory"


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_a_buffer_goes_back_to_the_system_with_its_last_view():
    gc.collect()
    before = held_bytes()
    block = buffer(64 * MiB)
    block[:] = 1
    view = block[10:20].view(np.uint16)
    del block
    assert held_bytes() - before > 60 * MiB
    assert view.tolist() == [257] * 5
    del view
    assert held_bytes() - before < 8 * MiB


def test_loans_nest_like_a_stack():
    prepare(1024)
    with borrow(100) as outer:
        outer[:] = 1
        with borrow(100) as inner:
            inner[:] = 2
            assert not np.shares_memory(outer, inner)
            assert peak_bytes() == 256
        with borrow(200) as later:
            assert np.shares_memory(inner, later), "what was returned is lent again"
            later[:] = 3
        assert (outer == 1).all()
        assert len(outer) == 100
    assert peak_bytes() == 128 + 256
    assert overflow_bytes() == 0


@patient
@given(
    st.recursive(st.just([]), lambda inner: st.lists(st.tuples(st.integers(0, 300), inner), max_size=4), max_leaves=12)
)
def test_scratch_that_was_measured_suffices(loans):
    def run(loans):
        for bytes_, inner in loans:
            with borrow(bytes_) as lent:
                assert len(lent) == bytes_
                assert lent.ctypes.data % 16 == 0
                lent[:] = bytes_ % 251
                run(inner)
                assert (lent == bytes_ % 251).all()

    prepare(0)
    run(loans)
    needed = peak_bytes()
    assert overflow_bytes() == needed
    prepare(needed)
    run(loans)
    assert overflow_bytes() == 0
    if needed:
        prepare(needed - ALIGNMENT)
        run(loans)
        assert overflow_bytes() == ALIGNMENT


def test_what_was_prepared_is_lent_aligned():
    prepare(1024)
    with borrow(1) as one, borrow(65) as two, borrow(8) as three:
        for lent in (one, two, three):
            assert lent.ctypes.data % ALIGNMENT == 0


def test_beyond_what_was_prepared_is_counted():
    prepare(128)
    with borrow(64):
        assert overflow_bytes() == 0
        with borrow(200) as beyond:
            beyond[:] = 1
            assert overflow_bytes() == 64 + 256 - 128
    with borrow(128) as lent:
        lent[:] = 1
    assert overflow_bytes() == 192, "the worst is remembered"
    prepare(128)
    assert (overflow_bytes(), peak_bytes()) == (0, 0)


def test_a_loan_is_returned_by_an_error_too():
    prepare(64)
    with pytest.raises(KeyError), borrow(64):
        raise KeyError
    with borrow(64):
        assert overflow_bytes() == 0


def test_released_scratch_lends_from_elsewhere():
    prepare(4096)
    release()
    with borrow(64) as lent:
        lent[:] = 1
    assert overflow_bytes() == 64


def test_each_thread_has_its_own():
    prepare(4096)
    with borrow(4096) as mine:
        mine[:] = 1
        seen = []

        def other():
            prepare(4096)
            with borrow(4096) as theirs:
                theirs[:] = 2
                seen.append((np.shares_memory(mine, theirs), overflow_bytes(), peak_bytes()))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == [(False, 0, 4096)]
        assert (mine == 1).all()


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_scratch_of_a_dead_thread_is_gone():
    gc.collect()
    before = held_bytes()

    def work():
        prepare(32 * MiB)
        with borrow(32 * MiB) as lent:
            lent[:] = 1

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert held_bytes() - before < 8 * MiB
    assert memory.overflow_bytes() == 0
