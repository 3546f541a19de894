"""Samples, or shards, in another order: drawn from a buffer of those to come."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from random import Random
from typing import Any

from penstock.errors import ConfigError
from penstock.webdataset.handlers import Handler
from penstock.webdataset.run import Run
from penstock.webdataset.samples import SampleReader, Unread
from penstock.webdataset.stage import Stage

MOST_UNREAD = 8192
"""Samples to draw from while none of their content is held: some megabytes, and a moment to find them."""


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

    Samples that were not read yet are read when they are drawn. Unless the caller's ``rng`` or ``seed`` decides the
    order, the buffer then holds many more of them.
    """
    if rng is not None and seed is not None:
        raise ConfigError("shuffle: give rng= or seed=, not both")
    if seed is not None:
        rng = run.rng(seed)
    if not isinstance(samples, SampleReader):
        return _draw(samples, run, bufsize, initial, rng)
    if rng is not None:
        return samples.reorder(lambda found: _draw(found, run, bufsize, initial, rng))
    return samples.reorder(lambda found: _draw_unread(found, run, bufsize, initial))


class SeededShuffle(Stage):
    """``shuffle_samples`` in the same order in all ranks and workers: that of ``seed`` + ``epoch``.

    ``epoch`` is the one of the last pass; the first pass has the one behind that which is given here. Whoever sets it
    decides about the next pass.
    """

    def __init__(self, bufsize: int = 1000, initial: int = 100, seed: int = 0, epoch: int = -1) -> None:
        super().__init__(shuffle_samples, bufsize, initial)
        self.bufsize, self.initial, self.seed = bufsize, initial, seed
        self._epoch, self._first, self._is_set = epoch, epoch + 1, False

    @property
    def epoch(self) -> int:
        """The number that was added to the seed last."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch, self._is_set = value, True

    def start(self, samples: Iterable[Any], run: Run) -> Iterator[Any]:
        """The samples of one pass; the pass knows its number also in a worker that was started for it."""
        self._epoch = self._epoch + 1 if self._is_set else self._first + run.epoch
        rng = Random(self.seed + self._epoch)  # noqa: S311
        return shuffle_samples(iter(samples), run, self.bufsize, self.initial, rng=rng)

    def run(self, src: Iterable[Any]) -> Iterator[Any]:
        """The same outside of a pipeline: each call is a pass."""
        self._is_set = True
        return self.start(src, Run())


def _draw(samples: Iterator[Any], run: Run, bufsize: int, initial: int, rng: Random | None) -> Iterator[Any]:
    """Until the buffer is full, two samples are taken in per sample drawn: the first comes early."""
    first = list(islice(samples, 1))
    if rng is None:
        # Ranks and workers may share shards out behind this, and must agree on their order.
        rng = run.rng(run.seed if first and _is_shard(first[0]) else None)
    initial = min(initial, bufsize)
    held: list[Any] = []
    samples = chain(first, samples)
    for sample in samples:
        held.append(sample)
        if len(held) < bufsize:
            held += islice(samples, 1)
        if len(held) >= initial:
            yield draw_one(held, rng)
    while held:
        yield draw_one(held, rng)


def _draw_unread(samples: Iterator[Any], run: Run, bufsize: int, initial: int) -> Iterator[Any]:
    first = list(islice(samples, 1))
    samples = chain(first, samples)
    if first and not _is_unread(first[0]):
        yield from _draw(samples, run, bufsize, initial, None)
        return
    rng, held = run.rng(), list[Any]()
    for sample in samples:
        held.append(sample)
        while len(held) > (MOST_UNREAD if _is_unread(sample) else bufsize):
            yield draw_one(held, rng)
    while held:
        yield draw_one(held, rng)


def draw_one(buf: list[Any], rng: Random) -> Any:
    """One of a list at random, taken out of it; the last one moves into its place."""
    place = rng.randint(0, len(buf) - 1)
    buf[place], buf[-1] = buf[-1], buf[place]
    return buf.pop()


def _is_unread(sample: Any) -> bool:
    return any(isinstance(value, Unread) for value in sample.values())


def _is_shard(sample: Any) -> bool:
    return isinstance(sample, dict) and "url" in sample and "__key__" not in sample
