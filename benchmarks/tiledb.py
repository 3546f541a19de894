"""TileDB: volumes of 4.5 MB (int16 -> float32), one a tile, shuffled, in batches of 32.

penstock against torch's ``DataLoader`` over the tiledb library as people write it: the array opened on first use in
each worker, a row an item.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import data
from benchmarks.runner import Contestant
from benchmarks.volumes import touch
from penstock.base.sizes import format_count

VOLUMES, BATCH, MEMORY = 160, 32, "768MiB"
LAYOUTS = {"plain": [], "zstd": ["shuffle", "zstd"]}


def make(root: Path, layout: str) -> Path:
    def fill(folder: Path) -> None:
        import tiledb

        shape = (VOLUMES, *data.VOLUME)
        dims = [
            tiledb.Dim(f"d{axis}", domain=(0, size - 1), tile=1 if axis == 0 else size, dtype=np.int64)
            for axis, size in enumerate(shape)
        ]
        filters = [tiledb.ByteShuffleFilter(), tiledb.ZstdFilter(3)] if LAYOUTS[layout] else []
        attribute = tiledb.Attr("betas", dtype=np.int16, filters=tiledb.FilterList(filters))
        tiledb.Array.create(str(folder / "betas"), tiledb.ArraySchema(tiledb.Domain(*dims), [attribute]))
        rng = np.random.default_rng(7)
        with tiledb.open(str(folder / "betas"), "w") as array:
            array[:] = np.stack([data.volume(rng) for _ in range(VOLUMES)])

    return data.once(root / f"tiledb-{layout}", fill)


def penstock(folder: str) -> Iterator[int]:
    import penstock as ps

    ds = ps.open(Path(folder, "betas")).cast("betas", "float32")
    with ps.Loader(ds, batch_size=BATCH, shuffle=True, memory=MEMORY, columns=("betas", "__index__")) as loader:
        for _ in range(2):
            for values, index in loader:
                touch(values)
                yield len(index)


class ByHand(torch.utils.data.Dataset):
    """As most projects have it."""

    def __init__(self, path: str) -> None:
        self.path, self.array = path, None

    def __len__(self) -> int:
        return VOLUMES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if self.array is None:
            import tiledb

            self.array = tiledb.open(self.path, ctx=tiledb.Ctx())
        found: Any = self.array[number]
        values = found["betas"] if isinstance(found, dict) else found
        return torch.from_numpy(values.astype(np.float32)), number


def dataloader(folder: str, workers: int) -> Iterator[int]:
    dataset = ByHand(str(Path(folder, "betas")))
    for values, number in torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers):
        touch(values)
        yield len(number)


def contestants(folder: Path) -> list[Contestant]:
    """Time counts from the start: workers begin with a batch each, so that the first batch is not the first work."""
    here = {"folder": str(folder)}
    by_hand = [
        Contestant(
            f"DataLoader + tiledb, {format_count(n, 'worker')}",
            f"{__name__}:dataloader",
            {**here, "workers": n},
            whole=True,
        )
        for n in (0, 1, 2, 4)
    ]
    return [Contestant(f"penstock, {MEMORY}", f"{__name__}:penstock", here, whole=True), *by_hand]


BENCHMARKS = {
    "tiledb-plain": lambda root: contestants(make(root, "plain")),
    "tiledb-zstd": lambda root: contestants(make(root, "zstd")),
}
