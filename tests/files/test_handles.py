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
from penstock.base import stop
from penstock.errors import Unavailable
from penstock.files.files import Files

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


def open_files(folder: Path, process: int | str = "self") -> int:
    """Descriptors of a process on files of the folder."""
    count = 0
    try:
        descriptors = os.listdir(f"/proc/{process}/fd")
    except OSError:  # it has ended
        return 0
    for descriptor in descriptors:
        try:
            count += os.readlink(f"/proc/{process}/fd/{descriptor}").startswith(str(folder))
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


FOUR_WORKERS = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")


@pytest.fixture
def used(folder: Path, request: Any) -> ps.Dataset:
    """A dataset that has handles which workers inherit."""
    ds = ps.open(folder / "session*.h5", max_open_files=request.param)
    for row in range(0, 60, 6):
        assert (ds[row]["betas"] == row).all()
    return ds


@FOUR_WORKERS
@pytest.mark.parametrize("used", [0, 5], indirect=True)
def test_in_forked_workers(folder: Path, used: ps.Dataset) -> None:
    most = used._options.files.max_open
    counting = Counting(used, folder)
    rows, processes = [], set()
    for row, opened, right, process in torch.utils.data.DataLoader(
        counting, 8, shuffle=True, num_workers=4, multiprocessing_context="fork"
    ):
        assert right.all()
        assert int(opened.max()) <= most
        rows += row.tolist()
        processes |= set(process.tolist())
    assert sorted(rows) == list(range(SESSIONS * ROWS))
    assert len(processes) == 4
    used.close()
    assert open_files(folder) == 0


@FOUR_WORKERS
@pytest.mark.parametrize("used", [0, pytest.param(5, marks=pytest.mark.slow)], indirect=True)
def test_in_workers_started_anew(folder: Path, used: ps.Dataset) -> None:
    batches = iter(torch.utils.data.DataLoader(used, 8, shuffle=True, num_workers=4, multiprocessing_context="spawn"))
    rows: list[int] = []
    for batch in batches:
        first = batch["betas"][:, 0, 0, 0]
        assert (batch["betas"] == first[:, None, None, None]).all()
        rows += first.tolist()
        for worker in batches._workers:  # seen from outside, while they read: one more may be open for a request
            assert open_files(folder, worker.pid) <= max(1, used._options.files.max_open)
    assert sorted(rows) == list(range(SESSIONS * ROWS))


def test_a_thread_that_was_asked_to_stop_begins_no_other_read(tmp_path: Path) -> None:
    """Leaving a loop waits for its threads, and a block may take them hundreds of reads."""
    np.save(tmp_path / "rows.npy", np.arange(10))
    flag, seen = stop.Flag(), []
    files = Files()
    file = files.identify(str(tmp_path / "rows.npy"))

    def read() -> None:
        stop.watch(flag)
        with files.lend(file) as handle:
            handle.read_into(0, np.empty(8, np.uint8))
            flag.is_set = True
            with pytest.raises(Unavailable, match=r"rows\.npy: reading was stopped, because the loop was left"):
                handle.read_into(0, np.empty(8, np.uint8))
            seen.append(True)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(10)
    assert seen == [True]
