"""Where reads are done: by threads of the training process, or in processes of a few threads each.

Threads of one process share one interpreter. Beyond a few cores they wait for each other, they slow the training step
down, and a function of the caller's runs on one core in all. Processes do not, but each holds some 23 MiB.

With ``processes="auto"``:
1. One to three cores, or data that are only copied from memory: threads alone.
2. Otherwise one core is left to the training step. Two threads per process decode; a function of the caller's gets a
   process per thread, since it holds the interpreter.
3. Processes take at most a quarter of the budget, or half of it to run a function; with less than two, threads read.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.base.machine import cores
from penstock.base.sizes import MiB, format_size
from penstock.base.spec import IN_MEMORY, ReadPath, row_bytes
from penstock.dataset.store import StoreBase
from penstock.errors import ConfigError
from penstock.loader.pickled_stores import CANNOT_PICKLE, PickledStores, find_obstacle, functions, is_imported_again
from penstock.loader.wire import CAN_SEND_DESCRIPTORS

# Threads for remote files: at 40 ms per request, 16 of them send 400 requests per second.
FAR_THREADS = 16

# No machine needs more threads; a plan tries every number below the one that was asked for.
MOST_ASKED = 10_000

# Rows gathered from more mapped files than this come a few at a time, and threads that do nothing else only contend for
# the interpreter's lock: one thread is half as fast again as two.
MANY_MAPPED = 8

# If files turn out to be slow, up to this many times the initial threads may be tried.
MOST_TIMES = 8

# With fewer cores, threads of one process reach what processes do.
CORES_FOR_PROCESSES = 4
# Two threads per process deliver as much as one, for half the memory, and more than four (measured on 16 cores).
THREADS_PER_PROCESS = 2
# Processes take at most this part of the budget: one in four bytes, or one in two to run a function.
PART_OF_BUDGET, PART_FOR_FUNCTIONS = 4, 2
# A process that would hold more than this would read for itself what one process can hold for all threads.
MOST_PROCESS_BYTES = 512 * MiB
# Less than this is read before processes are up.
WORTH_BYTES = 64 * MiB

# Measured: a process with penstock, numpy and the codecs of most formats; and what torch adds.
PROCESS_BYTES = 23 * MiB
TORCH_BYTES = 160 * MiB
# Measured: what Python objects take, for each byte of their pickle.
UNPICKLED_TIMES = 4

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How many threads read, and in how many processes."""

    threads: int
    """How many to start with, in all processes together."""
    most_threads: int = 0
    """How many may be tried if files turn out to be slow; 0 tries none beyond ``threads``."""
    processes: int = 0
    """0 where threads of this process read."""
    process_bytes: int = 0
    """What each process holds, scratch apart."""
    shared_bytes: int = 0
    """Memory that all of them share: a copy of the tables."""
    why: str = ""
    """Why this many, if the caller gave no number."""
    is_asked_for: bool = False
    """Whether the caller gave the number of processes."""

    def inside(self, why: str) -> "Placement":
        """The same without processes."""
        return Placement(threads=self.threads, most_threads=self.most_threads, why=why)


