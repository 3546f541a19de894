"""Many files, few descriptors: while training, in torch's workers, after a fork."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import penstock as ps

SESSIONS, ROWS = 64, 6
SHAPE = (40, 50, 10)  # 40 KB a row: read, not mapped


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sessions")
    for session in range(SESSIONS):
        rows = np.arange(session * ROWS, (session + 1) * ROWS, dtype=np.int16)
        options: dict[str, Any] = {"chunks": (1, *SHAPE), "compression": "gzip"} if session % 2 else {}
        with h5py.File(folder / f"session{session}.h5", "w") as file:
            values = np.ascontiguousarray(np.broadcast_to(rows[:, None, None, None], (ROWS, *SHAPE)))
            file.create_dataset("betas", data=values, **options)
    return folder


def open_files(folder: Path) -> int:
    """Descriptors of this process on files of the folder."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder))
        except OSError:  # closed in the meantime
            continue
    return count


class Watch:
    """The most descriptors ever seen open, looked at all the time from a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most, self.looks = folder, 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, open_files(self.folder))
            self.looks += 1
            time.sleep(0.0005)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("threads", [1, 4, 8])
def test_while_training(folder: Path, threads: int) -> None:
    ds = ps.open(folder / "session*.h5", max_open_files=5)
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "memory": "64MiB", "columns": ("betas", "__index__")}
    with Watch(folder) as watch, ps.Loader(ds, threads=threads, **options) as batches:
        for _ in range(2):
            seen = []
            for betas, index in batches:
                assert (betas == index[:, None, None, None]).all()
                seen += index.tolist()
            assert sorted(seen) == list(range(SESSIONS * ROWS))
    assert watch.looks > 20
    assert 1 <= watch.most <= 5
    assert open_files(folder) == 0


def test_open_for_each_request(folder: Path) -> None:
    ds = ps.open(folder / "session*.h5", max_open_files=0)
    for row in range(0, SESSIONS * ROWS, 7):
        assert (ds[row]["betas"] == row).all()
        assert open_files(folder) == 0
    with Watch(folder) as watch, ps.Loader(ds, batch_size=16, threads=3, memory="64MiB") as batches:
        assert sum(len(batch["betas"]) for batch in batches) == SESSIONS * ROWS
    assert watch.most <= 3  # those that are being read from at that moment
    assert open_files(folder) == 0


class Counting(torch.utils.data.Dataset):
    """Rows, and how many files are open in whoever reads them."""

    def __init__(self, ds: ps.Dataset, folder: Path) -> None:
        self.ds, self.folder = ds, folder

    def __len__(self) -> int:
        return len(self.ds)

    def __getitem__(self, row: int) -> tuple[int, int, bool, int]:
        right = bool((self.ds[row]["betas"] == row).all())
        return row, open_files(self.folder), right, os.getpid()


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("max_open_files", [0, 5])
def test_in_workers(folder: Path, context: str, max_open_files: int) -> None:
    ds = ps.open(folder / "session*.h5", max_open_files=max_open_files)
    for row in range(0, 60, 6):  # handles that a fork inherits
        assert (ds[row]["betas"] == row).all()
    loader = torch.utils.data.DataLoader(
        Counting(ds, folder), 8, shuffle=True, num_workers=4, multiprocessing_context=context
    )
    rows, processes = [], set()
    for row, opened, right, process in loader:
        assert right.all()
        assert int(opened.max()) <= max_open_files
        rows += row.tolist()
        processes |= set(process.tolist())
    assert sorted(rows) == list(range(SESSIONS * ROWS))
    assert len(processes) == 4
    ds.close()
    assert open_files(folder) == 0
