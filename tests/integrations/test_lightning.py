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
    trainer(tmp_path, callbacks=[RestoreLoaders()]).fit(second, datamodule=module, ckpt_path=tmp_path / "stopped.ckpt")
    whole = [rows for epoch in plain().values() for rows in epoch]
    done = [rows for epoch in first.rows.values() for rows in epoch]
    rest = [rows for epoch in second.rows.values() for rows in epoch]
    assert done == whole[:stop_after]
    assert rest == whole[stop_after:]


def flat(rows):
    return [batch for epoch in rows.values() for batch in epoch]


def resume(folder, model, checkpoint, module=None, **options):
    module = module or DataModule(train=dataset(), **OPTIONS)
    run = trainer(folder, callbacks=[RestoreLoaders()], **options)
    run.fit(model, datamodule=module, ckpt_path=folder / checkpoint)
    return run


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (4, 3)])
@pytest.mark.parametrize("stop_after", [2, 7])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_batches_of_another_size_after_a_restart(tmp_path, sizes, stop_after, accumulate):
    """As with another number of ranks: the epoch has other batches, and Lightning counted the old ones."""
    before, after = ({**OPTIONS, "batch_size": size} for size in sizes)
    first, second = Model(stop_after), Model()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer(tmp_path, callbacks=[RestoreLoaders()]).fit(first, datamodule=DataModule(train=dataset(), **before))
    run = resume(
        tmp_path, second, "stopped.ckpt", DataModule(train=dataset(), **after), accumulate_grad_batches=accumulate
    )
    seen = [row for model in (first, second) for batch in flat(model.rows) for row in batch]
    for epoch in range(3):
        assert sorted(seen[epoch * ROWS : (epoch + 1) * ROWS]) == list(range(ROWS))
    done = sizes[0] * (stop_after - ROWS // sizes[0] * (stop_after // (ROWS // sizes[0])))
    left = -(-(ROWS - done) // sizes[1])
    assert len(second.rows[min(second.rows)]) == left
    if accumulate == 1:
        assert run.global_step == stop_after + len(flat(second.rows))


@pytest.mark.parametrize("limit", [3, 0.5])
def test_an_epoch_that_is_cut_short_is_not_taken_up_again(tmp_path, limit):
    whole = Model()
    trainer(tmp_path, limit_train_batches=limit).fit(whole, datamodule=DataModule(train=dataset(), **OPTIONS))
    size = len(whole.rows[0])
    assert whole.rows == {epoch: batches[:size] for epoch, batches in plain().items()}
    run = trainer(tmp_path, max_epochs=1, limit_train_batches=limit, callbacks=[RestoreLoaders()])
    run.fit(Model(), datamodule=DataModule(train=dataset(), **OPTIONS))
    run.save_checkpoint(tmp_path / "epoch.ckpt")
    rest = Model()
    resume(tmp_path, rest, "epoch.ckpt", limit_train_batches=limit)
    assert rest.rows == {epoch: batches for epoch, batches in whole.rows.items() if epoch > 0}


def test_a_checkpoint_of_the_callback_after_each_epoch(tmp_path):
    keep = lightning.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, max_epochs=2, callbacks=[keep, RestoreLoaders()],
    )  # fmt: skip
    run.fit(Model(), datamodule=DataModule(train=dataset(), val=dataset(), **OPTIONS))
    rest = Model()
    resume(tmp_path, rest, "epoch=0.ckpt")
    assert flat(rest.rows) == flat(plain())[ROWS // BATCH :]


def test_the_same_batches_in_each_epoch(tmp_path):
    model = Model()
    trainer(tmp_path, overfit_batches=2).fit(model, datamodule=DataModule(train=dataset(), **OPTIONS))
    assert model.rows == {epoch: [[0, 1, 2, 3], [4, 5, 6, 7]] for epoch in range(3)}


def test_validation_after_a_sanity_check_sees_everything_once(tmp_path):
    model = Model()
    run = trainer(tmp_path, max_epochs=2, limit_val_batches=1.0, num_sanity_val_steps=2)
    run.fit(model, datamodule=DataModule(train=dataset(), val=dataset(), **OPTIONS))
    assert model.validated == [*range(8), *range(ROWS), *range(ROWS)]
    assert model.rows == plain(2)


def test_loaders_made_anew_in_each_epoch_go_on(tmp_path):
    model = Model()
    trainer(tmp_path, reload_dataloaders_every_n_epochs=1).fit(model, datamodule=DataModule(train=dataset(), **OPTIONS))
    assert model.rows == plain()


class Pairs(Model):
    """Takes batches of two loaders."""

    def training_step(self, batch, _):
        self.rows.setdefault(self.current_epoch, []).append(
            {name: each["row"].tolist() for name, each in batch.items()}
        )
        return self.layer(batch["long"]["x"]).mean()


def two(mode=None):
    datasets = {"long": dataset(), "short": dataset().select(range(12))}
    if mode is None:
        return DataModule(train=datasets, **OPTIONS)
    if mode == "MultiLoader":
        return ps.MultiLoader(datasets, mode="together", samples="longest", shuffle=True, **OPTIONS)
    loaders = {name: ps.Loader(ds, shuffle=True, **OPTIONS) for name, ds in datasets.items()}
    return lightning.utilities.CombinedLoader(loaders, mode)


@pytest.mark.parametrize("mode", [None, "min_size", "max_size_cycle", "MultiLoader"])
@pytest.mark.parametrize("stop_after", [2, 8, 13])
def test_two_loaders_go_on_together(tmp_path, mode, stop_after):
    def fit(model, **options):
        data = two(mode)
        named = {"datamodule": data} if mode is None else {"train_dataloaders": data}
        trainer(tmp_path, callbacks=[RestoreLoaders()], max_epochs=5).fit(model, **named, **options)

    whole = Pairs()
    fit(whole)
    first, rest = Pairs(stop_after), Pairs()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(first)
    fit(rest, ckpt_path=tmp_path / "stopped.ckpt")
    assert flat(whole.rows) == flat(first.rows) + flat(rest.rows)
    per_epoch = 3 if mode == "min_size" else 10
    assert [len(batches) for batches in whole.rows.values()] == [per_epoch] * 5
    if mode in {None, "max_size_cycle"}:
        assert [batch["long"] for batch in whole.rows[0]] == plain(1)[0]
