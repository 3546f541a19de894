"""Lightning: a DataModule made of datasets, and a callback that restores loaders from a checkpoint.

A ``Loader`` works in Lightning as it is: it divides samples among ranks itself, and its position is part of every
checkpoint. What is left to do here:

- Loaders must be made after Lightning has started the process group: ``DataModule`` makes them in its hooks.
- Lightning skips the saved positions if the model asks for ``trainer.estimated_stepping_batches`` (its issue 20550). It
  counts batches, and another number of ranks has other batches. With ``limit_train_batches`` it would continue in the
  middle of an epoch that it has left. ``RestoreLoaders`` puts all of that right.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.base.requirements import needs
from penstock.dataset.dataset import Dataset
from penstock.errors import StateMismatch
from penstock.loader.loader import Loader, runtime_of
from penstock.loader.multi import MultiLoader

with needs("lightning", "2.5", "lightning", "pytorch_lightning"):
    try:
        from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    except ImportError:
        from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer

SAVED = "penstock_loaders"
"""The entry of a checkpoint that holds the positions of the training loaders."""

Datasets = Dataset | Mapping[str, Dataset]


class DataModule(LightningDataModule):
    """Loaders for ``trainer.fit``, ``validate``, ``test`` and ``predict``, made of datasets.

    train, val, test, predict:  a dataset each; several, by name, come as a dict of batches
    shuffle:                    whether training data are shuffled; the others, and ``overfit_batches``, come in order
    options:                    arguments of ``penstock.Loader``: ``batch_size``, ``memory``, ``columns``, ``seed`` …;
                                each loader has a memory budget of its own. The rank follows from the trainer's strategy
    """

    def __init__(
        self,
        train: Datasets | None = None,
        val: Datasets | None = None,
        test: Datasets | None = None,
        predict: Datasets | None = None,
        *,
        shuffle: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self._datasets = {"train": train, "val": val, "test": test, "predict": predict}
        self._shuffle, self._options = shuffle, options

    def train_dataloader(self) -> Any:
        loaders = self._loaders("train", shuffle=self._shuffle and not self._same_batches)
        epoch = 0 if self.trainer is None else self.trainer.current_epoch
        for loader in _flat(loaders):  # Lightning may ask for new ones in any epoch
            loader.set_epoch(epoch)
        return loaders

    def val_dataloader(self) -> Any:
        return self._loaders("val", shuffle=False)

    def test_dataloader(self) -> Any:
        return self._loaders("test", shuffle=False)

    def predict_dataloader(self) -> Any:
        return self._loaders("predict", shuffle=False)

    @property
    def _same_batches(self) -> bool:
        """Whether Lightning wants the same few batches in each epoch."""
        return self.trainer is not None and bool(self.trainer.overfit_batches)

    def _loaders(self, stage: str, *, shuffle: bool) -> Any:
        datasets = self._datasets[stage]
        if datasets is None:
            return []
        options = {"shuffle": shuffle, **self._place(), **self._options}
        if isinstance(datasets, Dataset):
            return Loader(datasets, **options)
        return {name: Loader(ds, **options) for name, ds in datasets.items()}

    def _place(self) -> dict[str, Any]:
        """The share of this process by the trainer's strategy: ranks that split one model get the same batches."""
        if self.trainer is None or not {"rank", "world_size", "mesh"}.isdisjoint(self._options):
            return {}
        place = self.trainer.distributed_sampler_kwargs
        return {"rank": place["rank"], "world_size": place["num_replicas"]} if place else {}


class RestoreLoaders(Callback):
    """Saves the positions of the training loaders in each checkpoint, and restores them when training resumes."""

    def __init__(self) -> None:
        self._saved: list[dict[str, Any]] | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        is_over = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        checkpoint[SAVED] = [
            {"state": _next_epoch(loader.state_dict()) if is_over else loader.state_dict(), "steps": len(loader)}
            for loader in _loaders_of(trainer)
        ]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(SAVED)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        loaders = list(_loaders_of(trainer))
        if len(loaders) != len(saved):
            raise StateMismatch(
                f"the checkpoint holds positions of {len(saved)} training loaders, and there are {len(loaders)}: train "
                f"with the same datasets, or without RestoreLoaders"
            )
        for loader, each in zip(loaders, saved, strict=True):
            loader.load_state_dict(each["state"])
        if [each["steps"] for each in saved] != [len(loader) for loader in loaders]:
            _count_batches_anew(trainer, loaders)


def _next_epoch(state: dict[str, Any]) -> dict[str, Any]:
    """The position that the next epoch begins with, where Lightning leaves one before its end."""
    samples = state["samples"]
    done = samples.values() if isinstance(samples, Mapping) else [samples]
    if not any(done):
        return state
    none = dict.fromkeys(samples, 0) if isinstance(samples, Mapping) else 0
    return {**state, "epoch": state["epoch"] + 1, "samples": none}


def _count_batches_anew(trainer: Trainer, loaders: list[Loader | MultiLoader]) -> None:
    """Tell Lightning how many batches of the epoch are behind it, where they have another size or number of ranks."""
    if len(loaders) > 1:
        raise StateMismatch(
            "the checkpoint was saved with another batch size or number of ranks, and there are several training "
            "loaders: Lightning cannot continue in the middle of their epoch. Resume with the same ones"
        )
    current, (loader,) = trainer.fit_loop.epoch_loop.batch_progress.current, loaders
    moved = len(loader) - runtime_of(loader).steps_ahead - current.processed
    for count in ("ready", "started", "processed", "completed"):
        setattr(current, count, getattr(current, count) + moved)


def _flat(loaders: Any) -> list[Loader]:
    return list(loaders.values()) if isinstance(loaders, dict) else [loaders] if isinstance(loaders, Loader) else []


def _loaders_of(trainer: Trainer) -> Iterator[Loader | MultiLoader]:
    combined = trainer.fit_loop._combined_loader  # public only as the collection that the user gave, in any nesting
    for loader in () if combined is None else combined.flattened:
        if isinstance(loader, Loader | MultiLoader):
            yield loader
