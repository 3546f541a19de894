"""``convert``: write a dataset in another layout."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Literal

import numpy as np

from penstock.base import checks
from penstock.base.checks import explains_arguments
from penstock.base.executors import checked_executor
from penstock.base.sizes import parse_size
from penstock.conversion import source
from penstock.conversion.attempt import Attempt, Converted, Progress, remove_output
from penstock.conversion.attributes import Attributes, attributes_of
from penstock.conversion.estimate import advised_name, advised_rows, estimate
from penstock.conversion.plan import ALL_FIELDS, COMPRESSIONS, Options, format_of_goal, make_plan
from penstock.conversion.rows import tar_names
from penstock.conversion.tasks import Job
from penstock.conversion.work import Work
from penstock.dataset.composition import check_dataset
from penstock.dataset.dataset import Dataset
from penstock.errors import ConfigError
from penstock.formats.open import open_quietly


@explains_arguments({"target": "the second argument is the path to write"}, check_first=check_dataset)
def convert(
    ds: Dataset,
    to: str | os.PathLike[str],
    *,
    memory: int | str = "512MiB",
    like: str | None = None,
    compression: str | None = None,
    rows_per_chunk: int | None = None,
    shard_bytes: int | str = "256MiB",
    shuffle: int | None = None,
    executor: Executor | str | None = None,
    workers: int | None = None,
    verify: bool | Literal["source"] = True,
    overwrite: bool = False,
    restart: bool = False,
    dry_run: bool = False,
    part: tuple[int, int] | None = None,
    only_finish: bool = False,
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> Converted:
    """Write a dataset in another layout: ``convert(ds, "out.zarr", memory="512MiB")``.

    The name chooses the format: ``out.zarr`` (Zarr v3, sharded), ``out.h5``, ``out.npy`` (one field), ``out.tar`` or
    ``train-%06d.tar``, ``out.parquet`` or ``part-%04d.parquet``, ``out.lmdb``. The output appears under its name when
    it is complete. An interrupted conversion is continued by the same call. A manifest, and a record of where the
    data came from, are written beside the output.

    memory:          the most that all its processes hold together; what cannot fit is refused before it starts
    like:            "plan": the layout that ``penstock.plan`` advises. A name without an ending gets one. Refused where
                     the plan advises to keep the files. ``announce`` is told how long it takes and how large it becomes
    compression:     "auto", "zstd", "blosc" or "none" for Zarr; "none", "zstd", "blosc" or "gzip" for HDF5; by default
                     the first. "auto" is zstd for fields of which it leaves a tenth or less, by a sample, and none for
                     others, whose rows would be read several times as slowly from memory. "zstd" and "blosc" (lz4, bits
                     shuffled; larger, and quicker to decode) are for disks that are slower than decoding
    rows_per_chunk:  rows that a reader of Zarr or compressed HDF5 decodes at a time; by default what makes 1 MiB of
                     the largest field
    shard_bytes:     about how large shards, and numbered files, become
    shuffle:         a seed: write the rows in an order shuffled by it. Rows that come in blocks are written twice: once
                     by row beside the output, for as long as it takes, and then in their order
    executor:        "processes" (the default where they fit), "serial" for this process, or any
                     ``concurrent.futures.Executor``: Dask's ``client.get_executor()``, ``mpi4py.futures`` …
    workers:         tasks that run at a time; by default as many as there are cores and memory allows
    verify:          read what was written again, and compare it with what was read; "source": besides, open the output
                     at the end and compare all of it with the source, which is read a second time
    overwrite:       replace an existing output, once the new one is complete
    restart:         start again instead of continuing an interrupted conversion
    dry_run:         only plan: print the result's ``plan``
    part:            (3, 40): only the third of 40 parts of the tasks, for array jobs; the output is finished by a call
                     without ``part``, which also does what is missing
    only_finish:     only finish: an error if a task is still to be done
    attributes:      of arrays of Zarr and HDF5, by field; of the whole under "". They are added to those of the source,
                     which are kept if it is Zarr or HDF5
    progress:        called with the bytes written so far, and all
    announce:        with ``like``: called with the plan and the estimate in words, before anything is written
    """
    to = checks.path("to", to)
    dry_run, only_finish = checks.flag("dry_run", dry_run), checks.flag("only_finish", only_finish)
    overwrite, restart = checks.flag("overwrite", overwrite), checks.flag("restart", restart)
    attributes = _attributes({} if attributes is None else attributes)
    progress = _quietly if progress is None else checks.function("progress", progress)
    announce = _silently if announce is None else checks.function("announce", announce)
    is_advised = like is not None and checks.one_of("like", like, ("plan",)) == "plan"
    named = advised_name(ds, to) if is_advised else to
    rows_per_chunk = advised_rows(ds) if is_advised and rows_per_chunk is None else rows_per_chunk
    kind, goal, part = format_of_goal(named), os.path.abspath(named), None if part is None else _part(part)
    origin, by_row = ds, ""
    if shuffle is not None:
        seed = checks.whole("shuffle", shuffle)
        if source.block_rows(ds.delivered) > 1 and not dry_run:
            if part is not None or only_finish:
                raise ConfigError(
                    f"shuffle={seed} with part or only_finish: rows of this dataset come in blocks, so that it is "
                    f"written twice; convert it without shuffle first, and shuffle the result"
                )
            by_row = _name_by_row(ds, goal)
            how = {"memory": memory, "executor": executor, "workers": workers, "verify": verify, "restart": restart}
            ds = _write_by_row(ds, by_row, how)
        ds = _shuffled(ds, seed)
    if restart and part is not None:
        raise ConfigError(
            f"restart with part={part}: each part would remove what others did. To begin again, remove the hidden "
            f"folder {Work(goal).folder} first"
        )
    options = _options(kind, compression, rows_per_chunk, shard_bytes, verify)
    limit = parse_size(memory, argument="memory")
    workers = None if workers is None else checks.whole("workers", workers, least=1)
    mode = checked_executor(executor)
    plan = make_plan(ds, goal, options, limit, 1 if mode == "serial" else workers)
    expected = estimate(ds, plan) if is_advised else None
    if expected is not None:
        announce(f"{plan}\n  expected: {expected}")
    kept = _merged(attributes_of(origin) if kind in ("zarr", "hdf5") else {}, attributes)
    job = Job(ds, plan, kept, is_spread=part is not None or not isinstance(mode, str))
    attempt = Attempt(job, origin, overwrite=overwrite, restart=restart, expected=expected)
    if dry_run:
        return attempt.result(finished=False)
    done = attempt.run(mode, progress, part=part, only_finish=only_finish)
    if done.finished:
        remove_output(by_row)
    return done


def _attributes(given: Any) -> Mapping[str, Mapping[str, Any]]:
    expected = "a dict of dicts, such as {'image': {'unit': 'mm'}}"
    by_field = checks.by_name("attributes", given, expected)
    return {name: checks.by_name(f"attributes[{name!r}]", each, expected) for name, each in by_field.items()}


def _merged(found: Attributes, given: Mapping[str, Mapping[str, Any]]) -> Attributes:
    """Attributes of the source, and over them those of the caller."""
    return {name: {**found.get(name, {}), **given.get(name, {})} for name in (ALL_FIELDS, *found, *given)}


def _quietly(done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _silently(text: str) -> None:
    """Announcements that nobody asked for."""


def _options(
    kind: str, compression: str | None, rows_per_chunk: int | None, shard_bytes: int | str, verify: bool | str
) -> Options:
    compares = isinstance(verify, str) and verify == "source"
    chosen = COMPRESSIONS[kind][0] if compression is None else compression
    if not isinstance(chosen, str) or chosen not in COMPRESSIONS[kind]:
        raise ConfigError(f"compression={checks.shown(compression)}: {kind} takes {', '.join(COMPRESSIONS[kind])}")
    return Options(
        format=kind,
        compression=chosen,
        rows_per_chunk=None if rows_per_chunk is None else checks.whole("rows_per_chunk", rows_per_chunk, least=1),
        shard_bytes=parse_size(shard_bytes, argument="shard_bytes"),
        verify=compares or checks.flag("verify", verify),
        compare=compares,
    )


def _shuffled(ds: Dataset, seed: int) -> Dataset:
    """In the order of a seed. Rows that come in blocks, which only a dry run leaves so, stay: the plan is the same."""
    if source.block_rows(ds.delivered) > 1:
        return ds
    return ds.select(np.random.default_rng(seed).permutation(len(ds)))


def _name_by_row(ds: Dataset, goal: str) -> str:
    """The file between two passes: beside the output, hidden."""
    folder, name = os.path.split(goal)
    ending = "tar" if any(spec.is_list for spec in ds.fields.values()) else "h5"
    return os.path.join(folder, f".{name.replace('%', '')}.rows.{ending}")


def _write_by_row(ds: Dataset, path: str, how: Mapping[str, Any]) -> Dataset:
    """The first pass of two: a copy whose rows can be read one by one, each block of the source once."""
    convert(ds, path, overwrite=True, **how)
    names = tar_names(ds.fields) if path.endswith(".tar") else {name: name for name in ds.fields}
    lists = {names[name]: spec.holds for name, spec in ds.fields.items() if spec.is_list}
    copy = open_quietly(path, fields=tuple(names.values()), **({"decoders": lists} if lists else {}))
    return copy.rename(**{name: stored for name, stored in names.items() if name != stored})


def _part(given: Any) -> tuple[int, int]:
    try:
        number, of = given
        if 1 <= number <= of:
            return int(number), int(of)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"part={checks.shown(given)}: expected two numbers, such as (3, 40): the third of 40 parts")
