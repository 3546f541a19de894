"""What every order must do."""

import json

import numpy as np

from penstock.loader.order import Order


def check_order(order: Order, *, rows: int, once: bool = True, epochs: int = 3, seed: int = 0) -> None:
    """Check that an order is a pure function of (epoch, position) onto ``range(rows)``.

    once: whether every row must come exactly once per epoch; False if rows are drawn with replacement
    """
    rng = np.random.default_rng(seed)
    length = len(order)
    for epoch in range(epochs):
        whole = order.rows(epoch, 0, length)
        assert whole.dtype == np.int64, f"rows must be int64, got {whole.dtype}"
        assert whole.shape == (length,), f"{length} positions gave {whole.shape} rows"
        if once:
            assert np.array_equal(np.sort(whole), np.arange(rows)), "every row must come exactly once"
        elif length:
            assert whole.min() >= 0, "rows must be there: one is negative"
            assert whole.max() < rows, f"rows must be there: {whole.max()} of {rows}"
        for _ in range(5):
            begin, end = np.sort(rng.integers(0, length + 1, 2))
            assert np.array_equal(order.rows(epoch, int(begin), int(end)), whole[begin:end]), (
                f"positions {begin} to {end} of epoch {epoch} differ when asked for alone"
            )
            positions = rng.integers(0, max(1, length), min(length, 20))
            assert np.array_equal(order.at(epoch, positions), whole[positions]), "positions asked for at random differ"
    json.dumps(order.describe())
