"""Several datasets as one: by turns, or at random."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from penstock.base import checks
from penstock.errors import ConfigError
from penstock.webdataset.pipeline import DataPipeline, Source
from penstock.webdataset.run import Run


class _Turns(Source):
    def __init__(self, datasets: Sequence[Iterable[Any]], longest: bool) -> None:
        self.datasets, self.longest = datasets, longest

    def begin(self, run: Run) -> Iterator[Any]:
        sources = [iter(each) for each in self.datasets]
        turn = 0
        while sources:
            turn %= len(sources)
            try:
                sample = next(sources[turn])
            except StopIteration:
                if not self.longest:
                    return
                del sources[turn]
                continue
            yield sample
            turn += 1


class _Draws(Source):
    def __init__(self, datasets: Sequence[Iterable[Any]], probs: Sequence[float], longest: bool) -> None:
        self.datasets, self.probs, self.longest = datasets, probs, longest

    def begin(self, run: Run) -> Iterator[Any]:
        rng = run.rng()
        sources, probs = [iter(each) for each in self.datasets], list(self.probs)
        while sources and sum(probs) > 0:
            (chosen,) = rng.choices(range(len(sources)), cum_weights=list(accumulate(probs)))
            try:
                sample = next(sources[chosen])
            except StopIteration:
                if not self.longest:
                    return
                del sources[chosen], probs[chosen]
                continue
            yield sample


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
        super().__init__(source)


class WebLoader(DataPipeline):
    """torch's ``DataLoader`` with verbs: ``WebLoader(ds, batch_size=None, num_workers=4).shuffle(1000)``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        from penstock.loader.pytorch import torch_loader

        super().__init__(torch_loader(*args, **options))
