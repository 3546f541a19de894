"""Accelerate and the Trainer: same rows as a plain loop, same number of optimizer steps as with torch's DataLoader."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import penstock as ps

accelerate = pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")

from penstock.integrations.accelerate import for_accelerate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, BATCH = 42, 4
STEPS = -(-ROWS // BATCH)


def dataset():
    return ps.from_arrays(x=np.arange(ROWS, dtype=np.float32)[:, None], row=np.arange(ROWS))


def loader(**options):
    return ps.Loader(
        dataset(), **{"batch_size": BATCH, "shuffle": True, "seed": 3, "memory": "64MiB", "threads": 1} | options
    )


def plain(epochs):
    with loader() as made:
        return [[batch["row"].tolist() for batch in made] for _ in range(epochs)]


@pytest.fixture
def accelerator():
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)


def optimizer_steps(accelerator, batches):
    model, steps = torch.nn.Linear(1, 1), 0
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"]).mean())
            steps += accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
    return steps


def test_gradients_of_the_last_batches_are_applied(accelerator):
    prepared = accelerator.prepare(for_accelerate(loader()))
    theirs = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(ROWS), batch_size=BATCH))
    assert len(prepared) == len(theirs) == STEPS
    assert optimizer_steps(accelerator, prepared) == -(-STEPS // 4)
    assert prepared.remainder == ROWS % BATCH


def test_rows_are_those_of_a_plain_loop(accelerator):
    prepared = accelerator.prepare(for_accelerate(loader()))
    assert [[batch["row"].tolist() for batch in prepared] for _ in range(3)] == plain(3)


@pytest.mark.parametrize("stop_after", [1, 5, STEPS])
def test_saved_state_goes_on_with_the_next_batch(accelerator, tmp_path, stop_after):
    prepared = accelerator.prepare(for_accelerate(loader()))
    for number, _ in enumerate(prepared, 1):
        if number == stop_after:
            accelerator.save_state(tmp_path)
            break
    prepared.load_state_dict({**prepared.state_dict(), "epoch": 7, "samples": 0})
    accelerator.load_state(tmp_path)
    whole = [rows for epoch in plain(2) for rows in epoch]
    rest = [batch["row"].tolist() for batch in prepared]
    assert rest == whole[stop_after : STEPS if stop_after < STEPS else 2 * STEPS]


@pytest.mark.parametrize("skipped", [0, 3, STEPS - 1])
def test_first_batches_are_skipped_without_being_read(accelerator, skipped):
    prepared = accelerator.prepare(for_accelerate(loader()))
    prepared.set_epoch(1)
    rest = [batch["row"].tolist() for batch in accelerator.skip_first_batches(prepared, skipped)]
    assert rest == plain(2)[1][skipped:]
    assert prepared.loader.stats().samples == ROWS - skipped * BATCH


@pytest.mark.parametrize("skipped", [0, 1, 3, 5])
def test_gradients_of_the_last_batches_are_applied_after_skipping(accelerator, skipped, tmp_path):
    """As with torch's DataLoader: the number of the step is saved with the position."""
    prepared = accelerator.prepare(for_accelerate(loader()))
    theirs = accelerator.prepare(torch.utils.data.DataLoader([{"x": torch.ones(1)}] * ROWS, batch_size=BATCH))
    steps = []
    for each in (prepared, theirs):
        accelerator.step = skipped
        steps.append(optimizer_steps(accelerator, accelerator.skip_first_batches(each, skipped)))
    assert steps[0] == steps[1] > 0
    assert accelerator.gradient_state.active_dataloader is None


def test_a_state_saved_after_skipping_loses_nothing(accelerator, tmp_path):
    prepared = accelerator.prepare(for_accelerate(loader()))
    for _ in zip(range(2), accelerator.skip_first_batches(prepared, 3), strict=False):
        pass
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert [batch["row"].tolist() for batch in prepared] == plain(1)[0][5:]


def test_a_loop_that_was_left_is_forgotten(accelerator):
    prepared = accelerator.prepare(for_accelerate(loader()))
    for _ in prepared:
        break
    assert accelerator.gradient_state.active_dataloader is None
    prepared.set_epoch(0)
    assert [batch["row"].tolist() for batch in prepared] == plain(1)[0]
    assert [batch["row"].tolist() for batch in prepared] == plain(2)[1]


