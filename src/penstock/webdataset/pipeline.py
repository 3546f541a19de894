"""A pipeline: a source, and stages that its samples pass through. It can be iterated over again and again.

A stage is a ``Stage``, or a function from an iterator to an iterator; the first, which gives the samples, is anything
to iterate over, or a function without arguments that returns an iterator. Verbs return a new pipeline with one more
stage, and leave this one as it is; ``with_epoch``, ``with_shared_epoch``, ``with_length`` and ``repeat`` change it in
place, as programs written for tar shards expect.
"""

import atexit
import copy
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

from penstock.base import checks
from penstock.base.torch_worker import fail_worker_on_lost_batch
from penstock.errors import ConfigError
from penstock.webdataset.collate import default_collation_fn
from penstock.webdataset.decoders import Decoder
from penstock.webdataset.fluent import Fluent
from penstock.webdataset.run import Counts, Place, Run, here, set_rank
from penstock.webdataset.shuffle import shuffle_samples
from penstock.webdataset.stage import FirstStage, Stage
from penstock.webdataset.verbs import (
    batch_samples,
    draw_samples,
    fields_to_dict,
    fields_to_tuple,
    log_samples,
    map_samples,
    pick_matching,
    rename_fields,
    rename_matching,
    slice_samples,
)

FOREVER = -1


class NoLength(TypeError, AttributeError):
    """Asked for the length of a stream: neither ``len()`` nor ``hasattr`` finds one."""


class DataPipeline(Fluent):
    """Samples from a source, through stages; an ``IterableDataset`` of torch's, once torch is imported."""

    def __init__(self, *stages: Any, seed: int = 0) -> None:
        self.pipeline: list[Any] = []
        for stage in stages:
            self.pipeline += stage if isinstance(stage, list) else [] if stage is None else [stage]
        self.seed = checks.whole("seed", seed, least=None)
        self.repetitions = 1
        self.limit: int | None = None
        self.limit_is_shared = False
        """Whether the limit is for all workers together."""
        self.length: int | None = None
        self._counts = Counts()

    # What torch and Python ask of it.

    def __iter__(self) -> Iterator[Any]:
        """One epoch; in a worker of torch's loader, its share of the epoch."""
        fail_worker_on_lost_batch()
        where = here()
        passes = self._passes(where)
        _UNDER_WAY.add(passes)
        if self.limit is None:
            return passes
        return islice(passes, where.part_of(self.limit) if self.limit_is_shared else self.limit)

    @property
    def __len__(self) -> Callable[[], int]:
        length = self.length
        if length is None:
            raise NoLength("a stream has no length; with_length() gives it one")
        return lambda: length

    def __bool__(self) -> bool:
        return True

    @property  # type: ignore[misc]  # nothing sets it
    def __class__(self) -> type:
        """What ``isinstance`` goes by: a subclass of torch's ``IterableDataset``, which its loader insists on."""
        kind: Any = type(self)
        if sys.modules.get("torch") is not None:
            from penstock.loader.pytorch import iterable_dataset

            kind = iterable_dataset(kind)
        return kind

    def __add__(self, other: Any) -> Any:
        """One after the other, by torch."""
        from penstock.loader.pytorch import chain_datasets

        return chain_datasets([self, other])

    def _passes(self, where: Place) -> Generator[Any, None, None]:
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

    def _one_pass(self, where: Place) -> Iterator[Any]:
        run = Run(self.seed, self._counts.begin(where), where, counts=self._counts)
        if not self.pipeline:
            raise ConfigError("an empty pipeline: the first stage is what gives samples")
        samples = _begin(self.pipeline[0], run)
        for number, stage in enumerate(_deferred(self.pipeline)[1:], 1):
            samples = _go_on(stage, samples, run.at(number))
        return samples

    # Building.

    def compose(self, *stages: Any) -> Self:
        """A new pipeline with these stages added at the end."""
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
        """Make an epoch this many samples (or batches, where they are batched) per worker.

        If the data are shorter, they start again. ``with_shared_epoch`` counts over all workers.
        """
        limit = max(
            checks.whole("with_epoch: nsamples", nsamples, least=None),
            checks.whole("with_epoch: nbatches", nbatches, least=None),
        )
        if limit < 1:
            raise ConfigError(f"with_epoch({limit}): expected at least one sample")
        self.repetitions, self.limit, self.limit_is_shared = FOREVER, limit, False
        return self

    def with_shared_epoch(self, nsamples: int) -> "DataPipeline":
        """Make an epoch this many samples (or batches) in all, divided among the workers."""
        limit = checks.whole("with_shared_epoch: nsamples", nsamples, least=1)
        self.repetitions, self.limit, self.limit_is_shared = FOREVER, limit, True
        return self

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> "DataPipeline":
        """Go over the data ``nepochs`` times, or for ever; at most ``nbatches`` per worker."""
        nepochs = checks.whole("repeat: nepochs", nepochs, least=None)
        nbatches = checks.whole("repeat: nbatches", nbatches, least=None)
        self.repetitions = nepochs if nepochs > 0 else FOREVER
        self.limit, self.limit_is_shared = (nbatches if nbatches > 0 else None), False
        return self

    def with_length(self, n: int, silent: bool = True) -> "DataPipeline":
        """Set what ``len()`` returns; the number of samples does not change."""
        self.length = checks.whole("with_length: n", n)
        return self

    @property
    def skipped(self) -> int:
        """Errors that handlers skipped since this pipeline was made, in this process and in forked workers."""
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

    def __copy__(self) -> Self:
        kind = type(self)
        made = kind.__new__(kind)
        made.__dict__.update(self.__dict__, pipeline=list(self.pipeline), _counts=Counts())
        return made

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        state = {name: value for name, value in self.__dict__.items() if name != "_counts"}
        where = None
        if get_spawning_popen() is not None:  # on its way into a process that is started anew
            now = here()
            where = (now.rank, now.ranks, self._counts.sent)
            self._counts.sent += 1
        return _rebuilt, (type(self), state, where)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.pipeline)} stages: {', '.join(map(_name, self.pipeline))}>"


