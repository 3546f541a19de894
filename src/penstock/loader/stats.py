"""Where the time of an epoch went, measured while a loader runs and summed up in one sentence."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import overload

from penstock.base import html
from penstock.base.dataclass import dataclass
from penstock.base.machine import anonymous_and_shared_bytes
from penstock.base.sizes import MiB, format_count, format_size

# How often memory is measured, which takes some 20 microseconds.
MEMORY_EVERY_S = 0.02

# If the training step waits less than this, a faster loader gains nothing.
NEGLIGIBLE_WAIT = 0.05

# Threads that are busy for more than this share of the time limit the rate.
BUSY = 0.7

# With fewer, threads also wait for the training step's core.
MANY_CORES = 4

# About what a core copies out of the page cache.
COPIED_BYTES_PER_S = 4e9

# The most samples that are listed as left out; all are counted.
LISTED = 1000


@dataclass(frozen=True)
class LeftOut:
    """A sample that could not be read."""

    row: int
    """Its row in the dataset."""
    url: str
    key: str
    why: str

    def __str__(self) -> str:
        return f"row {self.row} ({self.key}): {self.why}"


def _describe_restarts(count: int) -> str:
    return f"reader processes died {count} times and were started again; their reads were repeated"


def _describe_filled(chunks: int) -> str:
    return f"{chunks:,} chunks that were never written came as fill values"


@dataclass(frozen=True, repr=False)
class Report(Sequence[LeftOut]):
    """What an epoch did not deliver as it should: a sequence of the samples that were left out, and counts.

    Prints one line for each.
    """

    left_out: Sequence[LeftOut]
    samples: int
    """How many were left out; the first 1,000 are listed."""
    files: Sequence[str]
    """Why whole files are not in the dataset."""
    chunks_filled: int
    """Chunks that were never written, delivered as the fill value."""
    not_finite: Mapping[str, int]
    """Values that are NaN or infinite, by field, where they were counted."""
    unchecked: Sequence[str]
    unverified: int
    """Values (one per field and sample) that were delivered without a checksum or manifest to check them by."""
    restarts: int = 0
    """How often a reader process died and was started again; its reads were repeated."""

    @overload
    def __getitem__(self, at: int) -> LeftOut: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[LeftOut]: ...

    def __getitem__(self, at: int | slice) -> LeftOut | Sequence[LeftOut]:
        return self.left_out[at]

    def __len__(self) -> int:
        return len(self.left_out)

    def __str__(self) -> str:
        lines = [f"left out: {sample}" for sample in self.left_out]
        if self.samples > len(self.left_out):
            lines.append(f"left out: {self.samples - len(self.left_out):,} more")
        lines += [f"file left out: {why}" for why in self.files]
        if self.chunks_filled:
            lines.append(_describe_filled(self.chunks_filled))
        lines += [f"{name!r}: {count:,} values are NaN or infinite" for name, count in self.not_finite.items()]
        if self.unverified:
            fields = ", ".join(map(repr, self.unchecked))
            lines.append(f"delivered without a checksum or manifest to check: {self.unverified:,} values of {fields}")
        if self.restarts:
            lines.append(_describe_restarts(self.restarts))
        return "\n".join(lines) or "every sample was delivered, and checked"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.paragraph(str(self))


@dataclass(frozen=True, repr=False)
class Stats:
    """What a loader did in its current or latest epoch."""

    epoch: int
    batches: int
    samples: int
    bytes: int
    seconds: float
    """From the start of the epoch to the latest batch."""
    waited_for_data: float
    """Seconds in which the training loop waited for the loader."""
    readers_busy: float
    """Seconds of reading and decoding, summed over threads."""
    readers_waited: float
    """Seconds in which reading waited for a free slot, that is, for the training loop."""
    threads: int
    """Threads that read, in all processes together."""
    short_of_slots: bool
    """Whether a larger budget would let reading run further ahead."""
    peak_bytes: int
    """The most by which this process and its readers grew since the loader was made, the training loop included."""
    planned_bytes: int
    """Bytes that the loader reserved for itself."""
    budget_bytes: int
    kept_batches: int
    """The most batches beyond the plan that the caller kept at a time."""
    bytes_read: int = 0
    """From files, gaps between wanted ranges included."""
    chunks_read: int = 0
    """Chunks read and decoded, counted each time."""
    chunks_filled: int = 0
    """Chunks that were never written, delivered as the fill value (``allow_fill=True``)."""
    not_finite: Mapping[str, int] = field(default_factory=dict)
    """Values delivered that are NaN or infinite, by field; counted with ``nan="count"``."""
    left_out: Sequence["LeftOut"] = ()
    """The first samples that could not be read and were left out (``on_error="skip"``)."""
    left_out_samples: int = 0
    """How many there were in all."""
    files_left_out: Sequence[str] = ()
    """Why whole files are not in the dataset."""
    file_seconds: float = 0.0
    """The part of the readers' busy time spent in reads from files."""
    function_seconds: float = 0.0
    """The part spent in functions of your own (``Dataset.map``, ``decoders=``)."""
    waited_for_first: float = 0.0
    """The part of the seconds waited for data before the first batch."""
    threads_wanted: int = 0
    """Threads that would read if memory allowed."""
    processes: int = 0
    """Processes that the threads are in; 0 for threads of this process."""
    restarts: int = 0
    """How often a reader process died and was started again."""
    computing_seconds: float = 0.0
    """The part of the readers' busy time that they spent on a core."""
    cores: int = 1
    """Cores that this process may use."""
    codecs: str = ""
    """The codecs that the data are stored with, if any."""
    unchecked: Sequence[str] = ()
    """Fields without checksum or manifest: a damaged byte would pass for data."""
    unverified: int = 0
    """Values (one per field and sample) that were delivered without a checksum or manifest to check them by."""

    @property
    def report(self) -> Report:
        """What was left out, filled in, or not checked."""
        return Report(
            self.left_out, self.left_out_samples, files=self.files_left_out, chunks_filled=self.chunks_filled,
            not_finite=self.not_finite, unchecked=self.unchecked, unverified=self.unverified, restarts=self.restarts,
        )  # fmt: skip

    @property
    def decoding_seconds(self) -> float:
        """The rest of the readers' busy time: decoding, converting, copying into place."""
        return max(0.0, self.readers_busy - self.file_seconds - self.function_seconds - self.lock_seconds)

    @property
    def lock_seconds(self) -> float:
        """The readers' busy time that was neither on a core nor waiting for files: for the interpreter's lock.

        Threads that outnumber the cores wait for those too, so it is known only where there are plenty. Files that are
        in memory already take as long as copying them does, which is time on a core.
        """
        if self.processes or not 1 < self.threads <= self.cores or self.cores < MANY_CORES:
            return 0.0
        waiting_for_files = max(0.0, self.file_seconds - self.bytes_read / COPIED_BYTES_PER_S)
        return max(0.0, self.readers_busy - self.computing_seconds - waiting_for_files - self.function_seconds)

    @property
    def samples_per_s_at_most(self) -> float:
        """The rate of the training loop if it never waited."""
        return self.samples / max(1e-9, self.seconds - self.waited_for_data)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Share of the time in which the training loop waited for data."""
        return min(1.0, self.waited_for_data / self.seconds) if self.seconds else 0.0

    @property
    def bottleneck(self) -> str:
        """What limits this epoch, in one sentence."""
        if not self.batches:
            return "nothing was read yet"
        waiting = self.waiting_share
        if waiting < NEGLIGIBLE_WAIT:
            return (
                f"your training step takes {1 - waiting:.0%} of the time: data were ready when it asked, and there is "
                f"nothing to gain here"
            )
        busy = min(1.0, self.readers_busy / max(1e-9, self.seconds * self.threads))
        threads = format_count(self.threads, "reading thread")
        waits = f"the training step waits {waiting:.0%} of the time for data"
        if self.threads < self.threads_wanted:
            return (
                f"{waits}: the budget of {format_size(self.budget_bytes)} leaves room for {threads} of "
                f"{self.threads_wanted}; a larger one would let all read"
            )
        if busy > BUSY:
            are = "is" if self.threads == 1 else "are"
            return f"{waits}: its {threads} {are} {busy:.0%} busy, {self._busy_with('of that')}"
        if self.short_of_slots:
            return (
                f"{waits} while its {threads} stand still {1 - busy:.0%} of it: a larger memory budget than "
                f"{format_size(self.budget_bytes)} would let them run further ahead"
            )
        first = ", most of it for the first batch" if self.waited_for_first > self.waited_for_data / 2 else ""
        if self.function_seconds > self.readers_busy / 2:
            return f"{waits}{first}: its {threads} spend {self._busy_with('of their time')}"
        if first:
            return f"{waits}{first}: once that is there, reading keeps up"
        return (
            f"{waits} although its {threads} {'is' if self.threads == 1 else 'are'} only {busy:.0%} busy: reading "
            f"keeps up on the whole, and the step asks for batches in bursts"
        )

    @property
    def in_short(self) -> str:
        """``1,204 samples/s, mem 120/256 MiB, waited 3%``."""
        memory = f"mem {max(0, self.peak_bytes) / MiB:,.0f}/{self.budget_bytes / MiB:,.0f} MiB"
        return f"{self.samples_per_s:,.0f} samples/s, {memory}, waited {self.waiting_share:.0%}"

    def _busy_with(self, of: str) -> str:
        """What takes most of the readers' time, and what would help."""
        through = f" ({self.codecs})" if self.codecs else ""
        shares = {
            self._file_help: self.file_seconds,
            f"in your own function (given to map or decoders): {self._function_help}": self.function_seconds,
            "waiting for the interpreter's lock, which threads of a process share: processes=2 or more would help": (
                self.lock_seconds
            ),
            f"decoding and converting{through}: more cores, a quicker codec or fewer fields would help": (
                self.decoding_seconds
            ),
        }
        most = max(shares, key=lambda what: shares[what])
        return f"{shares[most] / max(1e-9, self.readers_busy):.0%} {of} {most}"

    @property
    def _file_help(self) -> str:
        if self.readers_busy - self.computing_seconds > self.file_seconds / 2:
            return "waiting for files: faster storage, a local copy or fewer fields would help"
        return "copying from files that are in memory already: fewer fields or smaller stored values would help"

    @property
    def _function_help(self) -> str:
        if self.processes or self.cores < 2:
            return "only a quicker one would help"
        return "processes=2 or more would run it on several cores, and a quicker one would help"

    def __str__(self) -> str:
        title, *rows = self._rows()
        return "; ".join([": ".join(title), *(text for _, text in rows)])

    def __repr__(self) -> str:
        title, *rows = self._rows()
        return "\n".join([": ".join(title), *(f"  {name}: {text}" for name, text in rows)])

    def _repr_html_(self) -> str:
        title, *rows = self._rows()
        return html.table(title, rows)

    def _rows(self) -> list[tuple[str, str]]:
        rate = f"{self.samples_per_s:,.0f} samples/s, {format_size(self.bytes_per_s)}/s"
        reserved = f"{format_size(self.planned_bytes)} of {format_size(self.budget_bytes)} reserved"
        return [
            (f"epoch {self.epoch}", f"{self.samples:,} samples in {self.seconds:.2f} s, {rate}"),
            ("memory", f"{reserved}, the process grew by {format_size(self.peak_bytes)}"),
            ("bottleneck", self.bottleneck),
            *(("problem", text) for text in self._lost()),
        ]

    def _lost(self) -> list[str]:
        lost = []
        if self.left_out:
            lost.append(f"{self.left_out_samples:,} samples were left out, the first: {self.left_out[0]}")
        if self.files_left_out:
            lost.append(f"{len(self.files_left_out)} files were left out, the first: {self.files_left_out[0]}")
        if self.chunks_filled:
            lost.append(_describe_filled(self.chunks_filled))
        if self.restarts:
            lost.append(_describe_restarts(self.restarts))
        if self.not_finite:
            text = ", ".join(f"{count:,} of {name!r}" for name, count in self.not_finite.items())
            lost.append(f"values that are NaN or infinite: {text}")
        return lost


