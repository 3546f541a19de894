"""penstock feeds PyTorch from datasets far larger than memory, inside a memory budget given in bytes."""

import gc
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import errors
    from penstock.base.spec import FieldSpec
    from penstock.conversion.convert import convert
    from penstock.dataset.composition import concat, from_arrays, join
    from penstock.dataset.dataset import Dataset
    from penstock.dataset.store import Store
    from penstock.errors import (
        BudgetExceeded,
        CacheIsFull,
        Changed,
        ConfigError,
        ConvertFailed,
        Corrupt,
        DataError,
        DecodeFailed,
        FieldsLeftOut,
        KeptBatches,
        LimitExceeded,
        Missing,
        OutOfRange,
        PenstockError,
        ReadersNotStarted,
        SchemaMismatch,
        SourceError,
        StateMismatch,
        TransformFailed,
        Truncated,
        Unavailable,
        Unsafe,
        WorkerDied,
        WrongArgument,
    )
    from penstock.formats.inspect import inspect
    from penstock.formats.open import open, open_raw
    from penstock.loader.forecast import plan
    from penstock.loader.loader import Loader
    from penstock.loader.multi import MultiLoader
    from penstock.loader.order import BlockShuffled, InOrder, Order, Resampled, Shuffled
    from penstock.loader.plan import Plan
    from penstock.loader.stats import Stats
    from penstock.loader.verify import verify
    from penstock.loader.verify_files import write_manifest

__version__ = "0.2.0"

__all__ = [
    "BlockShuffled", "BudgetExceeded", "CacheIsFull", "Changed", "ConfigError", "ConvertFailed", "Corrupt", "DataError",
    "Dataset", "DecodeFailed", "FieldSpec", "FieldsLeftOut", "InOrder", "KeptBatches", "LimitExceeded", "Loader",
    "Missing", "MultiLoader", "Order", "OutOfRange", "PenstockError", "Plan", "ReadersNotStarted", "Resampled",
    "SchemaMismatch", "Shuffled", "SourceError", "StateMismatch", "Stats", "Store", "TransformFailed", "Truncated",
    "Unavailable", "Unsafe", "WorkerDied", "WrongArgument", "concat", "convert", "errors", "from_arrays",
    "inspect", "join", "open", "open_raw", "plan", "verify", "write_manifest",
]  # fmt: skip

# Each name is fetched on first use: importing penstock takes milliseconds, and numpy is imported when it is needed.
_HOMES = {
    "dataset.composition": ("concat", "from_arrays", "join"),
    "dataset.dataset": ("Dataset",),
    "conversion.convert": ("convert",),
    "formats.open": ("open", "open_raw"),
    "loader.forecast": ("plan",),
    "formats.inspect": ("inspect",),
    "loader.loader": ("Loader",),
    "loader.multi": ("MultiLoader",),
    "loader.order": ("BlockShuffled", "InOrder", "Order", "Resampled", "Shuffled"),
    "loader.plan": ("Plan",),
    "base.spec": ("FieldSpec",),
    "loader.stats": ("Stats",),
    "dataset.store": ("Store",),
    "loader.verify": ("verify",),
    "loader.verify_files": ("write_manifest",),
}  # fmt: skip
_HOME_OF = dict.fromkeys(__all__, "errors") | {name: home for home, names in _HOMES.items() for name in names}


# Modules that users import under a shorter name: ``from penstock.measure import measure``.
_SHORT = {"hooks": "loader.hooks", "measure": "testing.measure"}


class _ShortNames:
    """Finds the modules in ``_SHORT`` when they are first imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        known = name.startswith("penstock.") and name.removeprefix("penstock.") in _SHORT
        return ModuleSpec(name, _ShortNames) if known else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> Any:
        return import_module(f"penstock.{_SHORT[spec.name.removeprefix('penstock.')]}")

    @staticmethod
    def exec_module(module: object) -> None:
        """It ran when it was made."""


sys.meta_path.append(_ShortNames)


def __getattr__(name: str) -> Any:
    if name == "errors" or name in _SHORT:
        return import_module(f"penstock.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = globals()[name] = getattr(_import(f"penstock.{_HOME_OF[name]}"), name)
    return value


def _import(module: str) -> Any:
    """Import without garbage collection: beside torch's objects it would take twice as long as the import itself."""
    if not gc.isenabled():
        return import_module(module)
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.enable()


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
