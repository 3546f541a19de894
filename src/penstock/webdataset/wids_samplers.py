"""Orders in which to take the samples of a ``ShardListDataset``, for torch's own loader: those of ``wids``."""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from penstock.errors import ConfigError
from penstock.webdataset.run import here


def lengths_to_ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """``[2, 3]`` -> ``[(0, 2), (2, 5)]``."""
    ends = list(accumulate(lengths))
    return list(zip([0, *ends], ends, strict=False))


def iterate_ranges(
    ranges: Sequence[tuple[int, int]], rng: random.Random, indexshuffle: bool = True, shardshuffle: bool = True
) -> Iterator[int]:
    """The numbers of ranges: the ranges, and the numbers in each, in order or at random."""
    order = list(range(len(ranges)))
    if shardshuffle:
        rng.shuffle(order)
    for which in order:
        numbers = list(range(*ranges[which]))
        if indexshuffle:
            rng.shuffle(numbers)
        yield from numbers


class _Sampler:
    """Goes range by range, so that few shards are in use at a time; another order in each epoch."""

    def __init__(self, ranges: list[tuple[int, int]], seed: int, shuffle: bool, shufflefirst: bool) -> None:
        self.ranges, self.seed, self.shuffle, self.shufflefirst = ranges, seed, shuffle, shufflefirst
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch that begins next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rng = random.Random(self.seed + 1289738273 * self.epoch)  # noqa: S311
        ranges_too = self.shuffle and (self.shufflefirst or self.epoch > 0)
        yield from iterate_ranges(self.ranges, rng, indexshuffle=self.shuffle, shardshuffle=ranges_too)
        self.epoch += 1

    def __len__(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


class ShardListSampler(_Sampler):
    """The numbers of a ``ShardListDataset``, shard by shard."""

    def __init__(
        self, dataset: Any, *, lengths: Sequence[int] | None = None, seed: int = 0, shufflefirst: bool = False
    ) -> None:
        super().__init__(lengths_to_ranges(dataset.lengths if lengths is None else lengths), seed, True, shufflefirst)


ShardedSampler = ShardListSampler


class ChunkedSampler(_Sampler):
    """The numbers of any dataset, in chunks of ``chunksize``; of ``num_samples=(begin, end)`` alone."""

    def __init__(
        self,
        dataset: Any,
        *,
        dslength_per_replica: int = -1,
        num_samples: int | tuple[int, int] | None = None,
        chunksize: int = 2000,
        seed: int = 0,
        shuffle: bool = True,
        shufflefirst: bool = False,
    ) -> None:
        whole = len(dataset) if num_samples is None else num_samples
        begin, end = (0, whole) if isinstance(whole, int) else whole
        chunks = [(first, min(first + chunksize, end)) for first in range(begin, end, chunksize)]
        super().__init__(chunks, seed, shuffle, shufflefirst)
        self.dslength_per_replica = dslength_per_replica if dslength_per_replica > 0 else end - begin

    def __len__(self) -> int:
        return self.dslength_per_replica


def DistributedChunkedSampler(  # noqa: N802
    dataset: Any,
    *,
    num_replicas: int | None = None,
    num_samples: int | None = None,
    rank: int | None = None,
    drop_last: bool | None = None,
    chunksize: int = 1000000,
    **how: Any,
) -> ChunkedSampler:
    """A ``ChunkedSampler`` over this rank's part of the numbers."""
    place = here()
    ranks, rank = num_replicas or place.ranks, place.rank if rank is None else rank
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank={rank}: expected 0 to {ranks - 1}")
    whole = num_samples or len(dataset)
    part = -(-whole // ranks)
    mine = (rank * part, min((rank + 1) * part, whole))
    length = math.ceil(len(dataset) / ranks)
    return ChunkedSampler(dataset, dslength_per_replica=length, num_samples=mine, chunksize=chunksize, **how)
