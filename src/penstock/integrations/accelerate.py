"""Accelerate, and the Hugging Face Trainer, which is built on it.

    train = accelerator.prepare(for_accelerate(loader))

``Accelerator.prepare`` only understands torch's ``DataLoader``. ``for_accelerate`` returns one that takes its batches
from a penstock loader: batches arrive on the accelerator's device, the last batch of an epoch is known to be the last
(so that gradients accumulated so far are applied), ``save_state`` and ``load_state`` keep the position, and
``skip_first_batches`` begins at the wanted batch without reading those before it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.loader.deal import Deal
from penstock.loader.loader import Loader, feed_of
from penstock.loader.plan_text import ALONE

try:
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState, PartialState
    from accelerate.utils import send_to_device
    from torch.utils.data import DataLoader, Dataset
except ImportError:
    raise ConfigError('penstock.integrations.accelerate needs Accelerate: pip install "penstock[accelerate]"') from None


def for_accelerate(loader: Loader) -> "AccelerateLoader":
    """Wrap a loader for ``Accelerator.prepare`` and the Trainer; make it after the ``Accelerator``."""
    if not isinstance(loader, Loader):
        raise ConfigError(f"for_accelerate({type(loader).__name__}): expected a penstock.Loader")
    return AccelerateLoader(loader)


def deal_of(loader: Loader) -> Deal:
    """How samples are dealt to batches and ranks."""
    return feed_of(loader).sources[ALONE].deal


class Batches(Dataset):
    """The batches of the current epoch by their numbers. The first one asked for decides where reading begins."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.total_dataset_length = deal_of(loader).length
        self._iterator: Iterator[Any] = iter(())
        self._next: int | None = None

    def __len__(self) -> int:
        """Samples, not batches, as for any dataset."""
        return self.total_dataset_length

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        return [self._batch(number) for number in numbers]

    def _batch(self, number: int) -> Any:
        if number != self._next:
            samples = min(number * deal_of(self.loader).step_samples, len(self))
            self._seek({**self.loader.state_dict(), "samples": samples})
            self._iterator = iter(self.loader)
        self._next = number + 1
        return next(self._iterator)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next loop; a position inside it stays."""
        self.loader.set_epoch(epoch)
        self._next = None

    def _seek(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self._next = None


class Numbers:
    """Numbers of batches, one per batch: what ``skip_first_batches`` skips."""

    def __init__(self, batches: Batches) -> None:
        loader = batches.loader
        self.batch_size, self.drop_last, self._steps = loader.batch_size, loader.drop_last, len(loader)
        self.set_epoch = batches.set_epoch  # the Trainer looks for it here

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] for number in range(self._steps))

    def __len__(self) -> int:
        return self._steps


def take_one(batches: list[Any]) -> Any:
    """Batches come whole: there is nothing to collate."""
    return batches[0]


class AccelerateLoader(DataLoaderStateMixin, DataLoader):  # type: ignore[misc]
    """torch's ``DataLoader`` over the batches of a penstock loader, as Accelerate wants one that it has prepared."""

    _is_accelerate_prepared = True  # devices and ranks are seen to here
    use_stateful_dataloader = True  # save_state asks for state_dict

    def __init__(self, loader: Loader) -> None:
        batches = Batches(loader)
        super().__init__(batches, batch_sampler=Numbers(batches), collate_fn=take_one)
        self.loader, self._batches = loader, batches
        self.gradient_state = GradientState()
        self.total_batch_size = deal_of(loader).step_samples
        self.total_dataset_length = len(batches)
        self._drop_last = loader.drop_last

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.begin()
        try:
            done = -(-self.loader.state_dict()["samples"] // self.total_batch_size)
            for number, batch in enumerate(self.loader, done + 1):
                self.end_of_dataloader = number == len(self)
                yield send_to_device(batch, PartialState().device)
        finally:
            self.end()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next loop; a position inside it stays."""
        self._batches.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        self.loader.load_state_dict(state)
