"""Estimates what training from a dataset needs before it starts: memory, bytes, time, and advice.

For files, a loader is made, and its threads read for a moment to measure their speed. For shapes alone, the estimate is
calculated for rows stored one after another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from penstock.base import checks, html
from penstock.base.dataclass import dataclass
from penstock.base.dtypes import numpy_dtype
from penstock.base.machine import cores, free_bytes
from penstock.base.sizes import format_size
from penstock.base.spec import Fields, FieldSpec, ReadPath, row_bytes
from penstock.dataset.dataset import Dataset
from penstock.dataset.explain import GOOD_QUALITY, epoch_bytes
from penstock.errors import ConfigError
from penstock.formats.inspect import inspect
from penstock.formats.open import open, open_quietly
from penstock.loader.loader import Loader, runtime_of
from penstock.loader.partition import Partition
from penstock.loader.placement import check_threads
from penstock.loader.plan import Plan, make_plan
from penstock.loader.plan_request import Request
from penstock.loader.plan_text import ALONE, BATCHES, HolderRow, as_html, describe, text_lines
from penstock.loader.request import memory_limit
from penstock.loader.rivals import Habits, LoadingJob, Rival, check_habits, rivals
from penstock.loader.trial import try_out

Shapes = Mapping[str, tuple[Sequence[int], Any]]
"""Arrays that need not exist: ``{"betas": ((750, 150, 150, 100), "float32")}``, rows first."""

# Seconds of trial reading.
TRIAL_S = 0.35

# For rows this large, advise to read only a part of each.
LARGE_ROW_BYTES = 1_000_000

UNBOUNDED = 2**62


@dataclass(frozen=True)
class Contents:
    """What there is to load."""

    fields: Fields
    """As they are delivered."""
    rows: int
    files: int

    @property
    def sample_bytes(self) -> int:
        return row_bytes(self.fields)

    @property
    def whole_bytes(self) -> int:
        """The whole dataset, if it were loaded."""
        return self.rows * self.sample_bytes

    @property
    def file_bytes(self) -> int:
        """One file's share, if it were loaded."""
        return self.whole_bytes // max(1, self.files)


