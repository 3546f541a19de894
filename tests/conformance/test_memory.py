"""Arrays in memory."""

import numpy as np

from penstock.dataset.memory import MemoryStore
from penstock.testing import check_store


def test_memory() -> None:
    rng = np.random.default_rng(0)
    values = {"image": rng.normal(size=(17, 3, 5)), "label": np.arange(17, dtype=np.int64)}
    check_store(lambda: MemoryStore(values), values)
