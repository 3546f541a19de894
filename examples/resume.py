"""Train a small model from npy files inside a budget, stop half-way, and go on where it stopped.

python examples/resume.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch

import penstock as ps


def make_files(folder: Path) -> None:
    """Four sessions of 200 rows: 512 measurements each, and a label that depends on them."""
    rng = np.random.default_rng(0)
    direction = rng.normal(size=512)
    for session in range(4):
        rows = rng.normal(scale=300, size=(200, 512)).astype(np.int16)
        np.save(folder / f"session{session}.npy", rows)
        np.save(folder / f"labels{session}.npy", (rows @ direction > 0).astype(np.int64))


def make_loader(folder: Path) -> ps.Loader:
    rows = ps.open(folder / "session*.npy").cast("data", "float32", scale=1 / 300)
    labels = ps.open(folder / "labels*.npy")
    samples = ps.join(x=rows, y=labels)
    return ps.Loader(samples, batch_size=32, shuffle=True, seed=1, memory="64MiB", columns=("x", "y"))


def train(loader: ps.Loader, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: int) -> float:
    loss = torch.tensor(0.0)
    for step, (x, y) in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step == batches:
            break
    return loss.item()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder)
        model = torch.nn.Linear(512, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        loader = make_loader(folder)
        print(loader.plan)
        train(loader, model, optimizer, batches=10)
        saved = json.dumps(loader.state_dict())
        loader.close()
        print(f"stopped after 10 of {len(loader)} batches; the position is {saved}")

        loader = make_loader(folder)  # in another process, on other ranks, with another budget
        loader.load_state_dict(json.loads(saved))
        for epoch in range(3):
            loss = train(loader, model, optimizer, batches=len(loader))
            print(f"epoch {epoch}: loss {loss:.3f}, {loader.stats().samples} samples")
        print(loader.stats().bottleneck)
        loader.close()


if __name__ == "__main__":
    main()
