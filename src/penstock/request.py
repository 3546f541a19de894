"""What a loader is asked for, in the terms of a plan: the order, the columns, the budget, the threads."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from penstock.combine import choose_fields
from penstock.dataset import Dataset
from penstock.errors import ConfigError
from penstock.inspection import advice, read_paths
from penstock.machine import cores, free_bytes
from penstock.order import BlockShuffled, InBlocks, InOrder, InWindows, Order, Repeated, Shuffled, check_seed
from penstock.planning import Request
from penstock.sizes import MiB, format_size, parse_size
from penstock.spec import ReadPath, row_bytes
from penstock.store import Store, shared_index

INDEX, URL, KEY = "__index__", "__url__", "__key__"
IDENTITY = (INDEX, URL, KEY)
"""Columns that name each sample: its row in the dataset, the file it came from, the place in that file."""

# Rows that come in blocks are mixed in windows of about so much, as stored. The window is part of the order, so it
# follows from the data alone: another budget, batch size or choice of columns must not change it.
WINDOW_BYTES = 256 * MiB

# With no budget given, a quarter of what is free leaves room for the model and for a second loader.
DEFAULT_SHARE = 4

# Threads that wait for a network: at 40 ms a request, 16 of them ask 400 times a second.
FAR_THREADS = 16

# Rows gathered from more mapped files than this come a few at a time, and threads that do nothing else would only meet
# at the interpreter's lock: one alone is half as quick again as two.
MANY_MAPPED = 8

# So many times the threads of the beginning may be tried where files turn out to be slow.
MOST_TIMES = 8


def request_for(
    store: Store,
    order: Order,
    *,
    batch_size: int,
    steps: int,
    threads: int | Literal["auto"],
    memory: int | str | None,
    spare_slots: int,
) -> Request:
    """What a plan is made from."""
    limit, note = memory_limit(memory)
    return Request(
        fields=store.fields,
        batch_rows=min(batch_size, len(order)),
        steps=steps,
        **_threads(threads, read_paths(store)),
        limit_bytes=limit,
        scratch_bytes=store.scratch_bytes,
        index_bytes=store.index_bytes,
        shared_index=shared_index(store),
        **_blocks(order),
        **_layout(order, store),
        spare_slots=spare_slots,
        limit_note=note,
    )


def order_of(ds: Dataset, shuffle: bool | Order, seed: int, window: int | str | None) -> Order:
    """The order that suits how the rows are stored, or the caller's own."""
    check_seed(seed)
    if window is not None:
        _window_rows(window, 1)  # wrong also where there are no blocks
    length, starts = len(ds), ds.store.blocks
    if length == 0:
        raise ConfigError("no samples: the dataset has no rows; check what was selected")
    if isinstance(shuffle, Order):
        return shuffle
    if starts is None:
        return Shuffled(length, seed) if shuffle else InOrder(length)
    if not shuffle:
        return InBlocks(length, starts)
    largest, row = int(np.diff(starts, append=length).max()), max(1, row_bytes(ds.store.fields))
    rows = WINDOW_BYTES // row if window is None else _window_rows(window, row)
    return BlockShuffled(length, starts, max(1, rows // largest), seed)


def _window_rows(window: int | str, row: int) -> int:
    if isinstance(window, str):
        return parse_size(window, argument="window") // row
    if not isinstance(window, int) or window < 1:
        raise ConfigError(f'window={window!r}: expected a number of rows, at least 1, or a size such as "512MiB"')
    return window


def _layout(order: Order, store: Store) -> dict[str, Any]:
    """What a plan says of how rows are stored and mixed."""
    in_blocks = isinstance(order, InWindows)
    mixing = order.order if isinstance(order, Repeated) else order
    quality = mixing.quality if isinstance(mixing, BlockShuffled) else 1.0 if isinstance(mixing, Shuffled) else None
    paths = read_paths(store)
    worst = max(paths, key=lambda path: path.amplification, default=None)
    return {
        "shuffle_quality": quality,
        "amplification": worst.amplification if worst else 1.0,
        "advice": advice(paths, in_blocks=in_blocks, window_rows=_blocks(order).get("window_rows", 0), quality=quality),
        "remedy": worst.remedy if worst else "",
        "far": any(path.far for path in paths),
    }


def _blocks(order: Order) -> dict[str, Any]:
    """What a plan must know of an order whose rows come in blocks."""
    if not isinstance(order, InWindows):
        return {}
    window_rows = order.window_blocks * order.block_rows
    return {"block_rows": order.block_rows, "window_rows": min(window_rows, len(order))}


def check_columns(ds: Dataset, columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """The columns of a batch, if the dataset has them."""
    if columns is None:
        return None
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r}: expected a tuple of names, such as ({columns!r},)")
    for name in columns:
        if name not in ds.fields and name not in IDENTITY:
            raise ConfigError(
                f"columns: no field {name!r}: the dataset has {', '.join(map(repr, ds.fields))}, and every sample has "
                f"{', '.join(map(repr, IDENTITY))}"
            )
    if all(name in IDENTITY for name in columns):
        raise ConfigError(f"columns={tuple(columns)}: expected at least one field of the dataset")
    return tuple(columns)


def chosen(ds: Dataset, columns: tuple[str, ...] | None) -> tuple[Store, Mapping[str, Any]]:
    """The stored fields that are wanted, and the conversions declared on them."""
    if columns is None:
        return ds.store, ds.casts
    wanted = [name for name in dict.fromkeys(columns) if name not in IDENTITY]
    casts = {name: cast for name, cast in ds.casts.items() if name in wanted}
    return choose_fields(ds.store, {name: name for name in wanted}), casts


def memory_limit(memory: int | str | None) -> tuple[int, str]:
    """The budget in bytes, and where it comes from if not from the caller."""
    if memory is not None:
        return parse_size(memory, argument="memory"), ""
    free = free_bytes()
    return free // DEFAULT_SHARE, f"a quarter of the {format_size(free)} that are free"


def _threads(threads: int | Literal["auto"], paths: Sequence[ReadPath]) -> dict[str, Any]:
    """With how many to begin, and how many may be tried."""
    if threads == "auto":
        first = max(cores(), FAR_THREADS) if any(path.far for path in paths) else cores()
        mapped = [path.mapped_files for path in paths if path.stored_bytes]
        alone = bool(mapped) and min(mapped) > 0 and max(mapped) > MANY_MAPPED
        return {"threads": 1 if alone else first, "most_threads": first * MOST_TIMES}
    if not isinstance(threads, int) or threads < 1:
        raise ConfigError(f'threads={threads!r}: expected "auto" or a whole number, at least 1')
    return {"threads": threads}
