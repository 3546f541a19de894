"""Where the time went: measured while a loader runs, told in one sentence."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.machine import held_bytes
from penstock.sizes import format_size

# How often memory is looked at; a look costs some 20 microseconds.
MEMORY_EVERY_S = 0.02

# Below this share of waiting there is nothing to gain from a faster loader.
NEGLIGIBLE_WAIT = 0.05


# So many samples that were left out are listed; all are counted.
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


@dataclass(frozen=True)
class Stats:
    """What a loader did in its current or latest epoch."""

    epoch: int
    batches: int
    samples: int
    bytes: int
    seconds: float
    """From the start of the epoch to the latest batch."""
    waited_for_data: float
    """Seconds in which the training loop stood still for the loader."""
    readers_busy: float
    """Seconds of reading and decoding, summed over threads."""
    readers_waited: float
    """Seconds in which reading stood still for a free slot, that is, for the training loop."""
    threads: int
    short_of_slots: bool
    """Whether a larger budget would let reading run further ahead."""
    peak_bytes: int
    """The most this process held above what it held when the loader was made, the training loop's own included."""
    planned_bytes: int
    """What the loader reserved for itself."""
    budget_bytes: int
    kept_batches: int
    """The most batches kept by the caller at once beyond those planned for."""
    bytes_read: int = 0
    """From files, gaps between wanted ranges included."""
    chunks_read: int = 0
    """Chunks read and decoded, each as often as it was."""
    chunks_filled: int = 0
    """Chunks that were never written, delivered as the fill value (``allow_fill=True``)."""
    left_out: Sequence["LeftOut"] = ()
    """The first samples that could not be read and were left out (``on_error="skip"``)."""
    left_out_samples: int = 0
    """How many there were in all."""
    files_left_out: Sequence[str] = ()
    """Why whole files are not in the dataset."""

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
        """What holds this epoch up, in one sentence."""
        if not self.batches:
            return "nothing was read yet"
        waiting = self.waiting_share
        if waiting < NEGLIGIBLE_WAIT:
            return (
                f"your training step takes {1 - waiting:.0%} of the time: data were ready when it asked, and there is "
                f"nothing to gain here"
            )
        busy = min(1.0, self.readers_busy / (self.seconds * self.threads))
        if busy > 0.7:
            return (
                f"the training step waits {waiting:.0%} of the time for reading and decoding, whose {self.threads} "
                f"threads are {busy:.0%} busy: faster storage or codec, fewer fields or more cores would help"
            )
        way_out = (
            "a larger memory budget would let them run further ahead"
            if self.short_of_slots
            else "reading keeps up on the whole, and the step asks for batches in bursts"
        )
        return (
            f"the training step waits {waiting:.0%} of the time while the {self.threads} reading threads are only "
            f"{busy:.0%} busy: {way_out}"
        )

    def __str__(self) -> str:
        lost = ""
        if self.left_out:
            lost = f"; {self.left_out_samples:,} samples were left out, the first: {self.left_out[0]}"
        if self.files_left_out:
            lost += f"; {len(self.files_left_out)} files were left out, the first: {self.files_left_out[0]}"
        if self.chunks_filled:
            lost += f"; {self.chunks_filled:,} chunks that were never written came as fill values"
        return (
            f"epoch {self.epoch}: {self.samples:,} samples in {self.seconds:.2f} s, {self.samples_per_s:,.0f} "
            f"samples/s, {format_size(self.bytes_per_s)}/s; {format_size(self.planned_bytes)} of "
            f"{format_size(self.budget_bytes)} reserved, the process grew by {format_size(self.peak_bytes)}; "
            f"{self.bottleneck}{lost}"
        )


class Meter:
    """Counts on the caller's side of one epoch."""

    def __init__(self, held_before: int) -> None:
        self.began = self.latest = time.perf_counter()
        self.batches = self.samples = self.bytes = 0
        self.waited = 0.0
        self.peak_bytes = 0
        self.left_out: list[LeftOut] = []
        self.left_out_samples = 0
        self._held_before = held_before
        self._next_look = 0.0

    def count(self, samples: int, bytes_: int, waited: float) -> None:
        """One batch was delivered after ``waited`` seconds."""
        self.latest = time.perf_counter()
        self.batches += 1
        self.samples += samples
        self.bytes += bytes_
        self.waited += waited
        if self.latest >= self._next_look:
            self.look()

    def leave_out(self, sample: LeftOut) -> None:
        """One sample is not delivered."""
        self.left_out_samples += 1
        if len(self.left_out) < LISTED:
            self.left_out.append(sample)

    def look(self) -> None:
        """Take note of the memory held now."""
        self._next_look = self.latest + MEMORY_EVERY_S
        self.peak_bytes = max(self.peak_bytes, held_bytes() - self._held_before)


def together(parts: Mapping[str, Stats], meter: Meter) -> Stats:
    """Several datasets' stats as one; the meter counted the steps in which they came."""
    each = list(parts.values())
    if meter.batches:
        meter.look()
    left_out = [
        replace(sample, key=f"{name}: {sample.key}") for name, part in parts.items() for sample in part.left_out
    ]
    return replace(
        each[0],
        batches=meter.batches,
        samples=sum(part.samples for part in each),
        bytes=sum(part.bytes for part in each),
        seconds=meter.latest - meter.began,
        waited_for_data=meter.waited,
        readers_busy=sum(part.readers_busy for part in each),
        readers_waited=max(part.readers_waited for part in each),
        peak_bytes=meter.peak_bytes,
        kept_batches=sum(part.kept_batches for part in each),
        bytes_read=sum(part.bytes_read for part in each),
        chunks_read=sum(part.chunks_read for part in each),
        chunks_filled=sum(part.chunks_filled for part in each),
        left_out=left_out[:LISTED],
        left_out_samples=sum(part.left_out_samples for part in each),
        files_left_out=[why for part in each for why in part.files_left_out],
    )
