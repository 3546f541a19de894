"""Stores on their way to reader processes: one pickle, and one copy of their tables that all processes share.

Large arrays (tables of chunks, names of samples, arrays in memory) are not part of the pickle. They lie in shared
memory, which each process maps: what is written there stays private to the process.
"""

import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.base.scratch import aligned, map_shared, shared_buffer
from penstock.dataset.map import Mapped
from penstock.dataset.store import StoreBase

# What unpickling may fail with in a process of its own, beyond ImportError: whatever the caller's modules raise.
CANNOT_PICKLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError, ImportError)


@dataclass(frozen=True)
class Layout:
    """Where the parts of a shipment lie in its memory: first the pickle, then the arrays."""

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


class Shipment:
    """Stores as they are sent. Making one copies no arrays; ``load`` does."""

    def __init__(self, stores: Sequence[StoreBase]) -> None:
        import cloudpickle  # also takes lambdas, closures, and functions of notebooks and scripts

        buffers: list[pickle.PickleBuffer] = []
        with _sent_by_value(stores):
            stream = cloudpickle.dumps(list(stores), protocol=5, buffer_callback=buffers.append)
        self._parts = [memoryview(stream), *(buffer.raw() for buffer in buffers)]
        self.layout = Layout([part.nbytes for part in self._parts])

    @property
    def bytes(self) -> int:
        """What all processes together hold of it."""
        return self.layout.bytes

    @property
    def pickle_bytes(self) -> int:
        """The part that is unpickled into objects of each process."""
        return self._parts[0].nbytes

    def mentions(self, module: str) -> bool:
        """Whether the pickle refers to a module by name."""
        return module.encode() in bytes(self._parts[0])

    def load(self) -> int:
        """A descriptor of memory that holds it."""
        memory, descriptor = shared_buffer(self.bytes)
        for begin, part in zip(self.layout.begins, self._parts, strict=True):
            memory[begin : begin + part.nbytes] = part
        return descriptor


def functions(store: StoreBase) -> Iterator[Any]:
    """The caller's functions that run while rows are read."""
    if isinstance(store, Mapped):
        yield store.function
    for child in store.children:
        yield from functions(child)


@contextmanager
def _sent_by_value(stores: Sequence[StoreBase]) -> Iterator[None]:
    """Inside the ``with``, functions of modules that another process could not import are pickled with their code."""
    import cloudpickle

    names = {getattr(function, "__module__", None) or "" for store in stores for function in functions(store)}
    by_value = [name for name in names if name != "__main__" and not is_imported_again(name)]
    modules = [sys.modules[name] for name in by_value if name in sys.modules]
    modules = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def is_imported_again(name: str) -> bool:
    """Whether another process imports this module, rather than getting the code of its functions."""
    package = name.partition(".")[0]
    if package in ("", "__main__"):
        return False
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return any(find(package, None) is not None for find in finders if find is not None)


def unload(descriptor: int, layout: Layout) -> list[Any]:
    """The stores, in another process."""
    memory = map_shared(descriptor, layout.bytes, is_private=True)
    os.close(descriptor)
    parts = [memory[begin : begin + size] for begin, size in zip(layout.begins, layout.sizes, strict=True)]
    stores: list[Any] = pickle.loads(parts[0].data, buffers=parts[1:])  # noqa: S301  # made by our own process
    return stores
