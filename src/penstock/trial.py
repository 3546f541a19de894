"""How fast this disk and these codecs are: a loader's own threads read for a moment, and nobody waits for them.

What comes first goes into fresh memory, which costs as much again and more: in a virtual machine ten times as much, or
nothing, as the host pleases. So the rate is taken from when all slots were filled once, or where that takes too long
from the second half; what came before is counted with the time that it took.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.loader import Loader
from penstock.reader import Team

LOOK_EVERY_S = 0.02

Look = tuple[float, int, int]
"""Seconds since the start; samples and bytes read by then."""

# A trial may end so early, if the rate has settled: its third and its last quarter were alike within so much, and in
# its second half something came at so many looks at least.
EARLY_S = 0.25
ALIKE = 0.1
ENOUGH = 5

# So many times longer than asked for it may take where all slots will then have been filled once, and this is how long
# it goes on after that.
PATIENCE = 6
AFTER_FRESH_S = 0.25

# Where nothing at all came within the time given, wait for something, but not forever: a slow network, large chunks.
WAIT_AT_MOST_S = 5.0


@dataclass(frozen=True)
class Trial:
    """What was read in how long, once the rate had settled."""

    seconds: float
    samples: int
    """That were read by then, in whole batches or not."""
    bytes_read: int
    before: Look = (0.0, 0, 0)
    """What came until then."""
    epoch_bytes: int | None = None
    """What the whole epoch read, where the time was enough for it."""

    def epoch_seconds(self, samples: int, bytes_read: int) -> float | None:
        """How long an epoch of so many samples, or bytes of files, would take; None if nothing came."""
        seconds, samples_before, bytes_before = self.before
        if self.epoch_bytes is not None:
            return seconds + self.seconds
        if self.bytes_read and bytes_read:
            return seconds + max(0, bytes_read - bytes_before) * self.seconds / self.bytes_read
        return seconds + max(0, samples - samples_before) * self.seconds / self.samples if self.samples else None


def try_out(loader: Loader, seconds: float) -> Trial:
    """Read for about so long with a loader that is used for nothing else; less if the rate settles before."""
    team = Team(loader.plan.threads)
    iteration = loader.begin(0, 0, team)
    began = time.perf_counter()
    team.start()
    looks: list[Look] = [(0.0, 0, 0)]
    fresh = loader.plan.slots * loader.plan.batch_rows
    try:
        while iteration.steps_left:
            iteration.pass_over(LOOK_EVERY_S)
            looks.append((time.perf_counter() - began, iteration.rows_read, loader.stats().bytes_read))
            if is_over(looks, fresh, seconds):
                break
        whole = not iteration.steps_left
    finally:
        iteration.end("the trial is over")
    return _summed_up(looks, fresh, looks[-1][2] if whole else None)


def is_over(looks: Sequence[Look], fresh: int, seconds: float) -> bool:
    """Whether the rate has settled, of reading into memory that was used before, or the time is up."""
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
    """Those since all memory was used once."""
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
    """What came after so many samples, or else in the second half; all of it where that is nothing."""
    end = looks[-1]
    since = _after_fresh(looks, fresh) or [look for look in looks if look[0] >= end[0] / 2]
    begin = since[0]
    if 0 < end[1] == begin[1] or 0 < end[2] == begin[2]:
        begin = looks[0]
    return Trial(end[0] - begin[0], end[1] - begin[1], end[2] - begin[2], begin, epoch_bytes)
