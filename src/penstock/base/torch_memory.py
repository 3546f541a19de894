"""How much memory of torch's a call needs: torch has an allocator of its own, which Python's tools do not see."""

import sys
import weakref
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any


class TensorBytes:
    """Bytes of the tensors that are alive, and the most that were so at once."""

    def __init__(self) -> None:
        self.peak = 0
        self._held = 0
        self._tensors: Counter[int] = Counter()
        """By address: tensors that share the memory there."""

    def count(self, tensor: Any) -> None:
        """Count a tensor until it dies."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not self._tensors[address]:
            self._held += size
            self.peak = max(self.peak, self._held)
        self._tensors[address] += 1
        weakref.finalize(tensor, self._forget, address, size).atexit = False

    def _forget(self, address: int, size: int) -> None:
        self._tensors[address] -= 1
        if not self._tensors[address]:
            self._held -= size


def count_tensors(found: TensorBytes) -> AbstractContextManager[Any]:
    """Count the tensors that this thread makes inside the ``with``, if torch is imported."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None or not hasattr(torch, "Tensor") else _counting_mode(torch, found)


def _counting_mode(torch: ModuleType, found: TensorBytes) -> AbstractContextManager[Any]:
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc,name-defined]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            for each in torch.utils._pytree.tree_leaves(made):
                if isinstance(each, torch.Tensor) and each.layout == torch.strided:
                    found.count(each)
            return made

    mode: AbstractContextManager[Any] = Counting()
    return mode