def place(
    store: StoreBase, paths: Sequence[ReadPath], threads: int | Auto, processes: int | Auto, limit_bytes: int
) -> Placement:
    """Where the reads of a store are done."""
    if processes != "auto":
        count = checks.whole("processes", processes, expected='"auto" or a whole number')
        return _as_asked(store, paths, threads, count) if count else _threads(threads, paths)
    found = _threads(threads, paths)
    if cores() < CORES_FOR_PROCESSES or found.threads < 2:
        return found
    if why := _why_inside(store, paths):
        return replace(found, why=f"threads read here: {why}")
    wanted = replace(found, threads=max(2, found.threads - 1)) if threads == "auto" else found
    calls = has_function(store)
    per_process, part = (1, PART_FOR_FUNCTIONS) if calls else (THREADS_PER_PROCESS, PART_OF_BUDGET)
    sized = _with_sizes(store, wanted)
    if sized.why:
        return replace(found, why=f"threads read here: {sized.why}")
    if sized.process_bytes > MOST_PROCESS_BYTES:
        each = format_size(sized.process_bytes)
        return replace(found, why=f"threads read here: each process would hold its own {each}")
    room = max(0, limit_bytes // part - sized.shared_bytes) // sized.process_bytes
    count = min(-(-wanted.threads // per_process), room)
    if count < 2:
        each = format_size(sized.process_bytes)
        return replace(found, why=f"threads read here: the budget leaves no room for processes of {each} each")
    return replace(sized, processes=count, why=_describe(count, wanted.threads))


def _describe(processes: int, threads: int) -> str:
    return f"{cores()} cores: {processes} processes with {threads} threads in all leave the training step a core"


def _as_asked(store: StoreBase, paths: Sequence[ReadPath], threads: int | Auto, processes: int) -> Placement:
    if not CAN_SEND_DESCRIPTORS:
        raise ConfigError(f"processes={processes}: reader processes need Linux; leave the argument out")
    found = _threads(threads, paths)
    if threads == "auto":
        found = replace(found, threads=max(processes, found.threads))
    elif found.threads < processes:
        raise ConfigError(
            f"threads={threads}, processes={processes}: threads counts those of all processes together, so it must be "
            f"at least {processes}"
        )
    sized = _with_sizes(store, found)
    if sized.why:
        raise ConfigError(f"processes={processes}: {sized.why}. processes=0 reads in this process")
    return replace(sized, processes=processes, is_asked_for=True)


def _why_inside(store: StoreBase, paths: Sequence[ReadPath]) -> str:
    """Why threads of this process are the better choice; empty if they are not."""
    if not CAN_SEND_DESCRIPTORS:
        return "reader processes need Linux"
    if has_function(store):
        return ""
    if all(path.checked_by == IN_MEMORY or path.mapped_files for path in paths if path.rows):
        return "rows are only copied"
    if len(store) * row_bytes(store.fields) < WORTH_BYTES:
        return "so little data is read before processes are up"
    return ""


def _with_sizes(store: StoreBase, placement: Placement) -> Placement:
    """The same with what processes hold, or with the reason why this store cannot be sent to any."""
    try:
        pickled_stores = PickledStores([store])
    except CANNOT_PICKLE as error:
        return placement.inside(_describe_obstacle(store, error))
    own = store.index_bytes + sum(store.shared_index.values()) - pickled_stores.bytes
    torch = TORCH_BYTES if _needs_torch(store, pickled_stores) else 0
    objects = UNPICKLED_TIMES * pickled_stores.pickle_bytes
    return replace(
        placement, process_bytes=PROCESS_BYTES + max(0, own) + torch + objects, shared_bytes=pickled_stores.bytes
    )  # fmt: skip


def _describe_obstacle(store: StoreBase, error: BaseException) -> str:
    """Why a store cannot be sent to processes, and what to do about it."""
    why = f"({type(error).__name__}: {error})"
    if found := find_obstacle(store):
        return f"{found}, which cannot be sent to processes {why}; let the function open or make it when it is called"
    return f"the dataset cannot be sent to processes {why}"


def _threads(threads: int | Auto, paths: Sequence[ReadPath]) -> Placement:
    if isinstance(threads, str) and threads == "auto":
        first = max(cores(), FAR_THREADS) if any(path.is_far for path in paths) else cores()
        mapped = [path.mapped_files for path in paths if path.stored_bytes]
        alone = bool(mapped) and min(mapped) > 0 and max(mapped) > MANY_MAPPED
        return Placement(threads=1 if alone else first, most_threads=first * MOST_TIMES)
    return Placement(threads=check_threads(threads))


def check_threads(threads: Any) -> int:
    """A number of threads, as an argument."""
    return checks.whole("threads", threads, least=1, most=MOST_ASKED, expected='"auto" or a whole number')


def has_function(store: StoreBase) -> bool:
    """Whether a caller's function runs while rows are read."""
    return any(True for _ in functions(store))


def _needs_torch(store: StoreBase, pickled_stores: PickledStores) -> bool:
    """Whether a process will import torch: the caller's function refers to it, or the module that it comes from."""
    if "torch" not in sys.modules or not has_function(store):
        return False
    homes_of_functions = {getattr(function, "__module__", None) or "" for function in functions(store)}
    modules = [sys.modules.get(name) for name in homes_of_functions if is_imported_again(name)]
    names = {getattr(value, "__name__", "") for module in modules if module for value in vars(module).values()}
    homes = {getattr(value, "__module__", "") for module in modules if module for value in vars(module).values()}
    return pickled_stores.mentions("torch") or any(str(name).split(".")[0] == "torch" for name in names | homes)