class Meter:
    """Counts one epoch on the caller's side."""

    COUNTERS = (
        *("batches", "samples", "bytes", "waited_for_data", "waited_for_first", "threads", "peak_bytes"),
        "left_out_samples",
    )
    """What ``Stats`` has by the same name."""

    def __init__(
        self, held_before: int, threads: int = 0, held_elsewhere: Callable[[int], int] = lambda shared_bytes: 0
    ) -> None:
        self.threads = threads
        """How many threads read now."""
        self.began = self.latest = time.perf_counter()
        self.batches = self.samples = self.bytes = 0
        self.waited_for_data = self.waited_for_first = 0.0
        self.peak_bytes = 0
        self.left_out: list[LeftOut] = []
        self.left_out_samples = 0
        self.not_finite: Counter[str] = Counter()
        self._held_before = held_before
        self._held_elsewhere = held_elsewhere
        self._next_look = 0.0

    def count(self, samples: int, bytes_: int, asked_at: float) -> None:
        """One batch was delivered now that was asked for at that time."""
        self.latest = time.perf_counter()
        waited = self.latest - asked_at
        self.batches += 1
        self.samples += samples
        self.bytes += bytes_
        self.waited_for_data += waited
        if self.batches == 1:
            self.waited_for_first = waited
        if self.latest >= self._next_look:
            self.look()

    def leave_out(self, sample: LeftOut) -> None:
        """One sample is not delivered."""
        self.left_out_samples += 1
        if len(self.left_out) < LISTED:
            self.left_out.append(sample)

    def look(self) -> None:
        """Measure the memory held now."""
        self._next_look = self.latest + MEMORY_EVERY_S
        anonymous_bytes, shared_bytes = anonymous_and_shared_bytes()
        held = anonymous_bytes + shared_bytes + self._held_elsewhere(shared_bytes)
        self.peak_bytes = max(self.peak_bytes, held - self._held_before)
