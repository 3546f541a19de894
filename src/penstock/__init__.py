"""penstock feeds PyTorch from datasets far larger than memory, inside a memory budget given in bytes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import errors
    from penstock.dataset import Dataset, concat, from_arrays, join
    from penstock.forecast import plan
    from penstock.inspection import inspect
    from penstock.loader import Loader
    from penstock.multi import MultiLoader
    from penstock.opening import open, open_raw
    from penstock.order import BlockShuffled, InOrder, Order, Resampled, Shuffled
    from penstock.planning import Plan
    from penstock.spec import FieldSpec
    from penstock.stats import Stats
    from penstock.store import Store
    from penstock.verification import verify, write_manifest

__version__ = "0.1.0"

__all__ = [
    "BlockShuffled", "Dataset", "FieldSpec", "InOrder", "Loader", "MultiLoader", "Order", "Plan", "Resampled",
    "Shuffled", "Stats", "Store", "concat", "errors", "from_arrays", "inspect", "join", "open", "open_raw",
    "plan", "verify", "write_manifest",
]  # fmt: skip

# Each name is fetched on first use: importing penstock takes milliseconds, and numpy is imported when it is needed.
_HOMES = {
    "dataset": ("Dataset", "concat", "from_arrays", "join"),
    "opening": ("open", "open_raw"),
    "forecast": ("plan",),
    "inspection": ("inspect",),
    "loader": ("Loader",),
    "multi": ("MultiLoader",),
    "order": ("BlockShuffled", "InOrder", "Order", "Resampled", "Shuffled"),
    "planning": ("Plan",),
    "spec": ("FieldSpec",),
    "stats": ("Stats",),
    "store": ("Store",),
    "verification": ("verify", "write_manifest"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("penstock.errors")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"penstock.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
