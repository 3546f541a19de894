"""What training from a dataset will take, told before it starts: memory, bytes, time, and what could be better.

From files, it is a loader that is made and not used, but for a moment in which its threads read, to see how fast they
are. From shapes alone, it is arithmetic over rows that lie one after another.
Sizes are decimal here (1 MB is 1,000,000 bytes), as shapes are multiplied in the head and disks are sold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from penstock.dataset import Dataset
from penstock.deal import Deal
from penstock.errors import ConfigError
from penstock.inspection import GOOD_QUALITY, inspect
from penstock.loader import Loader
from penstock.machine import cores, free_bytes
from penstock.opening import open
from penstock.planning import Plan, Request, make_plan
from penstock.request import memory_limit
from penstock.rivals import Habits, Job, Rival, rivals
from penstock.sizes import format_decimal
from penstock.spec import Fields, FieldSpec, ReadPath, row_bytes
from penstock.trial import try_out

Shapes = Mapping[str, tuple[Sequence[int], Any]]
"""Arrays that need not exist: ``{"betas": ((750, 150, 150, 100), "float32")}``, rows first."""

# How long reading is tried.
TRIAL_S = 0.35

# Rows this large are worth the question whether all of each is needed.
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


@dataclass(frozen=True)
class Forecast:
    """``print(penstock.plan(path, batch_size=32))``."""

    contents: Contents
    plan: Plan
    """What the loader will hold, to the byte."""
    ample_bytes: int
    """The budget beyond which more memory would not help."""
    pinned: bool
    world_size: int
    read_bytes: int
    """From files in an epoch, on this rank; 0 where there are none, or where nobody knows how long they are."""
    seconds: float | None
    """What an epoch takes at least, by a short measurement; None where nothing was measured."""
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
        why = "a quarter of what is free" if self.plan.limit_note else ""
        held = [*self._held(), ("planned", self.peak_bytes, ""), ("budget", self.plan.limit_bytes, why)]
        others = [(rival.name, rival.peak_bytes, rival.told) for rival in self.rivals]
        parts = [
            ("In memory, the data would be", _table(self._data())),
            ("penstock would hold", _table(held)),
            ("Others would hold, for the same job", _table(others)),
            ("An epoch" if self.world_size == 1 else f"An epoch, on each of {self.world_size} ranks", self._epoch()),
            ("Advice", [f"- {said}." for said in self.advice]),
        ]
        return "\n\n".join("\n".join([f"{title}:", *lines]) for title, lines in parts)

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, sizes in bytes."""
        contents, plan = self.contents, self.plan
        return {
            "rows": contents.rows, "files": contents.files, "sample_bytes": contents.sample_bytes,
            "batch_bytes": self.batch_bytes, "file_bytes": contents.file_bytes, "whole_bytes": contents.whole_bytes,
            "holders": dict(plan.holders), "planned_bytes": plan.planned_bytes, "budget_bytes": plan.limit_bytes,
            "smallest_budget_bytes": plan.smallest_bytes, "ample_budget_bytes": self.ample_bytes,
            "pinned": self.pinned, "slots": plan.slots, "threads": plan.threads, "rows_per_read": plan.rows_per_read,
            "window_rows": plan.window_rows, "shuffle_quality": plan.shuffle_quality,
            "amplification": plan.amplification, "world_size": self.world_size, "epoch_read_bytes": self.read_bytes,
            "epoch_seconds": self.seconds, "others": {rival.name: rival.peak_bytes for rival in self.rivals},
            "advice": list(self.advice),
        }  # fmt: skip

    def _data(self) -> list[tuple[str, int, str]]:
        contents = self.contents
        fields = [f"{name} {spec}, {format_decimal(spec.row_bytes)}" for name, spec in contents.fields.items()]
        rows = [("a sample", contents.sample_bytes, "; ".join(fields))]
        rows.append((f"a batch of {self.plan.batch_rows:,}", self.batch_bytes, ""))
        if contents.files > 1:
            share = f"{contents.rows / contents.files:,.0f} samples in each of {contents.files:,}, on average"
            rows.append(("a file", contents.file_bytes, share))
        rows.append(("all of it", contents.whole_bytes, f"{contents.rows:,} samples{self._against_free()}"))
        return rows

    def _against_free(self) -> str:
        times = self.contents.whole_bytes / max(1, free_bytes())
        return f", {times:,.1f} times what is free here" if times >= 1 else ""

    def _held(self) -> list[tuple[str, int, str]]:
        plan, told = self.plan, {"index": "where everything lies", "base": "libraries, queues, tables"}
        each = f"{plan.slots} slots of {format_decimal(plan.batch_bytes)}"
        window = f", of which a window fills {plan.window_batches}" if plan.window_rows else ""
        told["batches"] = each + window + (", pinned" if self.pinned else "")
        told["reading"] = f"scratch of {plan.threads} thread{'' if plan.threads == 1 else 's'}"
        told["spare"] = f"that of up to {plan.spare_threads} more, should files be slow"
        return [(holder, bytes_, told.get(holder, "")) for holder, bytes_ in plan.holders.items()]

    def _epoch(self) -> list[str]:
        plan = self.plan
        read = f"  reads {format_decimal(self.read_bytes) if self.read_bytes else 'an unknown amount'} from files"
        if self.seconds is not None:
            rate = f"{format_decimal(self.read_bytes / self.seconds)}/s, " if self.read_bytes and self.seconds else ""
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
    """What training from ``source`` will take.

    source:      a path or several, a dataset, or shapes alone: ``{"betas": ((750, 150, 150, 100), "float32")}``
    batch_size:  samples a batch
    files:       with shapes: how many files of that shape there are
    habits:      how many workers and how large a shuffle buffer other loaders would be run with
    measure:     seconds for which reading is tried; 0 leaves it out
    options:     as ``Loader`` takes them: memory, threads, window, columns, device, world_size …
    """
    habits = habits or Habits()
    if isinstance(source, Mapping):
        return _from_shapes(source, batch_size, files, habits, options)
    ds = source if isinstance(source, Dataset) else open(source)
    options = {"shuffle": True, "output": "numpy" if options.get("device") is None else "torch", **options}
    if "world_size" in options:
        options.setdefault("rank", 0)
    with Loader(ds, batch_size=batch_size, **options) as loader:
        return _of_loader(ds, loader, options, habits, measure)


