"""Which shards, or which samples of shards, this process reads.

A splitter takes shards and gives those for this process. Where there are too few to go round, each process reads all of
them and takes every n-th sample, so that every sample comes once over all processes and nobody waits for a share that
never comes. Which samples these are depends on nothing but the list of shards: not on shuffling, nor on what epoch
another process believes it to be.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from penstock.base.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.webdataset.run import here
from penstock.webdataset.shards import Shard

SHARE = "__share__"


@dataclass(frozen=True)
class Share:
    """Every ``parts``-th sample of a shard."""

    part: int = 0
    parts: int = 1
    shift: int = 0
    """So that the first sample of each shard does not always go to the same process."""

    def has(self, sample: int) -> bool:
        """Whether a sample of the shard, by its number from 0, belongs to it."""
        return (sample + self.shift) % self.parts == self.part

    def split(self, part: int, parts: int, shift: int) -> "Share":
        """A part of this part."""
        if self.parts == 1:
            return Share(part, parts, shift)
        return Share(self.part + self.parts * part, self.parts * parts, self.shift)


WHOLE = Share()


def share_of(shard: Shard) -> Share:
    """What to read of a shard; all of it unless a splitter said otherwise."""
    found = shard.get(SHARE, WHOLE)
    assert isinstance(found, Share)
    return found


def split_by_node(shards: Iterable[Shard], group: Any = None) -> Iterator[Shard]:
    """The shards of this rank. Each rank's workers will share them, so there must be one for each worker of all."""
    place = here(group)
    few, coming = _fewer_than(place.ranks * place.workers, shards)
    if place.ranks == 1:
        return coming
    if few:
        return _every_nth_sample(coming, place.rank, place.ranks)
    return islice(coming, place.rank, None, place.ranks)


def split_by_worker(shards: Iterable[Shard]) -> Iterator[Shard]:
    """The shards of this worker of torch's loader."""
    place = here()
    few, coming = _fewer_than(place.workers, shards)
    if place.workers == 1:
        return coming
    if few:
        # Worker processes have file objects in common, and would take the bytes out of each other's hands.
        mine = (shard for shard in coming if place.worker == 0 or "stream" not in shard)
        return _every_nth_sample(mine, place.worker, place.workers)
    return islice(coming, place.worker, None, place.workers)


def _fewer_than(wanted: int, shards: Iterable[Shard]) -> tuple[bool, Iterator[Shard]]:
    """Whether there are fewer than so many, and all of them still; the list may have no end."""
    coming = iter(shards)
    first = list(islice(coming, wanted))
    return len(first) < wanted, chain(first, coming)


def _every_nth_sample(shards: Iterable[Shard], part: int, parts: int) -> Iterator[Shard]:
    for number, shard in enumerate(shards):
        if "stream" in shard:
            yield shard
        else:
            yield {**shard, SHARE: share_of(shard).split(part, parts, number)}


def single_node_only(shards: Iterable[Shard], group: Any = None) -> Iterator[Shard]:
    """All shards, in a program of one rank; with more, somebody must say how to split them."""
    place = here(group)
    if place.ranks > 1:
        raise ConfigError(
            f"rank {place.rank} of {place.ranks}: say how ranks share the shards, such as "
            f"WebDataset(…, nodesplitter=penstock.webdataset.split_by_node)"
        )
    yield from shards
