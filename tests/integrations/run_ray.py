"""Training runs in Ray Train: ``run_ray.py FOLDER WORLD``. Writes what ``run_engine.py`` writes.

After the runs that stop, the workers fail: Ray starts them anew, and they go on from the reported checkpoint.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import run_engine
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

from penstock.integrations.ray import load_position, save_position, train_loader


def train(config):
    context = ray.train.get_context()
    phase = "first" if ray.train.get_checkpoint() is None else "resumed"
    found = {}
    for accumulate in run_engine.ACCUMULATE:
        for kind in run_engine.PHASES[phase]:
            seen, steps, stopped = run_loop(context.get_world_size(), accumulate, kind)
            found[f"{kind}-{accumulate}"] = {"batches": seen, "steps": steps}
    Path(config["folder"], f"{phase}-{context.get_world_rank()}.json").write_text(json.dumps(found))
    if phase == "first":
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Checkpoint.from_directory(folder)
            save_position(stopped, checkpoint)  # both runs stopped there
            ray.train.report({}, checkpoint=checkpoint)
        raise run_engine.Stopped


def run_loop(world, accumulate, kind):
    model = run_engine.Model()
    wrapped, optimizer = prepare_model(model), run_engine.CountedSGD(model.parameters(), 0.01)
    if kind == "torch":
        loader = prepare_data_loader(run_engine.torch_loader())
    else:
        loader = train_loader(run_engine.dataset(), shuffle=True, **run_engine.OPTIONS)
    epoch, number = 0, 0
    if kind == "resumed":
        assert load_position(loader)
        epoch, number = divmod(run_engine.stop_after(world), len(loader))
    for _ in range(epoch, run_engine.EPOCHS):
        for batch in loader:
            number += 1
            wrapped(batch["x"], batch["row"])["loss"].backward()
            if number % accumulate == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
            if kind == "stopped" and len(model.seen) == run_engine.stop_after(world):
                return model.seen, optimizer.count, loader
        number = 0
    return model.seen, optimizer.count, loader


def main():
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    paths = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    ray.init(num_cpus=world + 1, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False,
             runtime_env={"env_vars": paths})  # fmt: skip
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=world),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    main()