def _of_loader(ds: Dataset, loader: Loader, options: Mapping[str, Any], habits: Habits, measure: float) -> Forecast:
    chosen = [name for name in options.get("columns") or ds.fields if name in ds.fields]
    found = inspect(ds)
    paths = [path for path in found.paths if path.field in chosen]
    contents = Contents({name: ds.fields[name] for name in chosen}, len(ds), found.files)
    read_bytes = _epoch_bytes(paths, in_blocks=loader.plan.window_rows > 0) // loader.deal.world_size
    trial, samples = try_out(loader, measure) if measure else None, _samples(loader)
    if trial is not None and trial.epoch_bytes is not None:
        read_bytes = trial.epoch_bytes
    elif trial is not None and not read_bytes and trial.samples:  # files of which nobody knows how long they are
        read_bytes = trial.bytes_read * samples // trial.samples
    seconds = trial.epoch_seconds(samples, read_bytes) if trial else None
    stored = sum(path.stored_bytes / max(1, path.rows) for path in paths) or contents.sample_bytes
    job = Job(loader.plan.batch_rows * contents.sample_bytes, stored, len(ds))
    ample = make_plan(replace(loader.request, limit_bytes=UNBOUNDED, most_threads=0)).planned_bytes
    return Forecast(
        contents, loader.plan, ample, loader.is_pinned, loader.deal.world_size, read_bytes, seconds,
        rivals(job, habits), _advice(contents, loader.plan, ample, paths, seconds),
    )  # fmt: skip


def _samples(loader: Loader) -> int:
    """What comes to this rank in an epoch."""
    return min(loader.deal.steps * loader.plan.batch_rows, loader.deal.length)


def _epoch_bytes(paths: Sequence[ReadPath], *, in_blocks: bool) -> int:
    """Each block once; or where rows of blocks are read one by one, each block again for every row of it."""
    return sum(path.epoch_bytes if in_blocks else path.epoch_bytes * path.block_rows for path in paths)


