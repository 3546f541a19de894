"""The rank of this process among those that train together."""

import os
import sys
from typing import Any

from penstock.errors import ConfigError


def group_place(group: Any = None) -> tuple[int, int] | None:
    """Rank and number of ranks of torch's process group; None if there is no group."""
    if sys.modules.get("torch") is None:
        return None
    from penstock.loader.pytorch import rank_and_world

    return rank_and_world(group)


def launched() -> tuple[int | None, int]:
    """Rank and number of ranks as set by a launcher such as torchrun; (None, 1) without one."""
    rank, ranks = _number("RANK"), _number("WORLD_SIZE")
    if ranks is None:
        return None, 1
    if ranks < 1 or (rank is not None and not 0 <= rank < ranks):
        raise ConfigError(
            f"RANK={rank} of WORLD_SIZE={ranks} in the environment: expected a rank from 0 to {ranks - 1}"
        )
    return rank, ranks


def place_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks: the caller's, or else those of torch's process group."""
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank={rank}, world_size={world_size}: give both, or neither")
    if rank is not None and world_size is not None:
        return rank, world_size
    place = group_place()
    if place is None and launched()[1] > 1:
        raise ConfigError(
            f"the environment has WORLD_SIZE={launched()[1]}, but torch.distributed is not started: every rank would "
            f"read everything. Make the loader after torch.distributed.init_process_group(), or pass rank= and "
            f"world_size= (0 and 1 to read everything here)"
        )
    return place or (0, 1)


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else None
    except ValueError:
        raise ConfigError(f"{name}={text!r:.100} in the environment: expected a whole number") from None
