"""Samples in another order, drawn from a buffer of those to come."""

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

from penstock.errors import ConfigError
from penstock.webdataset.handlers import Handler
from penstock.webdataset.runs import Run


def shuffle_samples(
    samples: Iterator[Any],
    run: Run,
    /,
    bufsize: int = 1000,
    initial: int = 100,
    rng: Random | None = None,
    seed: int | None = None,
    handler: Handler | None = None,
) -> Iterator[Any]:
    """Samples drawn at random from the next ``bufsize``, beginning when ``initial`` of them have come.

    Two are taken in for each that is given out until the buffer is full, so that the first comes early and the buffer
    still fills.
    """
    if rng is not None and seed is not None:
        raise ConfigError("shuffle: give rng= or seed=, not both")
    if rng is None:
        rng = (run if seed is None else run.seeded(seed)).rng()
    initial = min(initial, bufsize)
    held: list[Any] = []
    for sample in samples:
        held.append(sample)
        if len(held) < bufsize:
            held += islice(samples, 1)
        if len(held) >= initial:
            yield drawn(held, rng)
    while held:
        yield drawn(held, rng)


def drawn(held: list[Any], rng: Random) -> Any:
    """One of them, whose place the last one takes."""
    place = rng.randint(0, len(held) - 1)
    held[place], held[-1] = held[-1], held[place]
    return held.pop()
