"""The verbs: plain functions from an iterator of samples to an iterator, each with the pass that it belongs to.

The first are about whole samples (mapped, selected, logged, put into batches), the others about their fields.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from itertools import islice
from math import ceil, isfinite
from numbers import Real
from typing import Any

from penstock.base import checks
from penstock.errors import ConfigError
from penstock.webdataset.collate import Stacking, column_segments, default_collation_fn
from penstock.webdataset.handlers import Handler, MissingField, reraise_exception
from penstock.webdataset.run import Run
from penstock.webdataset.samples import Sample

Verb = Callable[..., Iterator[Any]]


def apply_function(samples: Iterator[Any], run: Run, function: Verb, /, *args: Any, **options: Any) -> Iterator[Any]:
    """The caller's own function, which knows nothing of passes."""
    return function(samples, *args, **options)


def map_samples(
    samples: Iterator[Any], run: Run, /, f: Callable[[Any], Any], handler: Handler = reraise_exception
) -> Iterator[Any]:
    """Apply ``f`` to each sample, and drop samples for which it returns None; dicts keep their key."""

    def apply(sample: Any) -> Any:
        result = f(sample)
        if isinstance(sample, dict) and isinstance(result, dict):
            result["__key__"] = sample.get("__key__")
        return result

    return (result for result in run.each(samples, apply, handler, "map") if result is not None)


def map_fields(
    samples: Iterator[Sample],
    run: Run,
    /,
    handler: Handler = reraise_exception,
    **functions: Callable[[Any], Any],
) -> Iterator[Sample]:
    """Each named field passed through its function."""
    _check_functions("map_dict", functions.values())

    def apply(sample: Sample) -> Sample:
        for name, function in functions.items():
            sample[name] = function(sample[name])
        return sample

    return run.each(samples, apply, handler, "map_dict")


def map_elements(
    samples: Iterator[Sequence[Any]],
    run: Run,
    /,
    *functions: Callable[[Any], Any] | None,
    handler: Handler = reraise_exception,
) -> Iterator[tuple[Any, ...]]:
    """The first element of each tuple passed through the first function, and so on; None leaves one as it is."""
    _check_functions("map_tuple", [function for function in functions if function is not None])

    def apply(sample: Sequence[Any]) -> tuple[Any, ...]:
        values = list(sample)
        for place, function in enumerate(functions[: len(values)]):
            values[place] = values[place] if function is None else function(values[place])
        return tuple(values)

    return run.each(samples, apply, handler, "map_tuple")


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
    if not isinstance(p, Real) or not 0 <= float(p) <= 1:
        raise ConfigError(f"rsample({checks.shown(p)}): expected a probability, from 0 to 1")
    rng = run.rng()
    return (sample for sample in samples if rng.random() < p)


def slice_samples(samples: Iterator[Any], run: Run, /, *bounds: int | None) -> Iterator[Any]:
    """``slice(stop)``, ``slice(start, stop, step)``."""
    plain = [None if bound is None else checks.whole("slice: bound", bound) for bound in bounds]
    if not 1 <= len(plain) <= 3 or plain[2:] == [0]:
        raise ConfigError(f"slice{bounds}: expected slice(stop) or slice(start, stop, step)")
    return islice(samples, *plain)


def log_samples(samples: Iterator[Any], run: Run, /, logfile: str | os.PathLike[str] | None = None) -> Iterator[Any]:
    """Append number, worker, rank and key of each to a file, one per line; several processes may share it."""
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
    batchsize: float = 20,
    collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
    partial: bool = True,
) -> Iterator[Any]:
    """Batches of ``batchsize``, collated, or lists without a function; the last may be smaller if ``partial``."""
    if isinstance(batchsize, Real) and not isinstance(batchsize, bool) and isfinite(batchsize):
        batchsize = ceil(batchsize)  # programs divide, and 8 / 2 is a float
    batchsize = checks.whole("batched: batchsize", batchsize, least=1)
    partial = checks.flag("batched: partial", partial)
    stacks = collation_fn is default_collation_fn
    segments = column_segments(run.place) if stacks else None
    while True:
        held: Stacking | list[Any] = Stacking(batchsize, segments) if stacks else []
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


def first_of(sample: Sample, names: str | Sequence[str], required: bool = True) -> Any:
    """The first field there is of ``"jpg;png"``, or of a list of names."""
    wanted = names.split(";") if isinstance(names, str) else list(names)
    for name in wanted:
        if name in sample:
            return sample[name]
    if required:
        present = ", ".join(name for name in sample if not str(name).startswith("__"))
        where = f"sample {sample['__key__']!r} of {sample.get('__url__')}: " if "__key__" in sample else ""
        raise MissingField(f"{where}didn't find {' or '.join(map(repr, wanted))}; its fields are {present or 'none'}")
    return None


