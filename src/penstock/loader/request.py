"""A loader's arguments in the terms of a plan: order, columns, budget and threads."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np

from penstock.base import checks
from penstock.base.machine import free_bytes
from penstock.base.sizes import MiB, format_size, parse_size
from penstock.base.spec import Cast, ReadPath, row_bytes
from penstock.dataset.dataset import Dataset
from penstock.dataset.explain import advice
from penstock.dataset.rewrite import choose_fields
from penstock.dataset.store import StoreBase
from penstock.errors import ConfigError
from penstock.loader.order import BlockShuffled, InBlocks, InOrder, InWindows, Order, Repeated, Shuffled, check_seed
from penstock.loader.placement import place
from penstock.loader.plan_request import Request

INDEX, URL, KEY = "__index__", "__url__", "__key__"
IDENTITY = (INDEX, URL, KEY)
"""Columns that name each sample: its row in the dataset, its file, and its place in that file."""

# Rows that come in blocks are mixed in windows of about this size, as stored. The window is part of the order, so it
# follows from the data alone: another budget, batch size or choice of columns must not change it.
WINDOW_BYTES = 256 * MiB

# With no budget given, a quarter of what is free leaves room for the model and for a second loader.
DEFAULT_SHARE = 4


def request_for(
    store: StoreBase,
    paths: Sequence[ReadPath],
    order: Order,
    *,
    batch_size: int,
    steps: int,
    threads: int | Literal["auto"],
    processes: int | Literal["auto"],
    memory: int | str | None,
    spare_slots: int,
) -> Request:
    """The input of a plan; ``paths`` say how the store is read."""
    limit, note = memory_limit(memory)
    placement = place(store, paths, threads, processes, limit)
    return Request(
        fields=store.fields,
        batch_rows=min(batch_size, len(order)),
        steps=steps,
        threads=placement.threads,
        most_threads=placement.most_threads,
        placement=placement,
        limit_bytes=limit,
        scratch_bytes=cache(store.scratch_bytes),  # a plan asks for the same few numbers of rows many times
        most_rows=store.rows_at_once,
        index_bytes=store.index_bytes,
        shared_index=store.shared_index,
        free_fields=frozenset(store.free_fields),
        **_blocks(order),
        **_layout(order, paths),
        spare_slots=spare_slots,
        limit_note=note,
    )


def order_of(ds: Dataset, shuffle: bool | Order, seed: int, window: int | str | None) -> Order:
    """The order that suits how the rows are stored, or the caller's own."""
    seed = check_seed(seed)
    if window is not None:
        _window_rows(window, 1)  # also checked where there are no blocks
    length, starts = len(ds), ds.store.blocks
    if length == 0:
        raise ConfigError("no samples: the dataset has no rows; check what was selected")
    if isinstance(shuffle, Order):
        return shuffle
    shuffle = _check_shuffle(shuffle)
    if starts is None:
        return Shuffled(length, seed) if shuffle else InOrder(length)
    if not shuffle:
        return InBlocks(length, starts)
    largest, row = int(np.diff(starts, append=length).max()), max(1, row_bytes(ds.store.fields))
    rows = WINDOW_BYTES // row if window is None else _window_rows(window, row)
    return BlockShuffled(length, starts, max(1, rows // largest), seed)


def _check_shuffle(shuffle: Any) -> bool:
    try:
        return checks.flag("shuffle", shuffle)
    except ConfigError as error:
        way = (
            ". To take certain rows in a certain order: Loader(ds.select(rows), shuffle=False); for an order of your "
            "own in each epoch: a subclass of penstock.Order"
        )
        raise ConfigError(f"{error}, or a penstock.Order{way if isinstance(shuffle, Iterable) else ''}") from None


def _window_rows(window: int | str, row: int) -> int:
    if isinstance(window, str):
        return parse_size(window, argument="window") // row
    return checks.whole("window", window, least=1, expected='a size such as "512MiB", or a number of rows')


def _layout(order: Order, paths: Sequence[ReadPath]) -> dict[str, Any]:
    """How rows are stored and mixed, as a plan shows it."""
    in_blocks = isinstance(order, InWindows)
    mixing = order.order if isinstance(order, Repeated) else order
    quality = mixing.quality if isinstance(mixing, BlockShuffled) else 1.0 if isinstance(mixing, Shuffled) else None
    worst = max(paths, key=lambda path: path.amplification, default=None)
    return {
        "shuffle_quality": quality,
        "amplification": worst.amplification if worst else 1.0,
        "advice": advice(paths, in_blocks=in_blocks, window_rows=_blocks(order).get("window_rows", 0), quality=quality),
        "remedy": worst.remedy if worst else "",
        "far": any(path.is_far for path in paths),
    }


def _blocks(order: Order) -> dict[str, Any]:
    """What a plan must know about an order whose rows come in blocks."""
    if not isinstance(order, InWindows):
        return {}
    window_rows = order.window_blocks * order.block_rows
    return {"block_rows": order.block_rows, "window_rows": min(window_rows, len(order))}


def check_columns(ds: Dataset, columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """The columns of a batch; refuses those that the dataset does not have."""
    if columns is None:
        return None
    columns = checks.names("columns", columns)
    for name in columns:
        if name not in ds.fields and name not in IDENTITY:
            raise ConfigError(
                f"columns: no field {name!r}: the dataset has {', '.join(map(repr, ds.fields))}, and every sample has "
                f"{', '.join(map(repr, IDENTITY))}"
            )
    if not columns:
        raise ConfigError("columns=(): expected at least one field of the dataset, or one of the names of each sample")
    return columns


def chosen(
    ds: Dataset, columns: tuple[str, ...] | None
) -> tuple[StoreBase, Mapping[str, Cast], Mapping[str, tuple[int, ...]]]:
    """The chosen fields, and the conversions and contiguous orders of axes declared on them."""
    if columns is None:
        return ds.store, ds.casts, ds.contiguous_axes
    wanted = [name for name in dict.fromkeys(columns) if name not in IDENTITY]
    casts = {name: cast for name, cast in ds.casts.items() if name in wanted}
    axes = {name: order for name, order in ds.contiguous_axes.items() if name in wanted}
    return choose_fields(ds.store, {name: name for name in wanted}), casts, axes


def memory_limit(memory: int | str | None) -> tuple[int, str]:
    """The budget in bytes, and a note on its origin if the caller gave none."""
    if memory is not None:
        return parse_size(memory, argument="memory"), ""
    free = free_bytes()
    return free // DEFAULT_SHARE, f"a quarter of the {format_size(free)} that are free"
