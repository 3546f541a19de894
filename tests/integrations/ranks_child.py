"""One rank of a training run, started by torchrun: ``ranks_child.py ENGINE FOLDER STOP_AFTER RESUME``.

Writes the rows it was given, batch by batch, and the number of optimizer steps, to FOLDER/RUN-RANK.json.
"""

import json
import os
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import penstock as ps

ROWS, BATCH, EPOCHS = 46, 4, 2
OPTIONS = {"batch_size": BATCH, "seed": 3, "memory": "64MiB", "threads": 1}


def dataset():
    return ps.from_arrays(x=np.arange(ROWS, dtype=np.float32)[:, None], row=np.arange(ROWS))


def plain(folder, stop_after, resume):
    dist.init_process_group("gloo")
    loader = ps.Loader(dataset(), shuffle=True, **OPTIONS)
    if resume:
        loader.load_state_dict(json.loads(Path(folder, "state.json").read_text()))
    seen = []
    while loader.state_dict()["epoch"] < EPOCHS and (not stop_after or len(seen) < stop_after):
        seen += [batch["row"].tolist() for batch in islice(loader, stop_after or None)]
    if stop_after and dist.get_rank() == 0:
        Path(folder, "state.json").write_text(json.dumps(loader.state_dict()))
    return seen


def accelerate(folder, stop_after, resume):
    from accelerate import Accelerator

    from penstock.integrations.accelerate import for_accelerate

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(for_accelerate(ps.Loader(dataset(), shuffle=True, **OPTIONS)))
    if resume:
        accelerator.load_state(f"{folder}/state")
    seen = []
    while prepared.state_dict()["epoch"] < EPOCHS and (not stop_after or len(seen) < stop_after):
        for batch in prepared:
            seen.append(batch["row"].tolist())
            if len(seen) == stop_after:
                accelerator.save_state(f"{folder}/state")
                break
    return seen


def lightning(folder, stop_after, resume):
    import lightning.pytorch as pl

    from penstock.integrations.lightning import DataModule, RestoreLoaders

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), []

        def training_step(self, batch, _):
            self.seen.append(batch["row"].tolist())
            return self.layer(batch["x"]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

        def on_train_batch_end(self, *_):
            if len(self.seen) == stop_after:
                self.trainer.save_checkpoint(f"{folder}/state.ckpt")
                self.trainer.should_stop = True

    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=EPOCHS, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
        callbacks=[RestoreLoaders()],
    )  # fmt: skip
    trainer.fit(
        model, datamodule=DataModule(train=dataset(), **OPTIONS), ckpt_path=f"{folder}/state.ckpt" if resume else None,
        weights_only=False,
    )  # fmt: skip
    return model.seen


if __name__ == "__main__":
    engine, folder, stop_after, resume = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "resume"
    rows = globals()[engine](folder, stop_after, resume)
    name = f"{folder}/{'resumed' if resume else 'first'}-{os.environ['RANK']}.json"
    Path(name).write_text(json.dumps(rows))
    if dist.is_initialized():
        dist.destroy_process_group()
