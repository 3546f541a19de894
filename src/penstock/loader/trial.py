"""How fast this disk and these codecs are: a loader's own threads read for a moment, and the batches are dropped.

The first batches go into fresh memory, which makes them slower, in a virtual machine up to ten times. So the rate is
measured once all slots were filled, or where that takes too long, in the second half; the time before is added as it
was.
"""

import time
from collections.abc import Sequence

from penstock.base.dataclass import dataclass
from penstock.loader.loader import Loader, runtime_of
from penstock.loader.plan_text import ALONE
from penstock.loader.state import Position

LOOK_EVERY_S = 0.02

Look = tuple[float, int, int]
"""Seconds since the start, and the samples and bytes read by then."""

# A trial may end this early if the rate has settled: its third and last quarters agree within this share, and in its
# second half at least this many looks found something new.
EARLY_S = 0.25
ALIKE = 0.1
ENOUGH = 5

# A trial may take this many times longer if all slots will then have been filled once, and continues for so long after
# that.
PATIENCE = 6
AFTER_FRESH_S = 0.25

# If nothing came within the given time (a slow network, large chunks), wait at most this long for something.
WAIT_AT_MOST_S = 5.0


@dataclass(frozen=True)
class Trial:
    """What was read in how many seconds, once the rate had settled."""

    seconds: float
    samples: int
    """Samples read, whether their batches are complete or not."""
    bytes_read: int
    before: Look = (0.0, 0, 0)
    """What was read before."""
    epoch_bytes: int | None = None
    """Bytes that the whole epoch read, if the time was enough for it."""

    def epoch_seconds(self, samples: int, bytes_read: int) -> float | None:
        """Seconds for an epoch of this many samples, or bytes of files; None if nothing came."""
        seconds, samples_before, bytes_before = self.before
        if self.epoch_bytes is not None:
            return seconds + self.seconds
        if self.bytes_read and bytes_read:
            return seconds + max(0, bytes_read - bytes_before) * self.seconds / self.bytes_read
        return seconds + max(0, samples - samples_before) * self.seconds / self.samples if self.samples else None


def try_out(loader: Loader, seconds: float) -> Trial:
    """Read for about ``seconds`` with a loader that is used for nothing else; less if the rate settles early."""
    runtime = runtime_of(loader)
    team = runtime.make_team()
    runtime.start_processes(WAIT_AT_MOST_S)
    steps = runtime.begin(Position(0, {ALONE: 0}), team)
    stream = steps.streams[ALONE]
    began = time.perf_counter()
    team.start()
    looks: list[Look] = [(0.0, 0, 0)]
    fresh = loader.plan.slots * loader.plan.batch_rows
    try:
        while stream.steps_left:
            stream.pass_over(LOOK_EVERY_S)
            counts = stream.readers.counts
            looks.append((time.perf_counter() - began, int(counts.rows), counts.tally.bytes_read))
            if is_over(looks, fresh, seconds):
                break
        whole = not stream.steps_left
    finally:
        steps.end("the trial is over")
    return _summed_up(looks, fresh, looks[-1][2] if whole else None)


def is_over(looks: Sequence[Look], fresh: int, seconds: float) -> bool:
    """Whether the rate of reading into used memory has settled, or the time is up."""
    passed, samples, bytes_read = looks[-1]
    if not samples and not bytes_read:
        return passed > WAIT_AT_MOST_S
    since = _after_fresh(looks, fresh)
    if since:
        until = max(seconds, since[0][0] + AFTER_FRESH_S)
    elif samples * PATIENCE * seconds < fresh * passed:  # too much to wait for
        since, until = looks, seconds
    else:
        until = PATIENCE * seconds
    return passed > until or (passed >= EARLY_S and is_settled(since))


def _after_fresh(looks: Sequence[Look], fresh: int) -> Sequence[Look]:
    """The looks after all memory was used once."""
    first = next((number for number, look in enumerate(looks) if look[1] > fresh), len(looks))
    return looks[first:]


def is_settled(looks: Sequence[Look]) -> bool:
    """Whether the rate, of bytes or else of samples, no longer changes."""
    if not looks:
        return False
    begin, end = looks[0], looks[-1]
    of = 2 if end[2] else 1
    middle, late = (
        next(look for look in looks if look[0] - begin[0] >= share * (end[0] - begin[0])) for share in (0.5, 0.75)
    )
    third, fourth = late[of] - middle[of], end[of] - late[of]
    came = len({look[of] for look in looks if look[0] >= middle[0]}) - 1
    if not third or not fourth or came < ENOUGH:
        return False
    return abs(fourth * (late[0] - middle[0]) / (third * (end[0] - late[0])) - 1) < ALIKE


def _summed_up(looks: Sequence[Look], fresh: int, epoch_bytes: int | None) -> Trial:
    """The rate after the first samples, or else of the second half, or else of everything."""
    end = looks[-1]
    since = _after_fresh(looks, fresh) or [look for look in looks if look[0] >= end[0] / 2]
    begin = since[0]
    if 0 < end[1] == begin[1] or 0 < end[2] == begin[2]:
        begin = looks[0]
    return Trial(end[0] - begin[0], end[1] - begin[1], end[2] - begin[2], begin, epoch_bytes)
