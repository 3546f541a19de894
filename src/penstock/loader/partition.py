"""An epoch divided among ranks: which positions of the global order make up which batch of which rank.

A global step takes ``world_size * batch_size`` consecutive positions and divides them in rank order. The rest at the
end is split as evenly as possible, so every rank takes the same number of steps and every sample comes exactly once.
If fewer samples remain than there are ranks, ``tail="pad"`` repeats samples of that last step so that each rank has
one, and ``tail="drop"`` leaves them out. With ``tail="fill"`` the last step is whole too: its samples are repeated
until all batches of all ranks have one size. What ranks gather from each other then begins with every sample once, in
order: Accelerate's ``gather_for_metrics`` cuts off the repeated ones.

Pure arithmetic: nothing here depends on how many rows there are.
"""

from functools import cached_property
from typing import Literal, get_args

import numpy as np

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.errors import ConfigError

Tail = Literal["pad", "drop", "fill"]


@dataclass(frozen=True)
class Partition:
    """One rank's share of an epoch of ``length`` positions, from position ``start`` on."""

    length: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    tail: Tail = "pad"
    start: int = 0

    def __post_init__(self) -> None:
        wanted = "a whole number of samples"
        plain = {
            "batch_size": checks.whole("batch_size", self.batch_size, least=1, expected=wanted),
            "rank": checks.whole("rank", self.rank),
            "world_size": checks.whole("world_size", self.world_size, least=1),
            "drop_last": checks.flag("drop_last", self.drop_last),
            "tail": checks.one_of("tail", self.tail, get_args(Tail)),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if self.rank >= self.world_size:
            raise ConfigError(
                f"rank={self.rank} of world_size={self.world_size}: expected a rank from 0 to world_size - 1"
            )

    @cached_property
    def step_samples(self) -> int:
        """Samples in one full step of all ranks together."""
        return self.batch_size * self.world_size

    @cached_property
    def steps(self) -> int:
        """Steps from ``start`` to the end, the same on every rank."""
        full, rest = divmod(max(0, self.length - self.start), self.step_samples)
        if rest == 0 or self.drop_last or (rest < self.world_size and self.tail == "drop"):
            return full
        return full + 1

    def position_after(self, steps: int) -> int:
        """The global position after ``steps`` steps from ``start``."""
        return min(self.length, self.start + steps * self.step_samples) if steps < self.steps else self.length

    def batch_rows(self, step: int) -> int:
        """Samples this rank gets in a step."""
        return len(self._span(step))

    def positions(self, first_step: int, last_step: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of this rank in steps ``first_step`` up to ``last_step``, and where each step begins among them.

        The second array has one entry more than there are steps.
        """
        if self.start + last_step * self.step_samples <= self.length:  # all steps are whole
            begins = self.start + self.rank * self.batch_size + np.arange(first_step, last_step) * self.step_samples
            found = (begins[:, None] + np.arange(self.batch_size)).reshape(-1)
            return found, np.arange(last_step - first_step + 1) * self.batch_size
        spans = [self._span(step) for step in range(first_step, last_step)]
        bounds = np.cumsum([0, *(len(span) for span in spans)])
        begins = np.array([span.start for span in spans], np.int64)
        sizes = np.diff(bounds)
        found = np.repeat(begins - bounds[:-1], sizes) + np.arange(bounds[-1])
        if spans and spans[-1].stop > self.length:
            self._repeat(found[bounds[-2] :], last_step - 1)
        return found, bounds

    def _repeat(self, positions: np.ndarray, step: int) -> None:
        """Replace positions beyond the end by those of samples of the same step, which come again in turn."""
        begin = self.start + step * self.step_samples
        positions -= begin
        positions %= self.length - begin
        positions += begin

    def _span(self, step: int) -> range:
        """The positions of this rank in a step; those beyond the end stand for samples that are repeated."""
        begin = self.start + step * self.step_samples
        rest = self.length - begin
        if rest >= self.step_samples or self.tail == "fill":
            size = min(self.batch_size, self.length)
            return range(begin + self.rank * size, begin + (self.rank + 1) * size)
        each, more = divmod(rest, self.world_size)
        if each == 0:
            return range(begin + self.rank, begin + self.rank + 1)
        at = begin + self.rank * each + min(self.rank, more)
        return range(at, at + each + (self.rank < more))
