"""One rank of a training run in an engine, started by torchrun: ``run_engine.py ENGINE FOLDER first|resumed``.

For each number of batches per optimizer step: a whole run, a run with torch's own ``DataLoader``, and a run that stops
in the middle of the last epoch; or else the rest of the one that stopped. Writes to FOLDER/PHASE-RANK.json the rows
that the model was given, batch by batch, and the number of optimizer steps.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import penstock as ps

ROWS, BATCH, EPOCHS = 46, 4, 2
ACCUMULATE = (1, 4)
OPTIONS = {"batch_size": BATCH, "seed": 3, "memory": "64MiB", "threads": 1}


def dataset():
    return ps.from_arrays(x=np.arange(ROWS, dtype=np.float32)[:, None], row=np.arange(ROWS))


def made_loader():
    return ps.Loader(dataset(), shuffle=True, **OPTIONS)


def torch_loader(sampler=None):
    rows = [{"x": torch.tensor([float(row)]), "row": row} for row in range(ROWS)]
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, sampler=sampler)


def steps_per_epoch(world):
    return -(-ROWS // (BATCH * world))


class Model(torch.nn.Module):
    """Notes the rows that it is given."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def forward(self, x, row):
        self.seen.append(row.tolist())
        return {"loss": self.layer(x).mean()}


class CountedSGD(torch.optim.SGD):
    """Counts its steps."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)


class Stopped(Exception):
    """Training stopped where the test wanted it to."""


def plain(folder, accumulate, *, kind):
    """A loop as people write it, under DDP."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return run_loop(f"{folder}/plain-{accumulate}.pt", accumulate, kind=kind)


def run_loop(checkpoint, accumulate, *, kind):
    """The loop of ``plain``, also for workers of Ray."""
    model = Model()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = CountedSGD(model.parameters(), 0.01)
    if kind == "torch":
        loader = torch_loader(torch.utils.data.distributed.DistributedSampler(range(ROWS)))
    else:
        loader = made_loader()
    epoch, number = 0, 0
    if kind == "resumed":
        saved = torch.load(checkpoint)
        loader.load_state_dict(saved["loader"])
        epoch, number = saved["epoch"], saved["number"]
    for current in range(epoch, EPOCHS):
        for batch in loader:
            number += 1
            wrapped(batch["x"], batch["row"])["loss"].backward()
            if number % accumulate == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
            if kind == "stopped" and len(model.seen) == stop_after(dist.get_world_size()):
                if dist.get_rank() == 0:
                    state = {"loader": loader.state_dict(), "epoch": current, "number": number}
                    torch.save(state, checkpoint)
                dist.barrier()
                return model.seen, optimizer.count
        number = 0
    return model.seen, optimizer.count


def stop_after(world):
    """Three batches into the last epoch: in the middle of a group of four."""
    return (EPOCHS - 1) * steps_per_epoch(world) + 3


def accelerate(folder, accumulate, *, kind):
    import accelerate

    from penstock.integrations.accelerate import for_accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = Model()
    loader = torch_loader() if kind == "torch" else for_accelerate(made_loader())
    inner = CountedSGD(model.parameters(), 0.01)
    wrapped, optimizer, loader = accelerator.prepare(model, inner, loader)
    if kind == "resumed":
        accelerator.load_state(f"{folder}/accelerate-{accumulate}")
    for _ in range(loader.state_dict()["epoch"] if kind == "resumed" else 0, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if kind == "stopped" and len(model.seen) == stop_after(accelerator.num_processes):
                accelerator.save_state(f"{folder}/accelerate-{accumulate}")
                return model.seen, inner.count
    return model.seen, inner.count


def trainer(folder, accumulate, *, kind):
    import transformers

    from penstock.integrations.accelerate import for_accelerate

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            if kind == "torch":
                return self.accelerator.prepare(torch_loader())
            return for_accelerate(made_loader())

    class Stop(transformers.TrainerCallback):
        """The Trainer saves after optimizer steps alone: four batches into the last epoch."""

        def on_step_end(self, args, state, control, **_):
            whole = -(-steps_per_epoch(args.world_size) // accumulate)
            if kind == "stopped" and state.global_step == (EPOCHS - 1) * whole + 4 // accumulate:
                control.should_save = control.should_training_stop = True

    arguments = transformers.TrainingArguments(
        f"{folder}/trainer-{accumulate}", num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, use_cpu=True,
        save_strategy="no", gradient_accumulation_steps=accumulate, report_to=[], disable_tqdm=True, ddp_backend="gloo",
        logging_strategy="no",
    )  # fmt: skip
    model = Model()
    optimizer = CountedSGD(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.count = 0  # schedules count a step of their own
    run = Trainer(model, arguments, optimizers=(optimizer, schedule), callbacks=[Stop()])
    run.train(resume_from_checkpoint=True if kind == "resumed" else None)
    return model.seen, optimizer.count


def lightning(folder, accumulate, *, kind):
    import lightning.pytorch as pl

    from penstock.integrations.lightning import DataModule, RestoreLoaders

    checkpoint = f"{folder}/lightning-{accumulate}.ckpt"

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            self.optimizer = CountedSGD(self.parameters(), 0.01)
            return self.optimizer

        def on_train_batch_end(self, *_):
            if kind == "stopped" and len(self.model.seen) == stop_after(self.trainer.world_size):
                self.trainer.save_checkpoint(checkpoint)
                raise Stopped

    module = Module()
    run = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=EPOCHS, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
        accumulate_grad_batches=accumulate, callbacks=[RestoreLoaders()],
    )  # fmt: skip
    try:
        if kind == "torch":
            run.fit(module, train_dataloaders=torch_loader())
        else:
            path = checkpoint if kind == "resumed" else None
            run.fit(module, datamodule=DataModule(train=dataset(), **OPTIONS), ckpt_path=path)
    except Stopped:
        pass
    return module.model.seen, module.optimizer.count


PHASES = {"first": ("fresh", "torch", "stopped"), "resumed": ("resumed",)}


def main():
    engine, folder, phase = sys.argv[1:]
    found = {}
    for accumulate in ACCUMULATE:
        for kind in PHASES[phase]:
            seen, steps = globals()[engine](folder, accumulate, kind=kind)
            found[f"{kind}-{accumulate}"] = {"batches": seen, "steps": steps}
    Path(folder, f"{phase}-{os.environ['RANK']}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort the process while Python ends


if __name__ == "__main__":
    main()
