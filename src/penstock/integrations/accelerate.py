"""Accelerate, and the Hugging Face Trainer, which is built on it.

    train = accelerator.prepare(for_accelerate(loader))

``Accelerator.prepare`` only understands torch's ``DataLoader``. ``for_accelerate`` returns one that takes its batches
from a penstock loader: batches arrive on the accelerator's device, the last batch of an epoch is known to be the last
(so that gradients accumulated so far are applied), ``save_state`` and ``load_state`` keep the position, and
``skip_first_batches`` begins at the wanted batch without reading those before it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.base.requirements import needs
from penstock.errors import ConfigError
from penstock.loader.loader import Loader, runtime_of
from penstock.loader.partition import Partition
from penstock.loader.plan_text import ALONE
from penstock.loader.ranks import place_of

with needs("accelerate", "1.0", "accelerate"):
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import send_to_device
    from torch.utils.data import DataLoader, Dataset


def for_accelerate(loader: Loader) -> "AccelerateLoader":
    """Wrap a loader for ``Accelerator.prepare`` and the Trainer; make it after the ``Accelerator``.

    If results of several ranks are gathered (``gather_for_metrics``, ``Trainer.evaluate``), make the loader with
    ``tail="fill"``: ranks can only gather batches of one size.
    """
    if not isinstance(loader, Loader):
        raise ConfigError(f"for_accelerate({type(loader).__name__}): expected a penstock.Loader")
    mesh = AcceleratorState._shared_state.get("device_mesh")  # AcceleratorState() would make one
    partition = partition_of(loader)
    if mesh is not None and place_of(None, None, mesh) != (partition.rank, partition.world_size):
        raise ConfigError(
            f"for_accelerate: the loader is rank {partition.rank} of {partition.world_size}, but the Accelerator has a "
            f"mesh with axes {mesh.mesh_dim_names}: make the loader with mesh=accelerator.torch_device_mesh, so that "
            f"ranks that share a model get the same batches"
        )
    return AccelerateLoader(loader)


def partition_of(loader: Loader) -> Partition:
    """How samples are dealt to batches and ranks."""
    return runtime_of(loader).sources[ALONE].partition


class Batches(Dataset):
    """The batches of the current epoch by their numbers. The first one asked for decides where reading begins."""

    def __init__(self, owner: "AccelerateLoader", loader: Loader) -> None:
        self.total_dataset_length = partition_of(loader).length
        self._owner, self._loader = owner, loader
        self._iterator: Iterator[Any] = iter(())
        self._next: int | None = None

    def __len__(self) -> int:
        """Samples, not batches, as for any dataset."""
        return self.total_dataset_length

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        return [self._batch(number) for number in numbers]

    def _batch(self, number: int) -> Any:
        if number != self._next:
            samples = min(number * partition_of(self._loader).step_samples, len(self))
            self._loader.load_state_dict({**self._loader.state_dict(), "samples": samples})
            self._iterator = iter(self._loader)
        self._next = number + 1
        return self._owner.hand_out(next(self._iterator))

    def forget(self) -> None:
        """Find the place of the next batch anew, whichever it is."""
        self._next = None

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next loop; a loaded position inside it stays."""
        self._loader.set_epoch(epoch)
        self.forget()


class Numbers:
    """Numbers of batches, one per batch: what ``skip_first_batches`` skips."""

    def __init__(self, owner: "AccelerateLoader", batches: Batches, loader: Loader) -> None:
        self.batch_size, self.drop_last, self._steps = loader.batch_size, loader.drop_last, len(loader)
        self.set_epoch = batches.set_epoch  # the Trainer looks for it here
        self._owner, self._batches = owner, batches

    def __iter__(self) -> Iterator[list[int]]:
        self._batches.forget()
        self._owner.begin()
        try:
            for number in range(self._steps):
                yield [number]
        finally:
            self._owner.end()

    def __len__(self) -> int:
        return self._steps


def take_one(batches: list[Any]) -> Any:
    """Batches come whole: there is nothing to collate."""
    return batches[0]


class AccelerateLoader(DataLoaderStateMixin, DataLoader):  # type: ignore[misc]
    """torch's ``DataLoader`` over the batches of a penstock loader, as Accelerate wants one that it has prepared.

    ``skip_first_batches`` makes another ``DataLoader`` of ``dataset`` and ``batch_sampler``. Both report to this one,
    which Accelerate asks whether the epoch is at its end.
    """

    _is_accelerate_prepared = True  # devices and ranks are seen to here
    use_stateful_dataloader = True  # save_state asks for state_dict

    def __init__(self, loader: Loader) -> None:
        batches = Batches(self, loader)
        super().__init__(batches, batch_sampler=Numbers(self, batches, loader), collate_fn=take_one)
        self.loader, self._batches = loader, batches
        self.gradient_state = GradientState()
        self.total_batch_size = partition_of(loader).step_samples
        self.total_dataset_length = len(batches)
        self._drop_last = loader.drop_last

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.begin()
        try:
            for batch in self.loader:
                yield self.hand_out(batch)
        finally:
            self.end()

    def hand_out(self, batch: Any) -> Any:
        """A batch on the accelerator's device, after noting whether it is the last one."""
        self.end_of_dataloader = runtime_of(self.loader).at_end
        return send_to_device(batch, PartialState().device)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next loop; a loaded position inside it stays."""
        self._batches.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        self.loader.load_state_dict(state)
