"""Accelerate and the Trainer: same rows as a plain loop, same number of optimizer steps as with torch's DataLoader."""

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
