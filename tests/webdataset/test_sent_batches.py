"""Batches that workers send: their memory is used again, and nothing of it is to be seen."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import webdataset as wds
from penstock.loader.segments import CAN_SHARE

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="no shared memory without a name on this system")

ROWS, BATCH, VALUES = 60, 4, 10_000


def samples() -> Any:
    """Arrays and tensors large enough for segments, and small ones."""
    worker = torch.utils.data.get_worker_info()
    first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
    for number in range(first, ROWS, step):
        yield np.full(VALUES, number), torch.full((2, VALUES), float(number)), torch.tensor([number]), str(number)


def loader(workers: int, dataset: Any = None, **options: Any) -> Any:
    dataset = wds.DataPipeline(samples).batched(BATCH) if dataset is None else dataset
    return torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def check(batches: list[Any]) -> None:
    """Every row once, and each batch whole."""
    seen = []
    for arrays, tensors, small, texts in batches:
        numbers = small[:, 0]
        assert bool((arrays == numbers[:, None]).all())
        assert bool((tensors == numbers[:, None, None]).all())
        assert texts == [str(int(number)) for number in numbers]
        seen += numbers.tolist()
    assert sorted(seen) == list(range(ROWS))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept workers": {"persistent_workers": True},
    "prefetching": {"prefetch_factor": 5},
    "spawned": {"multiprocessing_context": "spawn"},
}


@pytest.mark.parametrize("options", [*list(OPTIONS)[:3], pytest.param("spawned", marks=pytest.mark.slow)])
def test_batches_that_are_kept(options: str) -> None:
    batches = loader(2, **OPTIONS[options])
    kept = list(batches)
    check(kept)
    for _ in batches:
        pass
    check(kept)
    check(list(batches))


def file_of(address: int) -> str:
    """What this process has mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end, inode, path = re.match(r"(\w+)-(\w+) \S+ \S+ \S+ (\d+) *(.*)", line).groups()  # type: ignore[union-attr]
        if int(begin, 16) <= address < int(end, 16):
            return f"{inode} {path}"
    raise AssertionError("nothing")


def test_memory_is_used_again() -> None:
    places = []
    for arrays, tensors, _, _ in loader(2):
        places += [file_of(each.data_ptr()) for each in (arrays, tensors) if len(each) == BATCH]
        del arrays, tensors
    assert all("memfd:penstock" in each for each in places)
    assert len(places) >= 28
    assert len(set(places)) <= 2 * 2 * 4