_UNDER_WAY: "weakref.WeakSet[Generator[Any, None, None]]" = weakref.WeakSet()


@atexit.register
def _end_passes() -> None:
    """Close the files of unfinished passes before the interpreter shuts down and modules are gone."""
    for passes in list(_UNDER_WAY):
        with suppress(ValueError):  # a thread is in it
            passes.close()


def _rebuilt(kind: type[DataPipeline], state: dict[str, Any], where: tuple[int, int, int] | None) -> DataPipeline:
    made = kind.__new__(kind)
    made.__dict__.update(state, _counts=Counts())
    if where is not None:
        rank, ranks, sent = where
        set_rank(rank, ranks)
        made._counts = Counts(sent_before=sent)
    return made


def _begin(stage: Any, run: Run) -> Iterator[Any]:
    """Start the source: a ``FirstStage``, an iterable, or a function."""
    if isinstance(stage, FirstStage):
        return stage.begin(run)
    if isinstance(stage, Iterable):
        return iter(stage)
    if callable(stage):
        return iter(stage())
    raise ConfigError(f"{stage!r} cannot be the source of a pipeline: it gives no samples")


# Verbs that pass values on as they are.
_PASSIVE = (
    *(rename_fields, rename_matching, pick_matching, fields_to_tuple, fields_to_dict, shuffle_samples, slice_samples),
    *(draw_samples, log_samples),
)


def _deferred(stages: list[Any]) -> list[Any]:
    """The stages, with pictures made floats in their batch where nothing before it looks at them."""
    found, decoding = list(stages), None
    for number, stage in enumerate(stages):
        function = stage.function if type(stage) is Stage else None
        if function is map_samples and stage.args and type(stage.args[0]) is Decoder:
            decoding = number
        elif (
            function is batch_samples
            and stage.options.get("collation_fn", default_collation_fn) is default_collation_fn
        ):
            if decoding is not None and len(stage.args) < 2:
                decoder, *others = stages[decoding].args
                found[decoding] = Stage(map_samples, decoder.deferring(), *others, **stages[decoding].options)
            decoding = None
        elif function not in _PASSIVE:
            decoding = None
    return found


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
