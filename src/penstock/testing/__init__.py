"""Checks for your own stores, orders and loaders: plain functions that raise ``AssertionError``; no test runner needed.

from penstock.testing import check_store

def test_my_format(tmp_path):
    values = {"image": np.random.default_rng(0).normal(size=(20, 8, 8))}
    write_my_format(tmp_path / "x.mine", values)
    check_store(lambda: MyStore(tmp_path / "x.mine"), values)
"""

from penstock.testing.budget import check_budget
from penstock.testing.order import check_order
from penstock.testing.resume import check_resume
from penstock.testing.store import check_store

__all__ = ["check_budget", "check_order", "check_resume", "check_store"]
