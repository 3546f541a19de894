"""Verbs about the fields of samples: picked, renamed, put into tuples or dicts.

Plain functions from an iterator to an iterator; see ``stages``.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from penstock.webdataset.faults import MissingField
from penstock.webdataset.handlers import Handler, reraise_exception
from penstock.webdataset.runs import Run
from penstock.webdataset.samples import Sample


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
    for sample in samples:
        try:
            renamed = {new: first_of(sample, old) for new, old in names.items()}
        except Exception as error:
            if run.excuse(handler, error):
                continue
            return
        kept = {name: value for name, value in sample.items() if name not in replaced} if keep else {}
        yield {**kept, **renamed}


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
    """``image="*.jpg"``: the fields that match, under the new name, the pattern given last being tried first."""
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
    for sample in samples:
        try:
            values = tuple(first_of(sample, names, missing_is_error) for names in fields)
            if none_is_error and any(value is None for value in values):
                raise MissingField(f"to_tuple: a field of {', '.join(map(str, fields))} is None in {', '.join(sample)}")
        except Exception as error:
            if run.excuse(handler, error):
                continue
            return
        yield values


def fields_to_dict(
    samples: Iterator[Any], run: Run, /, *names: str, handler: Handler = reraise_exception
) -> Iterator[Sample]:
    """``"image", "label"``: the elements of tuples under these names, or of dicts these fields alone."""
    for sample in samples:
        try:
            if isinstance(sample, dict):
                named = {name: first_of(sample, name) for name in names}
            elif len(sample) == len(names):
                named = dict(zip(names, sample, strict=True))
            else:
                raise MissingField(f"to_dict: {len(names)} names ({', '.join(names)}) for {len(sample)} elements")
        except Exception as error:
            if run.excuse(handler, error):
                continue
            return
        yield named
