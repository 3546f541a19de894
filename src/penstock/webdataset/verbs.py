"""Verbs about whole samples: mapped, selected, logged, shuffled, put into batches.

Plain functions from an iterator to an iterator; see ``stages``.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from penstock.errors import ConfigError
from penstock.webdataset.collate import Stacking, default_collation_fn
from penstock.webdataset.faults import MissingField
from penstock.webdataset.handlers import Handler, reraise_exception
from penstock.webdataset.runs import Run, explained
from penstock.webdataset.samples import Sample


def map_samples(
    samples: Iterator[Any], run: Run, /, f: Callable[[Any], Any], handler: Handler = reraise_exception
) -> Iterator[Any]:
    """``f`` of each sample, without those of which it is None; dicts keep their key."""
    for sample in samples:
        try:
            result = f(sample)
        except Exception as error:
            if run.excuse(handler, explained(error, "map", sample)):
                continue
            return
        if result is None:
            continue
        if isinstance(sample, dict) and isinstance(result, dict):
            result["__key__"] = sample.get("__key__")
        yield result


def map_fields(
    samples: Iterator[Sample],
    run: Run,
    /,
    handler: Handler = reraise_exception,
    **functions: Callable[[Any], Any],
) -> Iterator[Sample]:
    """Each named field passed through its function."""
    _check_functions("map_dict", functions.values())
    for sample in samples:
        try:
            for name, function in functions.items():
                sample[name] = function(sample[name])
        except Exception as error:
            if run.excuse(handler, explained(error, "map_dict", sample)):
                continue
            return
        yield sample


def map_places(
    samples: Iterator[Sequence[Any]],
    run: Run,
    /,
    *functions: Callable[[Any], Any] | None,
    handler: Handler = reraise_exception,
) -> Iterator[tuple[Any, ...]]:
    """The first element of each tuple passed through the first function, and so on; None leaves one as it is."""
    _check_functions("map_tuple", [function for function in functions if function is not None])
    for sample in samples:
        values = list(sample)
        try:
            for place, function in enumerate(functions[: len(values)]):
                values[place] = values[place] if function is None else function(values[place])
        except Exception as error:
            if run.excuse(handler, error):
                continue
            return
        yield tuple(values)


def _check_functions(verb: str, functions: Iterable[Any]) -> None:
    functions = list(functions)
    if not functions:
        raise ConfigError(f"{verb}() needs at least one function")
    for function in functions:
        if not callable(function):
            raise ConfigError(f"{verb}: {function!r} is not a function")


def select_samples(samples: Iterator[Any], run: Run, /, predicate: Callable[[Any], bool]) -> Iterator[Any]:
    """Those of which it is true."""
    return (sample for sample in samples if predicate(sample))


def draw_samples(samples: Iterator[Any], run: Run, /, p: float = 0.5) -> Iterator[Any]:
    """Each with probability ``p``."""
    if not 0 <= p <= 1:
        raise ConfigError(f"rsample({p}): expected a probability, from 0 to 1")
    rng = run.rng()
    return (sample for sample in samples if rng.random() < p)


def slice_samples(samples: Iterator[Any], run: Run, /, *bounds: int | None) -> Iterator[Any]:
    """``slice(stop)``, ``slice(start, stop, step)``."""
    return islice(samples, *bounds)


def log_samples(samples: Iterator[Any], run: Run, /, logfile: str | os.PathLike[str] | None = None) -> Iterator[Any]:
    """Number, worker, rank and key of each, one to a line, at the end of a file; several processes may share it."""
    if not logfile:
        yield from samples
        return
    with open(logfile, "ab", buffering=0) as log:  # each line is one write, which the system does not tear apart
        for number, sample in enumerate(samples):
            key = sample.get("__key__") if isinstance(sample, dict) else None
            line = f"{number}\t{run.place.worker}\t{run.place.rank}\t{key}\n"
            log.write(line.encode("utf-8", "surrogateescape"))
            yield sample


def batch_samples(
    samples: Iterator[Any],
    run: Run,
    /,
    batchsize: int = 20,
    collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
    partial: bool = True,
) -> Iterator[Any]:
    """So many at a time, collated, or in lists if there is no function; the last may have fewer if ``partial``."""
    if batchsize < 1:
        raise ConfigError(f"batched({batchsize}): expected at least one sample a batch")
    while True:
        held: Stacking | list[Any] = Stacking(batchsize) if collation_fn is default_collation_fn else []
        for sample in islice(samples, batchsize):
            held.append(sample)
        if not held or (len(held) < batchsize and not partial):
            return
        batch = held.batch() if isinstance(held, Stacking) else collation_fn(held) if collation_fn else held
        del held, sample
        yield batch
        del batch  # before the next takes as much


def unbatch_samples(samples: Iterator[Any], run: Run, /) -> Iterator[Any]:
    """Batches of columns -> their rows."""
    for batch in samples:
        if isinstance(batch, dict):
            lengths = {len(column) for column in batch.values()}
            if len(lengths) != 1:
                raise MissingField(f"unbatched: columns of {sorted(lengths)} rows in one batch: {', '.join(batch)}")
            yield from ({name: column[row] for name, column in batch.items()} for row in range(*lengths))
        elif isinstance(batch, list | tuple):
            yield from (tuple(column[row] for column in batch) for row in range(len(batch[0])))
        else:
            raise MissingField(f"unbatched: a batch is a dict, a tuple or a list, not {type(batch).__name__}")


def unlist_samples(samples: Iterator[list[Any]], run: Run, /) -> Iterator[Any]:
    """Lists of samples -> samples."""
    for batch in samples:
        if not isinstance(batch, list):
            raise MissingField(f"unlisted: expected a list of samples, not {type(batch).__name__}")
        yield from batch
