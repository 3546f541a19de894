"""LMDB: 4 KiB records in batches of 256, and volumes of 4.5 MB (int16 -> float32) in batches of 32, both shuffled.

penstock against torch's ``DataLoader`` over the lmdb library as people write it: the environment opened on first use in
each worker, read-only and without locks, a transaction an item, the value copied out of the map.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks import data
from benchmarks.runner import Contestant
from benchmarks.volumes import touch
from penstock.base.sizes import format_count

RECORDS, WIDTH, RECORD_BATCH, EPOCHS = 200_000, 1024, 256, 3
VOLUMES, VOLUME_BATCH = 240, 32

KINDS = {
    "records": (RECORDS, "float32", (WIDTH,), RECORD_BATCH, "256MiB", EPOCHS),
    "volumes": (VOLUMES, "int16", data.VOLUME, VOLUME_BATCH, "768MiB", 1),
}


def make(root: Path, kind: str) -> Path:
    """One database of values that are the plain bytes of arrays, under counted keys."""

    def fill(folder: Path) -> None:
        import lmdb

        rng = np.random.default_rng(6)
        with lmdb.open(str(folder / "data.lmdb"), map_size=1 << 34, subdir=False) as env:
            for begin in range(0, KINDS[kind][0], 1000):
                with env.begin(write=True) as transaction:
                    for number in range(begin, min(begin + 1000, KINDS[kind][0])):
                        values = data.volume(rng) if kind == "volumes" else rng.standard_normal(WIDTH, dtype=np.float32)
                        transaction.put(b"%08d" % number, values.tobytes())

    return data.once(root / f"lmdb-{kind}", fill)


def penstock(folder: str, kind: str) -> Iterator[int]:
    import penstock as ps

    _, dtype, shape, batch, memory, epochs = KINDS[kind]
    ds = ps.open(Path(folder, "data.lmdb"), decoders={"data": (dtype, shape)}).cast("data", "float32")
    with ps.Loader(ds, batch_size=batch, shuffle=True, memory=memory, columns=("data", "__index__")) as loader:
        for _ in range(epochs):
            for values, index in loader:
                touch(values)
                yield len(index)


class ByHand(torch.utils.data.Dataset):
    """As most projects have it."""

    def __init__(self, path: str, kind: str) -> None:
        import lmdb

        self.path, self.kind, self.env = path, kind, None
        with lmdb.open(path, subdir=False, readonly=True, lock=False) as env:
            self.length = env.stat()["entries"]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if self.env is None:
            import lmdb

            self.env = lmdb.open(
                self.path, subdir=False, readonly=True, lock=False, readahead=False, meminit=False, max_readers=128
            )
        _, dtype, shape, _, _, _ = KINDS[self.kind]
        with self.env.begin(write=False) as transaction:
            value = transaction.get(b"%08d" % number)
        values = np.frombuffer(value, dtype).reshape(shape)
        return torch.from_numpy(values.astype(np.float32)), number


def dataloader(folder: str, kind: str, workers: int) -> Iterator[int]:
    batch = KINDS[kind][3]
    dataset = ByHand(str(Path(folder, "data.lmdb")), kind)
    for values, number in torch.utils.data.DataLoader(dataset, batch, shuffle=True, num_workers=workers):
        touch(values)
        yield len(number)


def contestants(folder: Path, kind: str) -> list[Contestant]:
    here = {"folder": str(folder), "kind": kind}
    by_hand = [
        Contestant(f"DataLoader + lmdb, {format_count(n, 'worker')}", f"{__name__}:dataloader", {**here, "workers": n})
        for n in (0, 1, 2, 4)
    ]
    return [Contestant(f"penstock, {KINDS[kind][4]}", f"{__name__}:penstock", here), *by_hand]


def _benchmark(kind: str) -> Callable[[Path], list[Contestant]]:
    return lambda root: contestants(make(root, kind), kind)


BENCHMARKS = {f"lmdb-{kind}": _benchmark(kind) for kind in KINDS}
