"""penstock feeds PyTorch from datasets far larger than memory, inside a memory budget given in bytes."""

from penstock import errors
from penstock.dataset import Dataset, concat, from_arrays, join, open
from penstock.loader import Loader
from penstock.order import BlockShuffled, InOrder, Order, Resampled, Shuffled
from penstock.plan import Plan
from penstock.spec import FieldSpec
from penstock.stats import Stats
from penstock.store import Store

__version__ = "0.1.0"

__all__ = [
    "BlockShuffled", "Dataset", "FieldSpec", "InOrder", "Loader", "Order", "Plan", "Resampled", "Shuffled", "Stats",
    "Store", "concat", "errors", "from_arrays", "join", "open",
]  # fmt: skip
