"""Lightning: a DataModule made of datasets, and a callback that restores loaders from a checkpoint.

A ``Loader`` works in Lightning as it is: it divides samples among ranks itself, and its position is part of every
checkpoint. Two things are left to do here. Loaders must be made after Lightning has started the process group, which is
what the hooks of a DataModule are for. And Lightning skips the saved positions where the model asks for
``trainer.estimated_stepping_batches`` (its issue 20550): ``RestoreLoaders`` loads them in any case.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.dataset.dataset import Dataset
from penstock.errors import ConfigError, StateMismatch
from penstock.loader.loader import Loader
from penstock.loader.multi import MultiLoader

try:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
    except ImportError:
        raise ConfigError(
            'penstock.integrations.lightning needs Lightning 2.0 or later: pip install "penstock[lightning]"'
        ) from None

SAVED = "penstock_loaders"
"""The entry of a checkpoint that holds the positions of the training loaders."""

Datasets = Dataset | Mapping[str, Dataset]


class DataModule(LightningDataModule):
    """Loaders for ``trainer.fit``, ``validate``, ``test`` and ``predict``, made of datasets.

    train, val, test, predict:  a dataset each; several, by name, come as a dict of batches
    shuffle:                    whether training data are shuffled; the others always come in order
    options:                    arguments of ``penstock.Loader``: ``batch_size``, ``memory``, ``columns``, ``seed`` …;
                                each loader has a memory budget of its own
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
        return self._loaders("train", shuffle=self._shuffle)

    def val_dataloader(self) -> Any:
        return self._loaders("val", shuffle=False)

    def test_dataloader(self) -> Any:
        return self._loaders("test", shuffle=False)

    def predict_dataloader(self) -> Any:
        return self._loaders("predict", shuffle=False)

    def _loaders(self, stage: str, *, shuffle: bool) -> Any:
        datasets = self._datasets[stage]
        if datasets is None:
            return []
        if isinstance(datasets, Dataset):
            return Loader(datasets, shuffle=shuffle, **self._options)
        return {name: Loader(ds, shuffle=shuffle, **self._options) for name, ds in datasets.items()}


class RestoreLoaders(Callback):
    """Saves the positions of the training loaders in each checkpoint, and restores them when training resumes."""

    def __init__(self) -> None:
        self._saved: list[dict[str, Any]] | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[SAVED] = [loader.state_dict() for loader in _loaders_of(trainer)]

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
        for loader, state in zip(loaders, saved, strict=True):
            loader.load_state_dict(state)


def _loaders_of(trainer: Trainer) -> Iterator[Loader | MultiLoader]:
    combined = trainer.fit_loop._combined_loader  # public only as the collection that the user gave, in any nesting
    for loader in () if combined is None else combined.flattened:
        if isinstance(loader, Loader | MultiLoader):
            yield loader
