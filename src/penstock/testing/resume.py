"""A check that interrupted and resumed runs deliver the same data as uninterrupted ones."""

import json
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from penstock.loader.loader import Loader
from penstock.loader.multi import MultiLoader


def check_resume(
    make_loader: Callable[[], Loader | MultiLoader], *, stops: Sequence[int] | None = None, epochs: int = 2
) -> None:
    """Check that a loader resumed after any batch delivers exactly what the uninterrupted one would.

    ``make_loader`` makes the same loader each time; ``stops`` are the batches to stop after (all, by default).
    """
    whole = _run(make_loader(), epochs)
    per_epoch = len(make_loader())
    for stop in range(per_epoch + 1) if stops is None else stops:
        first = make_loader()
        before = [_copy(batch) for batch in islice(iter(first), stop)]
        state = json.loads(json.dumps(first.state_dict()))
        first.close()
        second = make_loader()
        second.load_state_dict(state)
        # A position at the very end of an epoch is the beginning of the next.
        after = _run(second, epochs if stop < per_epoch else epochs - 1)
        _compare(before + after, whole, stop)


def _run(loader: Loader | MultiLoader, epochs: int) -> list[Any]:
    with loader:
        return [_copy(batch) for _ in range(epochs) for batch in loader]


def _copy(batch: Any) -> list[Any]:
    """The values of a batch, however they are nested, and the names of dicts."""
    if isinstance(batch, dict):
        return [copied for name, value in batch.items() for copied in (name, *_copy(value))]
    if isinstance(batch, tuple):
        return [copied for value in batch for copied in _copy(value)]
    return [batch if isinstance(batch, list | str) else np.asarray(batch).copy()]


def _compare(got: list[Any], want: list[Any], stop: int) -> None:
    assert len(got) == len(want), f"stopped after batch {stop}: {len(got)} batches in all, expected {len(want)}"
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        same = len(one) == len(other) and all(map(_is_same, one, other))
        assert same, f"stopped after batch {stop}: batch {number} differs from the uninterrupted run"


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list | str) or isinstance(other, list | str):
        return bool(one == other)
    return np.array_equal(one, other, equal_nan=True)
