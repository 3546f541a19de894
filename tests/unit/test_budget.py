"""The ledger: reservations have holders, and never exceed the limit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.budget import MemoryBudget
from penstock.errors import BudgetExceeded

patient = settings(deadline=None)  # a busy machine is no failure


def test_holders_in_order_of_reservation():
    ledger = MemoryBudget(100)
    ledger.reserve("slots", 40)
    ledger.reserve("index", 0)
    ledger.reserve("scratch", 10)
    ledger.reserve("slots", 20)
    assert list(ledger.holders.items()) == [("slots", 60), ("index", 0), ("scratch", 10)]
    assert (ledger.limit_bytes, ledger.reserved_bytes, ledger.free_bytes) == (100, 70, 30)


def test_the_last_byte_can_be_had_and_no_more():
    ledger = MemoryBudget(100)
    ledger.reserve("slots", 100)
    assert ledger.free_bytes == 0
    ledger.reserve("nothing", 0)
    with pytest.raises(BudgetExceeded):
        ledger.reserve("scratch", 1)


def test_a_refusal_changes_nothing_and_says_who_holds_what():
    ledger = MemoryBudget(10 * 2**20)
    ledger.reserve("slots", 8 * 2**20)
    with pytest.raises(BudgetExceeded) as refused:
        ledger.reserve("scratch", 3 * 2**20)
    assert ledger.holders == {"slots": 8 * 2**20}
    for told in ("scratch needs 3.00 MiB", "10.0 MiB", "2.00 MiB is free", "slots 8.00 MiB"):
        assert told in str(refused.value)


def test_described():
    ledger = MemoryBudget(2**30)
    assert ledger.describe() == "nothing held"
    ledger.reserve("slots", 576 * 2**20)
    ledger.reserve("scratch", 2**20)
    assert ledger.describe() == "slots 576 MiB, scratch 1.00 MiB"


def test_holders_are_a_snapshot():
    ledger = MemoryBudget(10)
    ledger.reserve("slots", 1)
    ledger.holders["slots"] = 0
    assert ledger.holders == {"slots": 1}


@patient
@given(st.integers(0, 1000), st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 500))))
def test_never_over_the_limit(limit, reservations):
    ledger, granted = MemoryBudget(limit), 0
    for holder, bytes_ in reservations:
        try:
            ledger.reserve(holder, bytes_)
            granted += bytes_
        except BudgetExceeded:
            assert granted + bytes_ > limit
        assert ledger.reserved_bytes == granted == sum(ledger.holders.values()) <= limit