def test_batches_of_another_size_after_a_restart(accelerator):
    """As with another number of ranks: the end of the epoch is where the samples end."""
    prepared = accelerator.prepare(for_accelerate(loader()))
    for _ in zip(range(3), prepared, strict=False):
        pass
    state = prepared.state_dict()
    larger = accelerator.prepare(for_accelerate(loader(batch_size=9)))
    larger.load_state_dict(state)
    ends = [larger.end_of_dataloader for _ in larger]
    assert ends == [False, False, False, True]


def test_a_mesh_that_the_loader_does_not_know_is_refused(accelerator, monkeypatch):
    class Mesh:
        mesh_dim_names, shape = ("dp_shard", "tp"), (2, 2)

        def get_coordinate(self):
            return [1, 0]

    monkeypatch.setitem(accelerate.state.AcceleratorState._shared_state, "device_mesh", Mesh())
    with pytest.raises(ps.ConfigError, match=r"rank 0 of 1.*mesh=accelerator.torch_device_mesh"):
        for_accelerate(loader())
    assert len(for_accelerate(loader(mesh=Mesh()))) == -(-ROWS // (2 * BATCH))


GATHERED = """
    import os, sys, json
    import numpy as np, torch, accelerate, transformers, penstock as ps
    from penstock.integrations.accelerate import for_accelerate

    def loader():
        ds = ps.from_arrays(x=np.arange(22, dtype=np.float32)[:, None], labels=np.arange(22))
        return for_accelerate(ps.Loader(ds, batch_size=3, memory="64MiB", threads=1, tail="fill"))

    accelerator = accelerate.Accelerator(cpu=True)
    rows = [accelerator.gather_for_metrics(batch["labels"]) for batch in accelerator.prepare(loader())]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x, labels):
            return {"loss": self.layer(x).mean(), "logits": x}

    class Trainer(transformers.Trainer):
        def get_eval_dataloader(self, *_):
            return loader()

    arguments = transformers.TrainingArguments(sys.argv[1], use_cpu=True, report_to=[], disable_tqdm=True)
    told = []
    run = Trainer(Model(), arguments, compute_metrics=lambda found: told.append(found) or {})
    run.evaluate()
    if accelerator.is_main_process:
        found = {
            "gathered": torch.cat(rows).tolist(),
            "labels": told[0].label_ids.tolist(),
            "logits": told[0].predictions[:, 0].tolist(),
        }
        with open(sys.argv[1] + "/found.json", "w") as file:
            json.dump(found, file)
    torch.distributed.barrier()
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_three_ranks_gather_is_every_sample_once(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "child.py").write_text(textwrap.dedent(GATHERED))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    ran = subprocess.run(
        [*command, tmp_path / "child.py", tmp_path], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {name: list(range(22)) for name in ("gathered", "labels", "logits")}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def forward(self, x, row=None):
        self.seen.append(row.tolist())
        return {"loss": self.layer(x).mean(), "logits": row}


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_trainer_trains_evaluates_and_resumes(tmp_path, accumulate):
    transformers = pytest.importorskip("transformers")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return for_accelerate(loader())

        def get_eval_dataloader(self, *_):
            return for_accelerate(loader(shuffle=False))

    def trainer(model, epochs):
        options = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=epochs, per_device_train_batch_size=BATCH, save_strategy="steps",
            save_steps=1, gradient_accumulation_steps=accumulate, use_cpu=True, report_to=[], disable_tqdm=True,
            eval_strategy="no",
        )  # fmt: skip
        return Trainer(model, options)

    model = Model()
    run = trainer(model, 2)
    run.train()
    assert model.seen == [rows for epoch in plain(2) for rows in epoch]
    assert run.state.global_step == 2 * -(-STEPS // accumulate)
    model.seen.clear()
    run.evaluate()
    assert sorted(row for rows in model.seen for row in rows) == list(range(ROWS))
    resumed = Model()
    at = -(-STEPS // accumulate) + 1  # one step into the second epoch
    trainer(resumed, 2).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert resumed.seen == plain(2)[1][accumulate:]