@dataclass(frozen=True, repr=False)
class Forecast:
    """An estimate of what training needs: ``print(penstock.plan(path, batch_size=32))``."""

    contents: Contents
    plan: Plan
    """What the loader will hold, to the byte."""
    ample_bytes: int
    """The budget above which more memory would not help."""
    pinned: bool
    world_size: int
    read_bytes: int
    """Bytes read from files per epoch on this rank; 0 if unknown, or without files."""
    seconds: float | None
    """The least time of an epoch, by a short measurement; None without one."""
    rivals: Sequence[Rival]
    advice: Sequence[str]

    @property
    def batch_bytes(self) -> int:
        """One batch, as it is delivered."""
        return self.plan.batch_rows * self.contents.sample_bytes

    @property
    def peak_bytes(self) -> int:
        return self.plan.planned_bytes

    def __str__(self) -> str:
        parts = [
            *((title, [f"  {line}" for line in text_lines(rows)]) for title, rows in self._sizes()),
            *self._paragraphs(),
        ]
        return "\n\n".join("\n".join([f"{title}:", *lines]) for title, lines in parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        sizes = [html.paragraph(f"{title}:") + as_html(rows) for title, rows in self._sizes()]
        texts = [html.paragraph("\n".join([f"{title}:", *lines])) for title, lines in self._paragraphs()]
        return "".join([*sizes, *texts])

    def _sizes(self) -> list[tuple[str, list[HolderRow]]]:
        held = [
            (holder, bytes_, f"{why}, pinned" if self.pinned and holder == BATCHES else why)
            for holder, bytes_, why in describe(self.plan)[0]
        ]
        others = [(rival.name, rival.peak_bytes, rival.text) for rival in self.rivals]
        return [
            ("Size of the data in memory", self._data()),
            ("penstock would hold", held),
            ("Other loaders would hold, for the same job", others),
        ]

    def _paragraphs(self) -> list[tuple[str, list[str]]]:
        epoch = "An epoch" if self.world_size == 1 else f"An epoch, on each of {self.world_size} ranks"
        return [(epoch, self._epoch()), ("Advice", [f"- {said}." for said in self.advice])]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, sizes in bytes."""
        contents, plan = self.contents, self.plan
        return {
            "rows": contents.rows, "files": contents.files, "sample_bytes": contents.sample_bytes,
            "batch_bytes": self.batch_bytes, "file_bytes": contents.file_bytes, "whole_bytes": contents.whole_bytes,
            "holders": dict(plan.holders), "planned_bytes": plan.planned_bytes, "budget_bytes": plan.limit_bytes,
            "smallest_budget_bytes": plan.smallest_bytes, "ample_budget_bytes": self.ample_bytes,
            "pinned": self.pinned, "slots": plan.slots, "threads": plan.threads, "processes": plan.processes,
            "rows_per_read": plan.rows_per_read, "window_rows": plan.window_rows,
            "shuffle_quality": plan.shuffle_quality,
            "amplification": plan.amplification, "world_size": self.world_size, "epoch_read_bytes": self.read_bytes,
            "epoch_seconds": self.seconds, "others": {rival.name: rival.peak_bytes for rival in self.rivals},
            "advice": list(self.advice),
        }  # fmt: skip

    def _data(self) -> list[HolderRow]:
        contents = self.contents
        fields = [f"{name} {spec}, {format_size(spec.row_bytes)}" for name, spec in contents.fields.items()]
        rows = [("one sample", contents.sample_bytes, "; ".join(fields))]
        rows.append((f"batch of {self.plan.batch_rows:,}", self.batch_bytes, ""))
        if contents.files > 1:
            share = f"{contents.rows / contents.files:,.0f} samples in each of {contents.files:,}, on average"
            rows.append(("one file", contents.file_bytes, share))
        rows.append(("all samples", contents.whole_bytes, f"{contents.rows:,} samples{self._against_free()}"))
        return rows

    def _against_free(self) -> str:
        times = self.contents.whole_bytes / max(1, free_bytes())
        return f", {times:,.1f} times the memory that is free here" if times >= 1 else ""

    def _epoch(self) -> list[str]:
        plan = self.plan
        read = f"  reads {format_size(self.read_bytes) if self.read_bytes else 'an unknown amount'} from files"
        if self.seconds is not None:
            rate = f"{format_size(self.read_bytes / self.seconds)}/s, " if self.read_bytes and self.seconds else ""
            read += f", in {format_seconds(self.seconds)} or more ({rate}measured here just now)"
        if plan.shuffle_quality is None:
            return [read, "  in order"]
        mixed = f"in windows of {plan.window_rows:,} samples" if plan.window_rows else "over the whole set"
        return [read, f"  shuffled {mixed}, quality {plan.shuffle_quality:.2f} (1.00 is uniform)"]


def plan(
    source: Any,
    *,
    batch_size: int,
    files: int = 1,
    habits: Habits | None = None,
    measure: float = TRIAL_S,
    **options: Any,
) -> Forecast:
    """Estimate what training from ``source`` needs.

    source:      a path or several, a dataset, or shapes alone: ``{"betas": ((750, 150, 150, 100), "float32")}``
    batch_size:  samples per batch
    files:       with shapes: how many files of that shape there are
    habits:      how many workers and how large a shuffle buffer other loaders would be run with
    measure:     seconds of trial reading; 0 for none
    options:     arguments of ``Loader``: memory, threads, window, columns, device, world_size …
    """
    habits, measure = check_habits(habits), checks.number("measure", measure, expected="seconds of trial reading")
    files = checks.whole("files", files, least=1)
    if isinstance(source, Mapping):
        return _from_shapes(source, batch_size, files, habits, options)
    if not isinstance(source, Dataset):
        source = open(source) if options.get("columns") is None else open_quietly(source)
    ds: Dataset = source
    options = {"shuffle": True, "output": "numpy" if options.get("device") is None else "torch", **options}
    options = {"rank": 0, "world_size": 1, **options}
    with Loader(ds, batch_size=batch_size, **options) as loader:
        return _of_loader(ds, loader, options, habits, measure)


def _of_loader(ds: Dataset, loader: Loader, options: Mapping[str, Any], habits: Habits, measure: float) -> Forecast:
    source = runtime_of(loader).sources[ALONE]
    partition = source.partition
    chosen = [name for name in options.get("columns") or ds.fields if name in ds.fields]
    found = inspect(ds)
    paths = [path for path in found.paths if path.field in chosen]
    contents = Contents({name: ds.fields[name] for name in chosen}, len(ds), found.files)
    once = epoch_bytes(ds.delivered)
    rows_per_read = {path.field: 1 if loader.plan.window_rows else path.block_rows for path in paths}
    # Where rows of a block are read one by one, the block is read again for each of them.
    read_bytes = sum(once[name] * rows for name, rows in rows_per_read.items()) // partition.world_size
    trial, samples = try_out(loader, measure) if measure else None, _samples(partition, loader.plan)
    if trial is not None and trial.epoch_bytes is not None:
        read_bytes = trial.epoch_bytes
    elif trial is not None and not read_bytes and trial.samples:  # files of unknown length
        read_bytes = trial.bytes_read * samples // trial.samples
    seconds = trial.epoch_seconds(samples, read_bytes) if trial else None
    read_once = sum(once[path.field] for path in paths)
    whole_seconds = seconds * sum(path.stored_bytes for path in paths) / read_once if seconds and read_once else None
    stored = sum(path.stored_bytes / max(1, path.rows) for path in paths) or contents.sample_bytes
    job = LoadingJob(loader.plan.batch_rows * contents.sample_bytes, stored, len(ds))
    ample = make_plan(replace(source.request, limit_bytes=UNBOUNDED, most_threads=0)).planned_bytes
    return Forecast(
        contents, loader.plan, ample_bytes=ample, pinned=source.output.pin is not None, world_size=partition.world_size,
        read_bytes=read_bytes, seconds=seconds, rivals=rivals(job, habits),
        advice=_advice(contents, loader.plan, ample, paths, whole_seconds),
    )  # fmt: skip


def _samples(partition: Partition, made: Plan) -> int:
    """Samples of this rank in an epoch."""
    return min(partition.steps * made.batch_rows, partition.length)


def _from_shapes(shapes: Shapes, batch_size: int, files: int, habits: Habits, options: Mapping[str, Any]) -> Forecast:
    fields, rows = _checked_shapes(shapes)
    contents = Contents(fields, rows * files, files)
    known = {"memory": None, "threads": cores(), "world_size": 1}
    for name in options.keys() - known.keys():
        raise ConfigError(f"{name}: needs files to look at; from shapes alone, a plan takes {', '.join(known)}")
    asked = {**known, **options}
    limit, note = memory_limit(asked["memory"])
    is_auto = isinstance(asked["threads"], str) and asked["threads"] == "auto"
    threads = cores() if is_auto else check_threads(asked["threads"])
    partition = Partition(contents.rows, batch_size, 0, asked["world_size"])
    request = Request(
        fields=fields, batch_rows=min(batch_size, contents.rows), steps=partition.steps, threads=threads,
        limit_bytes=limit, limit_note=note, scratch_bytes=lambda rows: 0, shuffle_quality=1.0,
    )  # fmt: skip
    made, ample = make_plan(request), make_plan(replace(request, limit_bytes=UNBOUNDED)).planned_bytes
    job = LoadingJob(made.batch_rows * contents.sample_bytes, contents.sample_bytes, contents.rows)
    return Forecast(
        contents, made, ample_bytes=ample, pinned=False, world_size=partition.world_size,
        read_bytes=contents.whole_bytes // partition.world_size, seconds=None, rivals=rivals(job, habits),
        advice=_advice(contents, made, ample, [], None),
    )  # fmt: skip


def _checked_shapes(shapes: Shapes) -> tuple[Fields, int]:
    fields, lengths = {}, {}
    for name, given in shapes.items():
        shape, dtype = _checked_shape(name, given)
        try:
            kind = numpy_dtype(dtype)
        except (TypeError, ValueError):
            raise ConfigError(f"{name}: {dtype!r} is not a dtype; try float32, int16, uint8") from None
        if not shape or min(shape) < 1:
            raise ConfigError(f"{name}: shape {shape}: expected the rows first, and no axis below 1")
        fields[name], lengths[name] = FieldSpec(kind, tuple(shape[1:])), int(shape[0])
    if len(set(lengths.values())) != 1:
        raise ConfigError(
            f"shapes of one dataset must have the same first axis, its rows; got {lengths or 'no shapes'}"
        )
    if not prod(spec.row_bytes for spec in fields.values()):
        raise ConfigError("the rows have no bytes: check shapes and dtypes")
    return fields, next(iter(lengths.values()))


def _checked_shape(name: Any, given: Any) -> tuple[tuple[int, ...], Any]:
    try:
        shape, dtype = given
        if isinstance(name, str) and all(map(checks.is_whole, shape)):
            return tuple(map(int, shape)), dtype
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f"{checks.shown(name)}: {checks.shown(given)}: expected a shape and a dtype, such as ((750, 64, 64), 'float32')"
    )


def _advice(
    contents: Contents, made: Plan, ample_bytes: int, paths: Sequence[ReadPath], whole_seconds: float | None
) -> list[str]:
    """What to do, the most important first; reading every byte of the files once would take ``whole_seconds``."""
    said = list(made.advice)
    remedy = next((path.remedy for path in paths if path.remedy), "")
    if remedy and made.shuffle_quality is not None and made.shuffle_quality < GOOD_QUALITY:
        stored = sum(path.stored_bytes for path in paths)
        took = f"about {format_seconds(whole_seconds)}" if whole_seconds else "some time"
        said.append(
            f"penstock convert OLD NEW --like plan makes such a copy, once: {took} to read, and what writing "
            f"{format_size(stored)} takes"
        )
    if made.planned_bytes < ample_bytes > made.limit_bytes:
        said.append(
            f"A budget of {format_size(ample_bytes)} would let the threads read as far ahead as helps: "
            f"{made.slots_wanted} slots for batches instead of {made.slots}. The smallest budget that works is "
            f"{format_size(made.smallest_bytes)}"
        )
    if any(path.is_far for path in paths):
        said.append("Every epoch reads over the network: cache_dir= keeps local copies of the files, as many as fit")
    large = [name for name, spec in contents.fields.items() if spec.row_bytes >= LARGE_ROW_BYTES]
    if large and all(path.amplification >= 1 for path in paths):
        said.append(
            f"If you need only part of each {large[0]!r}, select_within (or --mask) reads and holds just that part"
        )
    if not made.advice:
        keep = "Keep the files as they are" if paths else "Store the rows one after another, or one per chunk"
        said.insert(0, f"{keep}: each row is read by itself, so the whole set can be shuffled")
    return said


def format_seconds(seconds: float) -> str:
    """``0.21 s``, ``14 s``, ``3.5 min``, ``2.1 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
