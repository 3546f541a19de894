"""Several datasets as one: by turns, or at random."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import Any

from penstock.base import checks
from penstock.errors import ConfigError
from penstock.webdataset.pipeline import DataPipeline
from penstock.webdataset.run import Run
from penstock.webdataset.stage import FirstStage


def round_robin_shortest(*sources: Iterator[Any]) -> Iterator[Any]:
    """A sample of each in turn, until one is at its end."""
    return _take_turns(sources, longest=False)


def round_robin_longest(*sources: Iterator[Any]) -> Iterator[Any]:
    """A sample of each in turn, until all are at their end."""
    return _take_turns(sources, longest=True)


def _take_turns(sources: Sequence[Iterator[Any]], longest: bool) -> Iterator[Any]:
    left, turn = list(sources), 0
    while left:
        turn %= len(left)
        try:
            sample = next(left[turn])
        except StopIteration:
            if not longest:
                return
            del left[turn]
            continue
        yield sample
        turn += 1


def random_samples(
    sources: Sequence[Iterator[Any]],
    probs: Sequence[float] | None = None,
    longest: bool = False,
    rng: Random | None = None,
) -> Iterator[Any]:
    """Samples of sources chosen at random, until the first source ends, or all have."""
    rng = Run().rng() if rng is None else rng
    left, weights = list(sources), [1.0] * len(sources) if probs is None else list(probs)
    while left and sum(weights) > 0:
        (chosen,) = rng.choices(range(len(left)), cum_weights=list(accumulate(weights)))
        try:
            sample = next(left[chosen])
        except StopIteration:
            if not longest:
                return
            del left[chosen], weights[chosen]
            continue
        yield sample


class _Turns(FirstStage):
    def __init__(self, datasets: Sequence[Iterable[Any]], longest: bool) -> None:
        self.datasets, self.longest = datasets, longest

    def begin(self, run: Run) -> Iterator[Any]:
        return _take_turns([iter(each) for each in self.datasets], self.longest)


class _Draws(FirstStage):
    def __init__(self, datasets: Sequence[Iterable[Any]], probs: Sequence[float], longest: bool) -> None:
        self.datasets, self.probs, self.longest = datasets, probs, longest

    def begin(self, run: Run) -> Iterator[Any]:
        return random_samples([iter(each) for each in self.datasets], self.probs, self.longest, run.rng())


class RoundRobin(DataPipeline):
    """One sample of each dataset in turn, until the first dataset ends (with ``longest``: until all have ended)."""

    def __init__(self, datasets: Sequence[Iterable[Any]], longest: bool = False) -> None:
        longest = checks.flag("longest", longest)
        super().__init__(_Turns(datasets, longest))
        self.datasets, self.longest = datasets, longest


class RandomMix(DataPipeline):
    """Samples of datasets chosen at random, until the first dataset ends (with ``longest``: until all have ended).

    The draws follow from ``seed``, the epoch, the rank and the worker.
    """

    def __init__(
        self,
        datasets: Sequence[Iterable[Any]],
        probs: Sequence[float] | None = None,
        longest: bool = False,
        seed: int = 0,
    ) -> None:
        longest = checks.flag("longest", longest)
        weights = [1.0] * len(datasets) if probs is None else [float(each) for each in probs]
        if len(weights) != len(datasets) or not sum(weights) > 0 or min(weights) < 0:
            raise ConfigError(f"probs={probs}: expected {len(datasets)} numbers of at least 0, one for each dataset")
        super().__init__(_Draws(datasets, weights, longest), seed=seed)
        self.datasets, self.probs, self.longest = datasets, probs, longest


class FluidWrapper(DataPipeline):
    """Adds the verbs to any iterable of samples."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.append(source)  # a list is the samples themselves, not stages


class WebLoader(DataPipeline):
    """torch's ``DataLoader`` with verbs: ``WebLoader(ds, batch_size=None, num_workers=4).shuffle(1000)``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        from penstock.loader.pytorch import torch_loader

        super().__init__(torch_loader(*args, **options))
