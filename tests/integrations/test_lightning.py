"""A loader in Lightning: each row once per epoch, the same order as a plain loop, and resumes that lose nothing."""

from itertools import count

import numpy as np
import pytest

import penstock as ps

lightning = pytest.importorskip("lightning.pytorch")
torch = pytest.importorskip("torch")

from penstock.integrations.lightning import DataModule, RestoreLoaders  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice
ROWS, BATCH = 40, 4
OPTIONS = {"batch_size": BATCH, "memory": "64MiB", "threads": 1, "seed": 3}


def dataset():
    return ps.from_arrays(x=np.arange(ROWS, dtype=np.float32)[:, None], row=np.arange(ROWS))


class Model(lightning.LightningModule):
    """Notes the rows of each epoch, and stops where it is told to."""

    def __init__(self, stop_after=None, *, asks_for_steps=False):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows, self.validated, self.steps = {}, [], count(1)
        self.stop_after, self.asks_for_steps = stop_after, asks_for_steps

    def training_step(self, batch, _):
        self.rows.setdefault(self.current_epoch, []).append(batch["row"].tolist())
        return self.layer(batch["x"]).mean()

    def on_train_batch_end(self, *_):
        if next(self.steps) == self.stop_after:
            self.trainer.save_checkpoint(self.trainer.default_root_dir + "/stopped.ckpt")
            raise KeyboardInterrupt

    def validation_step(self, batch, _):
        self.validated += batch["row"].tolist()

    def configure_optimizers(self):
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), 0.01)


def trainer(folder, **options):
    options = {"max_epochs": 3, "limit_val_batches": 0} | options
    return lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder, **options,
    )  # fmt: skip


def plain(epochs=3):
    with ps.Loader(dataset(), shuffle=True, **OPTIONS) as loader:
        return {epoch: [batch["row"].tolist() for batch in loader] for epoch in range(epochs)}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_an_epoch_is_that_of_a_plain_loop(tmp_path, accumulate):
    model = Model()
    run = trainer(tmp_path, accumulate_grad_batches=accumulate)
    run.fit(model, datamodule=DataModule(train=dataset(), **OPTIONS))
    assert model.rows == plain()
    assert run.global_step == 3 * -(-ROWS // BATCH // accumulate)


@pytest.mark.parametrize("asks_for_steps", [False, True])
@pytest.mark.parametrize("stop_after", [1, 9, 10, 13])
def test_a_run_that_was_stopped_goes_on_with_the_next_batch(tmp_path, stop_after, asks_for_steps):
    first = Model(stop_after)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer(tmp_path, callbacks=[RestoreLoaders()]).fit(first, datamodule=DataModule(train=dataset(), **OPTIONS))
    second = Model(asks_for_steps=asks_for_steps)
    module = DataModule(train=dataset(), **OPTIONS)
    trainer(tmp_path, callbacks=[RestoreLoaders()]).fit(
        second, datamodule=module, ckpt_path=tmp_path / "stopped.ckpt", weights_only=False
    )
    whole = [rows for epoch in plain().values() for rows in epoch]
    done = [rows for epoch in first.rows.values() for rows in epoch]
    rest = [rows for epoch in second.rows.values() for rows in epoch]
    assert done == whole[:stop_after]
    assert rest == whole[stop_after:]