def mapped() -> int:
    """SegmentPool that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd:penstock" in line})


@pytest.mark.parametrize("options", ["plain", "kept workers"])
def test_nothing_stays_behind(options: str) -> None:
    batches = loader(2, **OPTIONS[options])
    for _ in range(2):
        rows = [batch[1][0] for batch in batches]
        kept = rows[0]
        del rows
        gc.collect()
        assert bool((kept == kept[0, 0]).all())
        assert options != "plain" or mapped() == 1
        del kept
    del batches
    gc.collect()
    assert mapped() == 0


def test_memory_of_batches_that_were_kept_is_given_back() -> None:
    batches = iter(loader(1, wds.DataPipeline(samples).batched(BATCH).with_epoch(10**6)))
    kept = [next(batches) for _ in range(20)]
    assert mapped() >= 2 * 20
    del kept
    for _ in range(5):
        next(batches)
    assert mapped() <= 2 * 4


def test_what_the_consumer_writes_is_the_consumers() -> None:
    checked = []
    for arrays, tensors, small, texts in loader(1):
        checked.append((arrays.clone(), tensors.clone(), small, texts))
        arrays.fill_(-1)
        tensors.sub_(1000)
        small = small.clone()
    check(checked)


def test_a_worker_that_keeps_what_it_sends() -> None:
    kept: list[Any] = []

    def keep(batch: Any) -> Any:
        kept.append(batch)
        sums = [float(each[1].sum()) for each in kept]
        return (*batch[:3], [*batch[3]]), sums

    received = list(loader(1, wds.DataPipeline(samples).batched(BATCH).map(keep)))
    check([batch for batch, _ in received])
    sums = received[-1][1]
    assert sums == [float(batch[1].sum()) for batch, _ in received]


# torch may say it once more in the finalizer of its iterator.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_leaves_what_it_sent() -> None:
    batches = iter(loader(1, wds.DataPipeline(samples).batched(BATCH).with_epoch(10**6)))
    kept = [next(batches) for _ in range(3)]

    def kill_and_wait() -> None:
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        for _ in range(6000):
            time.sleep(0.01)

    # torch says so in a signal handler: wait for it here, or it comes in the middle of what follows
    with pytest.raises(RuntimeError, match="killed by signal"):
        kill_and_wait()
    for number, (arrays, tensors, _, _) in enumerate(kept):
        assert arrays[:, 0].tolist() == tensors[:, 0, 0].tolist() == list(range(4 * number, 4 * number + 4))


ODD = {
    "a view": lambda whole: whole[1:3, :, 5:],
    "turned": lambda whole: whole.transpose(1, 2),
    "a row twice": lambda whole: (whole[0], whole[0]),
    "rows in another order": lambda whole: whole[[3, 1]],
    "small and turned": lambda whole: whole[:2, :, :3].clone().transpose(0, 2),
    "no axis": lambda whole: whole[0, 0, 0].clone(),
    "nothing": lambda whole: whole[:0],
    "bfloat16": lambda whole: whole.to(torch.bfloat16),
    "few bfloat16": lambda whole: whole[:1, :1, :2].to(torch.bfloat16),
    "bool": lambda whole: whole[:, 0, :3] > 2,
    "complex": lambda whole: torch.complex(whole, whole),
    "with gradient": lambda whole: whole.clone().requires_grad_(),
    "parameter": lambda whole: torch.nn.Parameter(whole),
    "list": lambda whole: [whole, {"x": whole}],
}


@pytest.mark.parametrize("kind", ODD)
def test_any_tensor_arrives_as_it_is(kind: str) -> None:
    make = ODD[kind]
    dataset = wds.DataPipeline(samples).slice(BATCH).batched(BATCH).map(lambda batch: make(batch[1]))
    (expected,), (received,) = list(loader(0, dataset)), list(loader(1, dataset))
    pairs = [(expected, received)]
    while pairs:
        one, other = pairs.pop()
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert one.requires_grad == other.requires_grad
            assert torch.equal(one, other)
        else:
            inside = [each.values() if isinstance(each, dict) else each for each in (one, other)]
            pairs += zip(*inside, strict=True)


def test_the_other_way_of_sharing_memory() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        check(list(loader(2)))
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


ORPHANS = """
import json, os, sys, time
import torch
from penstock import webdataset as wds

if __name__ == "__main__":
    rows = wds.DataPipeline(lambda: [(torch.zeros(1000),)] * 10**6).batched(10)
    batches = iter(torch.utils.data.DataLoader(rows, batch_size=None, num_workers=2, prefetch_factor=10))
    next(batches), next(batches)
    print(json.dumps([worker.pid for worker in batches._workers]), flush=True)
    time.sleep(1)
    os._exit(0)  # as if it was killed: batches fill the pipe, and nobody reads them
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow  # torch's workers look after their parent every five seconds
def test_workers_whose_parent_was_killed_end(tmp_path: Path) -> None:
    program, printed = tmp_path / "orphans.py", tmp_path / "printed"
    program.write_text(ORPHANS)
    with open(printed, "w") as out:  # not a pipe: the workers have it too
        subprocess.run([sys.executable, "-W", "ignore", str(program)], stdout=out, check=True, timeout=120)
    left, until = json.loads(printed.read_text()), time.monotonic() + 60
    while left and time.monotonic() < until:
        left = [pid for pid in left if is_running(pid)]
        time.sleep(0.1)
    assert not left
