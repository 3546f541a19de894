"""A source and the stages its samples pass through, as something to iterate over, again and again.

A stage is a ``Stage``, or a function from an iterator to an iterator; the first, which gives the samples, is anything
to iterate over, or a function without arguments that returns an iterator. Verbs return another pipeline with one stage
more, and leave this one as it is; ``with_epoch``, ``with_length`` and ``repeat`` change it in place, as programs
written for tar shards expect.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from multiprocessing.context import get_spawning_popen
from typing import Any

from penstock.errors import ConfigError
from penstock.webdataset import place
from penstock.webdataset.fluent import Fluent
from penstock.webdataset.later import load_later, shuffle_places
from penstock.webdataset.runs import Counts, Run
from penstock.webdataset.samples import read_samples
from penstock.webdataset.shuffling import shuffle_samples
from penstock.webdataset.stages import Source, Stage
from penstock.workers import end_rather_than_lose

FOREVER = -1


def _torch_class(kind: type) -> type:
    """The same class as one of torch's, whose loader insists on it; as it is where there is no torch."""
    try:
        from penstock.pytorch import iterable_dataset
    except ImportError:
        return kind
    return iterable_dataset(kind)


class DataPipeline(Fluent):
    """Samples from a source, through stages; an ``IterableDataset`` of torch's, where torch is installed."""

    _plain: "type[DataPipeline]"

    def __new__(cls, *args: Any, **options: Any) -> "DataPipeline":
        made: DataPipeline = object.__new__(_torch_class(cls))
        made._plain = cls.__dict__.get("__wrapped__", cls)
        return made

    def __init__(self, *stages: Any, seed: int = 0) -> None:
        self.pipeline: list[Any] = []
        for stage in stages:
            self.pipeline += stage if isinstance(stage, list) else [] if stage is None else [stage]
        self.seed = seed
        self.repetitions = 1
        self.limit: int | None = None
        self.length: int | None = None
        self._counts = Counts()

    # What torch and Python ask of it.

    def __iter__(self) -> Iterator[Any]:
        """One epoch: this worker's part of it, where torch's loader has several."""
        end_rather_than_lose()
        where = place.here()
        passes = self._passes(where)
        return passes if self.limit is None else islice(passes, where.part_of(self.limit))

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("a stream has no length; with_length() gives it one")
        return self.length

    def __bool__(self) -> bool:
        return True

    def _passes(self, where: place.Place) -> Iterator[Any]:
        done = 0
        while self.repetitions == FOREVER or done < self.repetitions:
            done += 1
            anything = False
            for sample in self._one_pass(where):
                anything = True
                yield sample
                del sample  # it may be a batch, and the next takes as much
            if not anything:
                return

    def _one_pass(self, where: place.Place) -> Iterator[Any]:
        run = Run(self.seed, self._counts.begin(where), where, counts=self._counts)
        if not self.pipeline:
            raise ConfigError("an empty pipeline: the first stage is what gives samples")
        samples = _begin(self.pipeline[0], run)
        for number, stage in _reading_late(self.pipeline):
            samples = _go_on(stage, samples, run.at(number))
        return samples

    # Building.

    def compose(self, *stages: Any) -> "DataPipeline":
        """Another pipeline with these stages after the present ones."""
        composed = copy.copy(self)
        composed.pipeline = [*self.pipeline, *stages]
        return composed

    def append(self, stage: Any) -> None:
        """Add a stage to this pipeline itself."""
        self.pipeline.append(stage)

    def stage(self, number: int) -> Any:
        """One of the stages."""
        return self.pipeline[number]

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> "DataPipeline":
        """Let an epoch be so many samples (or batches, where they are batched): begun anew as often as that takes.

        That is the number a loop over torch's loader sees, with any number of workers: they share it out.
        """
        limit = max(nsamples, nbatches)
        if limit < 1:
            raise ConfigError(f"with_epoch({limit}): expected at least one sample")
        self.repetitions, self.limit = FOREVER, limit
        return self

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> "DataPipeline":
        """Go over it ``nepochs`` times, or for ever; at most ``nbatches`` in all, by all workers together."""
        self.repetitions = nepochs if nepochs > 0 else FOREVER
        self.limit = nbatches if nbatches > 0 else None
        return self

    def with_length(self, n: int, silent: bool = True) -> "DataPipeline":
        """Let ``len()`` say so; how many samples there are does not change."""
        self.length = n
        return self

    @property
    def skipped(self) -> int:
        """How much the handlers let pass, here and in forked workers, since this pipeline was made."""
        return self._counts.left_out

    def close(self) -> None:
        """Close stages that can be closed."""
        for stage in self.pipeline:
            if hasattr(stage, "close"):
                stage.close()

    def __enter__(self) -> "DataPipeline":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Copying, and being sent to worker processes.

    def __copy__(self) -> "DataPipeline":
        made: DataPipeline = self._plain.__new__(self._plain)
        made.__dict__.update(self.__dict__, pipeline=list(self.pipeline), _counts=Counts())
        return made

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        state = {name: value for name, value in self.__dict__.items() if name != "_counts"}
        state.pop("_plain")
        where = None
        if get_spawning_popen() is not None:  # on its way into a process that is started anew
            now = place.here()
            where = (now.rank, now.ranks, self._counts.sent)
            self._counts.sent += 1
        return _rebuilt, (self._plain, state, where)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.pipeline)} stages: {', '.join(map(_name, self.pipeline))}>"


