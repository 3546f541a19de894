"""Reader processes and training processes that are killed at random moments. Ten seeds are 200 and 50 kills."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.loader.loader import runtime_of

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="reader processes need Linux"),
]

KILLS, PARENTS = 20, 5
LONGEST_PAUSE_S = 2.0


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kills") / "x.npy"
    np.save(path, np.arange(4000 * 500, dtype=np.int32).reshape(4000, 500))
    return path


def slowly(batch: dict) -> dict:
    time.sleep(0.001 * len(next(iter(batch.values()))))
    return batch


def test_killed_readers(stored: Path, any_seed: int) -> None:
    chance = random.Random(any_seed)
    ds = ps.open(stored).map(slowly)
    options = {"batch_size": 16, "shuffle": True, "seed": any_seed, "memory": "300MiB", "output": "numpy"}
    (name,) = ds.fields
    kills, pause, expected, found = 0, 0.0, [], []
    with ps.Loader(ds, processes=2, threads=4, **options) as loader:
        runtime_of(loader).start_processes(60)
        epochs = 0
        while kills < KILLS:
            epochs += 1
            last = next_kill = time.monotonic()
            for batch in loader:
                now = time.monotonic()
                pause, last = max(pause, now - last), now
                found.append(batch[name][:, 0].copy())
                process = chance.choice(runtime_of(loader)._processes.processes)
                if kills < KILLS and now >= next_kill and process.is_up:
                    os.kill(process.pid, signal.SIGKILL)
                    kills += 1
                    next_kill = now + chance.uniform(0, 0.6)
    with ps.Loader(ds, processes=0, **options) as loader:
        expected = [batch[name][:, 0].copy() for _ in range(epochs) for batch in loader]
    print(f"seed {any_seed}: {kills} kills, {epochs} epochs, longest pause {pause:.2f} s")  # pytest -rP shows it
    assert len(found) == len(expected)
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    assert pause < LONGEST_PAUSE_S


TRAINS = """
import sys, json, time
import penstock as ps
from penstock.loader.loader import runtime_of

loader = ps.Loader(ps.open(sys.argv[1]), batch_size=16, processes=2, threads=4, memory="300MiB", output="numpy")
runtime_of(loader).start_processes(60)
print(json.dumps([process.pid for process in runtime_of(loader)._processes.processes]), flush=True)
while True:
    for batch in loader:
        time.sleep(0.001)
"""


def test_killed_training_processes(stored: Path, any_seed: int) -> None:
    chance = random.Random(any_seed)
    for _ in range(PARENTS):
        child = subprocess.Popen([sys.executable, "-c", TRAINS, str(stored)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        readers = json.loads(child.stdout.readline())
        time.sleep(chance.uniform(0, 0.5))
        child.kill()
        child.wait()
        child.stdout.close()
        until = time.monotonic() + LONGEST_PAUSE_S
        while (left := [pid for pid in readers if _is_running(pid)]) and time.monotonic() < until:
            time.sleep(0.02)
        assert left == []


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
