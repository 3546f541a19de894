"""The rank of this process among those that train together.

The caller's word comes first, then torch's process group. The environment is asked only with ``rank="auto"``. Without
that, a launcher of several processes is a reason to refuse: every rank would read everything.
"""

import math
import os
import sys
from collections.abc import Iterator
from typing import Any, Literal

from penstock.base.checks import shown
from penstock.base.dataclass import dataclass
from penstock.errors import ConfigError

Place = tuple[int, int]
"""The rank of a process, and the number of ranks."""

Rank = int | Literal["auto"] | None


@dataclass(frozen=True)
class Launcher:
    """The environment variables by which a launcher gives each process its place."""

    name: str
    rank: str
    ranks: str

    def place(self) -> Place | None:
        """The place of this process; None if another program started it."""
        rank, ranks = _number(self.rank), _number(self.ranks)
        if rank is None or ranks is None:
            return None
        if not 0 <= rank < ranks:
            raise ConfigError(
                f"{self.rank}={rank} of {self.ranks}={ranks} in the environment: expected a rank from 0 to "
                f"{self.ranks} - 1"
            )
        return rank, ranks


# The innermost comes first: torchrun and mpirun are often started by Slurm, whose variables then speak of a whole node.
# Kubernetes operators for PyTorch set the variables of torchrun.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE"),
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    Launcher("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)

SLURM_TASKS = "SLURM_NTASKS"
"""Also set in a batch script, which runs once however many tasks were asked for; srun sets the variables of a step."""

KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"
"""The number of a pod of an indexed job, which does not know how many pods there are."""

# Axes of a mesh along which ranks get different samples, and those along which they work on the same ones.
DATA_AXES = {
    *("data", "data_parallel", "dp", "ddp", "fsdp", "hsdp", "batch", "replicate", "shard"),
    *("dp_replicate", "dp_shard"),
}
MODEL_AXES = {
    *("tensor", "tensor_parallel", "tp", "model", "model_parallel", "mp"),
    *("pipeline", "pipeline_parallel", "pipe", "pp"),
    *("context", "context_parallel", "cp", "sequence", "sequence_parallel", "sp"),
}


def place_of(rank: Rank, world_size: int | None, mesh: Any = None) -> Place:
    """Rank and number of ranks: the caller's, those of a mesh, of torch's process group, or of the environment."""
    if mesh is not None:
        if rank is not None or world_size is not None:
            raise ConfigError(f"mesh=… with rank={rank}, world_size={world_size}: the mesh says both; leave them out")
        return mesh_place(mesh)
    if isinstance(rank, str):
        return _auto(rank, world_size)
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f'rank={rank}, world_size={world_size}: give both, or neither; rank="auto" asks the environment'
        )
    if rank is not None and world_size is not None:
        return rank, world_size
    place = group_place()
    if place is None:
        _refuse_several()
    return place or (0, 1)


def mesh_place(mesh: Any) -> Place:
    """This process's place along the data axes of a torch ``DeviceMesh``; ranks that differ in others share samples."""
    try:
        names, shape, coordinates = mesh.mesh_dim_names, tuple(mesh.shape), mesh.get_coordinate()
    except AttributeError:
        raise ConfigError(f"mesh={shown(mesh)}: expected a torch.distributed.device_mesh.DeviceMesh") from None
    if coordinates is None:
        raise ConfigError(f"mesh={shown(mesh)}: this process is not part of it")
    axes = [0] if len(shape) == 1 else _data_axes(names, shape)
    rank = 0
    for axis in axes:
        rank = rank * shape[axis] + coordinates[axis]
    return rank, math.prod(shape[axis] for axis in axes)


def _data_axes(names: tuple[str, ...] | None, shape: tuple[int, ...]) -> list[int]:
    choose = 'pass the part of the mesh that divides the data, such as mesh=mesh["dp"]'
    if not names:
        raise ConfigError(f"mesh of shape {shape}: its axes have no names (mesh_dim_names=), so {choose}")
    for name in names:
        if name.lower() not in DATA_AXES | MODEL_AXES:
            raise ConfigError(f"mesh with axes {tuple(names)}: does {name!r} divide the data? To say so, {choose}")
    return [axis for axis, name in enumerate(names) if name.lower() in DATA_AXES]


def group_place(group: Any = None) -> Place | None:
    """Rank and number of ranks of torch's process group; None if there is no group."""
    if sys.modules.get("torch") is None:
        return None
    from penstock.loader.pytorch import rank_and_world

    return rank_and_world(group)


def launched() -> tuple[int | None, int]:
    """Rank and number of ranks in the variables of torchrun, where one may be missing; (None, 1) without them."""
    ranks = _number("WORLD_SIZE")
    if ranks is None:
        return None, 1
    place = LAUNCHERS[0].place()
    if place is None and ranks < 1:
        raise ConfigError(f"WORLD_SIZE={ranks} in the environment: expected 1 or more")
    return place or (None, ranks)


def _auto(rank: str, world_size: int | None) -> Place:
    """The place that torch's process group or a launcher gives; alone if there is neither."""
    if rank != "auto":
        raise ConfigError(f'rank={rank!r}: expected a whole number, or "auto"')
    source, place = next(_known_places(), ("no launcher", None))
    if place is None:
        place = _pod(world_size) or _alone()
    if world_size is not None and place[1] != world_size:
        raise ConfigError(f'rank="auto", world_size={world_size}: {source} has {place[1]}; leave world_size out')
    return place


def _known_places() -> Iterator[tuple[str, Place]]:
    place = group_place()
    if place is not None:
        yield "torch.distributed", place
    for launcher in LAUNCHERS:
        place = launcher.place()
        if place is not None:
            yield launcher.name, place


def _pod(world_size: int | None) -> Place | None:
    """The place of a pod of an indexed Kubernetes job."""
    index = _number(KUBERNETES_INDEX)
    if index is None:
        return None
    if world_size is None:
        raise ConfigError(
            f'rank="auto": the environment has {KUBERNETES_INDEX}={index}, but Kubernetes does not tell a pod how many '
            f"there are: pass world_size= too (the job's completions)"
        )
    return index, world_size


def _alone() -> Place:
    ranks = launched()[1]
    if ranks > 1:
        raise ConfigError(f'rank="auto": the environment has WORLD_SIZE={ranks} and no RANK: set RANK too')
    tasks = _number(SLURM_TASKS) or 1
    if tasks > 1:
        raise ConfigError(
            f'rank="auto": the job has {SLURM_TASKS}={tasks}, but srun did not start this process: start it with srun, '
            f"or pass rank=0, world_size=1 to read everything here"
        )
    return 0, 1


def _refuse_several() -> None:
    """Refuse to read everything on every rank."""
    counts = {LAUNCHERS[0].ranks: launched()[1]}
    counts |= {launcher.ranks: place[1] for launcher in LAUNCHERS if (place := launcher.place()) is not None}
    for name, ranks in counts.items():
        if ranks > 1:
            raise ConfigError(
                f"the environment has {name}={ranks}, but torch.distributed is not started: every rank would read "
                f"everything. Make the loader after torch.distributed.init_process_group(), or take the rank from the "
                f'environment with rank="auto", or pass rank= and world_size= (0 and 1 to read everything here)'
            )


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else None
    except ValueError:
        raise ConfigError(f"{name}={text!r:.100} in the environment: expected a whole number") from None
