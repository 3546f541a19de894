"""Small functions that programs take from ``webdataset.utils``."""

import fnmatch
import functools
import glob
import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, NoReturn

import numpy as np

from penstock.errors import Unsafe
from penstock.formats.paths import expand_braces
from penstock.webdataset.run import here

enforce_security = False
"""Set it to True to refuse local files in ``gopen``. Commands and pickles are refused anyway."""


class PipelineStage:
    """A stage of a pipeline; define ``run``, from an iterator to an iterator."""

    def invoke(self, *args: Any, **options: Any) -> Any:
        """Define it in a subclass."""
        raise NotImplementedError

    def run(self, *args: Any, **options: Any) -> Any:
        """What the pipeline calls; as ``invoke`` unless it is defined."""
        return self.invoke(*args, **options)


def identity(x: Any) -> Any:
    """The argument."""
    return x


def glob_with_braces(pattern: str) -> list[str]:
    """The files that match a pattern, whose braces are expanded first."""
    return [path for each in expand_braces(pattern) for path in glob.glob(each)]


def fnmatch_with_braces(filename: str, pattern: str) -> bool:
    """Whether a name matches a pattern, whose braces are expanded first."""
    return any(fnmatch.fnmatch(filename, each) for each in expand_braces(pattern))


def make_seed(*args: Any) -> int:
    """One seed of 31 bits from several values."""
    seed = 0
    for each in args:
        seed = (seed * 31 + hash(each)) & 0x7FFFFFFF
    return seed


def is_iterable(obj: Any) -> bool:
    """Whether it can be iterated over; texts and bytes do not count."""
    return isinstance(obj, Iterable) and not isinstance(obj, str | bytes)


def safe_eval(s: str, expr: str = "{}") -> NoReturn:
    """Refused: nothing is evaluated here."""
    raise Unsafe("safe_eval: texts are not evaluated as Python here; look the name up in a dict of your own")


def lookup_sym(sym: str, modules: Iterable[str]) -> Any:
    """The first attribute of that name in some modules; None if there is none."""
    for name in modules:
        found = getattr(importlib.import_module(name, package="webdataset"), sym, None)
        if found is not None:
            return found
    return None


def guess_batchsize(batch: Any) -> int:
    """The number of samples in a batch that is a tuple or list of columns."""
    return len(batch[0])


def repeatedly(
    source: Iterable[Any],
    nepochs: int | None = None,
    nbatches: int | None = None,
    nsamples: int | None = None,
    batchsize: Callable[[Any], int] = guess_batchsize,
) -> Iterator[Any]:
    """Iterate over a source again and again, until one of the limits is reached."""
    batches = samples = 0
    for epoch in count(1):
        for batch in source:
            yield batch
            batches += 1
            samples += 0 if nsamples is None else batchsize(batch)
            if (nbatches is not None and batches >= nbatches) or (nsamples is not None and samples >= nsamples):
                return
        if nepochs is not None and epoch >= nepochs:
            return


def repeatedly0(loader: Iterable[Any], nepochs: int | None = None, nbatches: int | None = None) -> Iterator[Any]:
    """At most ``nbatches`` of each of ``nepochs`` passes over a loader."""
    for _ in count() if nepochs is None else range(nepochs):
        yield from islice(loader, nbatches)


def pytorch_worker_info(group: Any = None) -> tuple[int, int, int, int]:
    """Rank, number of ranks, worker, number of workers."""
    place = here(group)
    return place.rank, place.ranks, place.worker, place.workers


def pytorch_worker_seed(group: Any = None) -> int:
    """A number that differs by rank and worker."""
    rank, _, worker, _ = pytorch_worker_info(group)
    return rank * 1000 + worker


class ObsoleteException(Exception):
    """An obsolete function was called."""


def _decorator(before: Callable[[str, str], None]) -> Callable[..., Any]:
    def decorate(func: Any = None, *, reason: str | None = None) -> Any:
        if func is None or isinstance(func, str):
            return functools.partial(decorate, reason=func or reason)

        @functools.wraps(func)
        def called(*args: Any, **options: Any) -> Any:
            before(func.__name__, f" Reason: {reason}" if reason else "")
            return func(*args, **options)

        return called

    return decorate


def _warn(name: str, reason: str) -> None:
    warnings.warn(f"Call to deprecated function {name}.{reason}", DeprecationWarning, stacklevel=3)


def _refuse(name: str, reason: str) -> None:
    if os.environ.get("ALLOW_OBSOLETE", "0") == "0":
        raise ObsoleteException(f"Call to obsolete function {name}. Set env ALLOW_OBSOLETE=1 to permit.{reason}")


deprecated = _decorator(_warn)
obsolete = _decorator(_refuse)


def compute_sample_weights(n_w_pairs: Iterable[tuple[float, float]]) -> np.ndarray:
    """Sizes and weights of datasets -> how often to draw from each, as a part of the largest."""
    weighted = np.array([number * weight for number, weight in n_w_pairs])
    shares: np.ndarray = weighted / weighted.max()
    return shares
