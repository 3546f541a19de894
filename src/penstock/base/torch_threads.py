"""Torch on one core, in a thread that is one of many.

Where a thread per core reads, and each runs a function of the caller's that calls torch, torch would start a thread
per core for every one of them, and all would compete for the same cores. ``torch.set_num_threads`` cannot prevent it:
it also sets the default of threads that torch has not seen yet, such as the training loop's. So the libraries below
torch are set instead, because their settings apply to the calling thread alone.
"""

import ctypes
import sys
import threading
from functools import cache
from pathlib import Path
from types import ModuleType

LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")
"""Through these, the functions of OpenMP and MKL that torch calls are found, in any file."""

SETTERS = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")


class _Mine(threading.local):
    is_held = False


_mine = _Mine()


def use_one_core() -> None:
    """Let torch use one core in this thread from now on, if it is imported. Cheap to call again."""
    torch = None if _mine.is_held else sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):  # the latter while it is being imported
        return
    _mine.is_held = True
    torch.get_num_threads()  # makes torch set up this thread now; later, it would undo what follows
    library = _library(torch)
    for name in SETTERS:
        if hasattr(library, name):
            getattr(library, name)(1)


@cache
def _library(torch: ModuleType) -> ctypes.CDLL | None:
    """Torch's own library, which is loaded already; None where it is built in another way."""
    folder = Path(torch.__file__ or "").parent / "lib"
    try:
        return next((ctypes.CDLL(str(folder / name)) for name in LIBRARIES if (folder / name).exists()), None)
    except OSError:
        return None
