"""A folder of 425 x 425 JPEGs in classes, shuffled, in batches of 32, as float32 between 0 and 1, channels first.

penstock against torch's ``DataLoader`` over Pillow, as torchvision's ``ImageFolder`` with ``ToTensor`` does it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks import data
from benchmarks.runner import Contestant
from benchmarks.volumes import touch
from penstock.base.sizes import format_count

PICTURES, CLASSES, SIZE, BATCH, MEMORY, EPOCHS = 1200, 10, 425, 32, "512MiB", 3


def make(root: Path) -> Path:
    """Pictures that compress as photographs do: about 45 KB each."""

    def fill(folder: Path) -> None:
        import imagecodecs

        rng = np.random.default_rng(5)
        for number in range(PICTURES):
            inner = folder / "photos" / f"class{number % CLASSES}"
            inner.mkdir(parents=True, exist_ok=True)
            (inner / f"{number:06d}.jpg").write_bytes(imagecodecs.jpeg8_encode(data.picture(rng, SIZE), level=90))

    return data.once(root / "folders", fill)


def penstock(folder: str) -> Iterator[int]:
    import penstock as ps

    ds = ps.open(Path(folder, "photos")).cast("image", "float32", divisor=255).permute("image", 2, 0, 1)
    with ps.Loader(ds, batch_size=BATCH, shuffle=True, memory=MEMORY, columns=("image", "label")) as loader:
        for _ in range(EPOCHS):
            for images, labels in loader:
                touch(images)
                yield len(labels)


class ByHand(torch.utils.data.Dataset):
    """ImageFolder with ToTensor."""

    def __init__(self, root: str) -> None:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.samples = [
            (os.path.join(root, name, file), label)
            for label, name in enumerate(classes)
            for file in sorted(os.listdir(os.path.join(root, name)))
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        path, label = self.samples[number]
        with open(path, "rb") as file:
            picture = Image.open(file).convert("RGB")
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div(255), label


def dataloader(folder: str, workers: int) -> Iterator[int]:
    dataset = ByHand(str(Path(folder, "photos")))
    for images, labels in torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers):
        touch(images.permute(0, 2, 3, 1) if not images.is_contiguous() else images)
        yield len(labels)


def contestants(folder: Path) -> list[Contestant]:
    here = {"folder": str(folder)}
    by_hand = [
        Contestant(
            f"DataLoader + Pillow, {format_count(n, 'worker')}", f"{__name__}:dataloader", {**here, "workers": n}
        )
        for n in (0, 1, 2, 4)
    ]
    return [Contestant(f"penstock, {MEMORY}", f"{__name__}:penstock", here), *by_hand]


BENCHMARKS = {"folders": lambda root: contestants(make(root))}
