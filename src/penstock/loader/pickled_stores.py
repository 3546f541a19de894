"""Stores on their way to reader processes: one pickle, and one copy of their tables that all processes share.

Large arrays (tables of chunks, names of samples, arrays in memory) are not part of the pickle. They lie in shared
memory, which each process maps: what is written there stays private to the process.
"""

import inspect
import io
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from penstock.base import fork
from penstock.base.dataclass import dataclass
from penstock.base.scratch import aligned, map_shared
from penstock.dataset.map import Mapped
from penstock.dataset.store import StoreBase
from penstock.loader.slots import shared_memory

# What unpickling may fail with in a process of its own, beyond ImportError: whatever the caller's modules raise.
CANNOT_PICKLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError, ImportError)

# Which modules are sent by value is known to the whole process, and loaders may be made in several threads.
_REGISTERING = fork.Lock()


@dataclass(frozen=True)
class BufferLayout:
    """Where the parts of pickled stores lie in memory: first the pickle, then the arrays."""

    sizes: Sequence[int]

    @property
    def begins(self) -> list[int]:
        begins, end = [], 0
        for size in self.sizes:
            begins.append(end)
            end += aligned(size)
        return begins

    @property
    def bytes(self) -> int:
        return sum(map(aligned, self.sizes))


class PickledStores:
    """Stores as they are sent. Arrays are copied only by ``copy_to_shared``."""

    def __init__(self, stores: Sequence[StoreBase]) -> None:
        buffers: list[pickle.PickleBuffer] = []
        self._parts = [memoryview(_pickled(stores, buffers)), *(buffer.raw() for buffer in buffers)]
        self.layout = BufferLayout([part.nbytes for part in self._parts])

    @property
    def bytes(self) -> int:
        """The memory that all processes share."""
        return self.layout.bytes

    @property
    def pickle_bytes(self) -> int:
        """The part that each process unpickles into objects of its own."""
        return self._parts[0].nbytes

    def mentions(self, module: str) -> bool:
        """Whether the pickle refers to a module by name."""
        return module.encode() in bytes(self._parts[0])

    def copy_to_shared(self) -> int:
        """A descriptor of shared memory that holds the pickle and the arrays."""
        memory, descriptor = shared_memory(self.bytes)
        for begin, part in zip(self.layout.begins, self._parts, strict=True):
            memory[begin : begin + part.nbytes] = part
        return descriptor


def functions(store: StoreBase) -> Iterator[Any]:
    """The caller's functions that run while rows are read."""
    if isinstance(store, Mapped):
        yield store.function
    for child in store.children:
        yield from functions(child)


def find_obstacle(store: StoreBase) -> str:
    """What a caller's function uses although it cannot be sent to another process; empty if there is no such thing."""
    import cloudpickle

    for function in functions(store):
        used = dict(getattr(function, "__dict__", {}))
        if isinstance(function, FunctionType):
            captured = inspect.getclosurevars(function)
            used |= {**captured.nonlocals, **captured.globals}
            used |= {name: each.default for name, each in inspect.signature(function).parameters.items()}
        for name, value in used.items():
            try:
                cloudpickle.Pickler(io.BytesIO(), protocol=5, buffer_callback=[].append).dump(value)
            except CANNOT_PICKLE:
                return f"{getattr(function, '__name__', type(function).__name__)} uses {name!r}"
    return ""


def _pickled(stores: Sequence[StoreBase], buffers: list[pickle.PickleBuffer]) -> bytes:
    """Functions and classes of modules that another process could not import are pickled with their code."""
    import cloudpickle  # also takes lambdas, closures, and functions of notebooks and scripts

    by_value: dict[str, bool] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, item: Any) -> Any:
            name = getattr(item, "__module__", None) if isinstance(item, FunctionType | type) else None
            if isinstance(name, str) and name not in by_value:
                by_value[name] = name in sys.modules and name != "__main__" and not is_imported_again(name)
                by_value[name] &= name not in cloudpickle.list_registry_pickle_by_value()
                if by_value[name]:
                    cloudpickle.register_pickle_by_value(sys.modules[name])
            return super().reducer_override(item)

    stream = io.BytesIO()
    with _REGISTERING:
        try:
            Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(list(stores))
        finally:
            for name in (name for name, is_registered in by_value.items() if is_registered):
                cloudpickle.unregister_pickle_by_value(sys.modules[name])
    return stream.getvalue()


def is_imported_again(name: str) -> bool:
    """Whether another process imports this module, rather than getting the code of its functions."""
    package = name.partition(".")[0]
    if package in ("", "__main__"):
        return False
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    specs = (find(package, None) for find in finders if find is not None)
    spec = next((spec for spec in specs if spec is not None), None)
    here = getattr(sys.modules.get(package), "__file__", None)
    if spec is None or here is None or not spec.has_location:
        return spec is not None
    return os.path.realpath(spec.origin) == os.path.realpath(here)  # or else another module of the same name


def load_stores(descriptor: int, layout: BufferLayout) -> list[Any]:
    """The stores, in another process."""
    memory = map_shared(descriptor, layout.bytes, is_private=True)
    os.close(descriptor)
    parts = [memory[begin : begin + size] for begin, size in zip(layout.begins, layout.sizes, strict=True)]
    stores: list[Any] = pickle.loads(parts[0].data, buffers=parts[1:])  # noqa: S301  # made by our own process
    return stores


def pickle_any(message: Any) -> bytes:
    """Pickled, also if it holds objects of the caller's own classes, which are recognized when they come back."""
    try:
        return pickle.dumps(message, protocol=5)
    except Exception:
        import cloudpickle

        found: bytes = cloudpickle.dumps(message, protocol=5)
        return found