def _from_shapes(shapes: Shapes, batch_size: int, files: int, habits: Habits, options: Mapping[str, Any]) -> Forecast:
    fields, rows = _checked_shapes(shapes)
    contents = Contents(fields, rows * files, files)
    known = {"memory": None, "threads": cores(), "world_size": 1}
    for name in options.keys() - known.keys():
        raise ConfigError(f"{name}: needs files to look at; from shapes alone, a plan takes {', '.join(known)}")
    asked = {**known, **options}
    limit, note = memory_limit(asked["memory"])
    deal = Deal(contents.rows, batch_size, 0, asked["world_size"])
    request = Request(
        fields, min(batch_size, contents.rows), deal.steps, asked["threads"], limit, lambda rows: 0,
        limit_note=note, shuffle_quality=1.0,
    )  # fmt: skip
    made, ample = make_plan(request), make_plan(replace(request, limit_bytes=UNBOUNDED)).planned_bytes
    job = Job(made.batch_rows * contents.sample_bytes, contents.sample_bytes, contents.rows)
    return Forecast(
        contents, made, ample, False, deal.world_size, contents.whole_bytes // deal.world_size, None,
        rivals(job, habits), _advice(contents, made, ample, [], None),
    )  # fmt: skip


def _checked_shapes(shapes: Shapes) -> tuple[Fields, int]:
    fields, lengths = {}, {}
    for name, (shape, dtype) in shapes.items():
        try:
            kind = np.dtype(dtype)
        except TypeError:
            raise ConfigError(f"{name}: {dtype!r} is no dtype; try float32, int16, uint8") from None
        if not shape or min(shape) < 1:
            raise ConfigError(f"{name}: shape {tuple(shape)}: expected the rows first, and no axis below 1")
        fields[name], lengths[name] = FieldSpec(kind, tuple(shape[1:])), int(shape[0])
    if len(set(lengths.values())) != 1:
        raise ConfigError(
            f"shapes of one dataset must have the same first axis, its rows; got {lengths or 'no shapes'}"
        )
    if not prod(spec.row_bytes for spec in fields.values()):
        raise ConfigError("a dtype of no bytes holds no data")
    return fields, next(iter(lengths.values()))


def _advice(
    contents: Contents, made: Plan, ample_bytes: int, paths: Sequence[ReadPath], seconds: float | None
) -> list[str]:
    """What to do, in plain words, what matters most first."""
    said = list(made.advice)
    remedy = next((path.remedy for path in paths if path.remedy), "")
    if remedy and made.shuffle_quality is not None and made.shuffle_quality < GOOD_QUALITY:
        stored, read = sum(path.stored_bytes for path in paths), sum(path.epoch_bytes for path in paths)
        took = f"about {format_seconds(seconds * stored / read)}" if seconds and read else "some time"
        said.append(f"Rewriting takes {took} to read, and what writing {format_decimal(stored)} takes; once")
    if made.planned_bytes < ample_bytes > made.limit_bytes:
        said.append(
            f"A budget of {format_decimal(ample_bytes)} would let reading run as far ahead as helps: here it has "
            f"{made.slots} of {made.slots_wanted} slots. {format_decimal(made.smallest_bytes)} is the least that works"
        )
    if any(path.far for path in paths):
        said.append("Every epoch reads over the network: cache_dir= keeps what fits on a local disk after the first")
    large = [name for name, spec in contents.fields.items() if spec.row_bytes >= LARGE_ROW_BYTES]
    if large and all(path.amplification >= 1 for path in paths):
        said.append(
            f"If you need part of each {large[0]!r} only, select_within (or --mask) reads and holds that part alone"
        )
    if not made.advice:
        keep = "Keep the files as they are" if paths else "Store the rows one after another, or one a chunk"
        said.insert(0, f"{keep}: each row is read by itself, so a shuffle may be over the whole set")
    return said


def _table(rows: Sequence[tuple[str, int, str]]) -> list[str]:
    wide = max((len(name) for name, _, _ in rows), default=0)
    return [f"  {name:<{wide}}  {format_decimal(bytes_):>9}  {told}".rstrip() for name, bytes_, told in rows]


def format_seconds(seconds: float) -> str:
    """``0.21 s``, ``14 s``, ``3.5 min``, ``2.1 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