def rename_fields(
    samples: Iterator[Sample],
    run: Run,
    /,
    handler: Handler = reraise_exception,
    keep: bool = True,
    **names: str | Sequence[str],
) -> Iterator[Sample]:
    """``images="jpg;png"``: whichever there is, under the new name; with ``keep=False`` nothing else."""
    replaced = {old for each in names.values() for old in (each.split(";") if isinstance(each, str) else each)}

    def rename(sample: Sample) -> Sample:
        renamed = {new: first_of(sample, old) for new, old in names.items()}
        kept = {name: value for name, value in sample.items() if name not in replaced} if keep else {}
        return {**kept, **renamed}

    return run.each(samples, rename, handler, "rename")


def rename_matching(
    samples: Iterator[Sample],
    run: Run,
    /,
    *pairs: tuple[str, str],
    keep_unselected: bool = False,
    must_match: bool = True,
    duplicate_is_error: bool = True,
    **patterns: str,
) -> Iterator[Sample]:
    """``image="*.jpg"``: rename the field that matches; the pattern given last is tried first."""
    renamings = [*pairs, *patterns.items()][::-1]
    for sample in samples:
        renamed: Sample = {}
        matched = set()
        for field, value in sample.items():
            name = field.rpartition("/")[2].lower()
            new, pattern = next((each for each in renamings if fnmatch(name, each[1])), ("", ""))
            if not pattern:
                if keep_unselected:
                    renamed[field] = value
                continue
            matched.add(pattern)
            if new not in renamed:
                renamed[new] = value
            elif duplicate_is_error:
                raise MissingField(f"rename_keys: several of {', '.join(sample)} would be called {new!r}")
        unmatched = [pattern for _, pattern in renamings if pattern not in matched]
        if must_match and unmatched:
            raise MissingField(f"rename_keys: nothing matches {', '.join(unmatched)} in {', '.join(sample)}")
        yield renamed


def pick_matching(
    samples: Iterator[Sample],
    run: Run,
    /,
    *patterns: str | Sequence[str],
    duplicate_is_error: bool = True,
    ignore_missing: bool = False,
) -> Iterator[tuple[Any, ...]]:
    """``"*.png;*.jpg", "*.cls"`` -> tuples of the fields that match, with or without a dot before them."""
    wanted = [pattern.split(";") if isinstance(pattern, str) else pattern for pattern in patterns]
    for sample in samples:
        values = []
        for choices in wanted:
            found = [
                name for name in sample if any(fnmatch(f".{name}", each) or fnmatch(name, each) for each in choices)
            ]
            if not found and not ignore_missing:
                raise MissingField(f"extract_keys: nothing matches {';'.join(choices)} in {', '.join(sample)}")
            if len(found) > 1 and duplicate_is_error:
                raise MissingField(f"extract_keys: {' and '.join(found)} both match {';'.join(choices)}")
            values += [sample[name] for name in found[:1]]
        yield tuple(values)


def fields_to_tuple(
    samples: Iterator[Sample],
    run: Run,
    /,
    *fields: str | Sequence[str],
    handler: Handler = reraise_exception,
    missing_is_error: bool = True,
    none_is_error: bool | None = None,
) -> Iterator[tuple[Any, ...]]:
    """``"jpg;png", "cls"``, or ``"jpg;png cls"`` -> tuples of those fields."""
    if len(fields) == 1 and isinstance(fields[0], str):
        fields = tuple(fields[0].split())
    none_is_error = missing_is_error if none_is_error is None else none_is_error

    def pick(sample: Sample) -> tuple[Any, ...]:
        values = tuple(first_of(sample, names, missing_is_error) for names in fields)
        if none_is_error and any(value is None for value in values):
            raise MissingField(f"to_tuple: a field of {', '.join(map(str, fields))} is None in {', '.join(sample)}")
        return values

    return run.each(samples, pick, handler, "to_tuple")


def fields_to_dict(
    samples: Iterator[Any], run: Run, /, *names: str, handler: Handler = reraise_exception
) -> Iterator[Sample]:
    """``"image", "label"``: the elements of tuples under these names, or of dicts these fields alone."""

    def give_names(sample: Any) -> Sample:
        if isinstance(sample, dict):
            return {name: first_of(sample, name) for name in names}
        if len(sample) != len(names):
            raise MissingField(f"to_dict: {len(names)} names ({', '.join(names)}) for {len(sample)} elements")
        return dict(zip(names, sample, strict=True))

    return run.each(samples, give_names, handler, "to_dict")