def _rebuilt(kind: type[DataPipeline], state: dict[str, Any], where: tuple[int, int, int] | None) -> DataPipeline:
    made = kind.__new__(kind)
    made.__dict__.update(state, _counts=Counts())
    if where is not None:
        rank, ranks, sent = where
        place.tell(rank, ranks)
        made._counts = Counts(sent_before=sent)
    return made


def _begin(stage: Any, run: Run) -> Iterator[Any]:
    """The source: it may want to know the pass, or be iterated over, or be called."""
    if isinstance(stage, Source):
        return stage.begin(run)
    if isinstance(stage, Iterable):
        return iter(stage)
    if callable(stage):
        return iter(stage())
    raise ConfigError(f"{stage!r} cannot be the source of a pipeline: it gives no samples")


def _reading_late(pipeline: list[Any]) -> Iterator[tuple[int, Any]]:
    """The stages behind the source; where a shuffle follows the reading, content is read behind the shuffle."""
    late = None
    for number, stage in enumerate(pipeline[1:], 1):
        after = pipeline[number + 1] if number + 1 < len(pipeline) else None
        if _does(stage, read_samples) and _does(after, shuffle_samples):
            reading, *rest = stage.args
            late = Stage(load_later, reading.handler, reading.files)
            yield number, Stage(read_samples, replace(reading, later=True), *rest, **stage.options)
            continue
        if late is not None and _draws_by_seed(stage):
            yield number, Stage(shuffle_places, *stage.args, **stage.options)
        else:
            yield number, stage
        if late is not None and not _does(after, shuffle_samples):
            yield number, late
            late = None


def _draws_by_seed(stage: Any) -> bool:
    """Whether it is a shuffle whose order is not the caller's to decide."""
    return _does(stage, shuffle_samples) and len(stage.args) < 3 and stage.options.get("rng") is None


def _does(stage: Any, function: Any) -> bool:
    return isinstance(stage, Stage) and stage.function is function


def _go_on(stage: Any, samples: Iterator[Any], run: Run) -> Iterator[Any]:
    if isinstance(stage, Stage):
        return stage.start(samples, run)
    if hasattr(stage, "run"):
        return iter(stage.run(samples))
    if callable(stage):
        return iter(stage(samples))
    raise ConfigError(f"{stage!r} cannot be a stage: expected a function from an iterator to an iterator")


def _name(stage: Any) -> str:
    function = stage.function if isinstance(stage, Stage) else stage
    return str(getattr(function, "__name__", type(function).__name__))
