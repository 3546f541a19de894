"""Training that is killed at any batch and goes on elsewhere: every sample once, in the order it would have had.

A run is two epochs, cut into pieces by SIGKILL. Each piece is read by as many processes as there are ranks; each says
after every batch what was in it and what state it would save. After a kill, the last step that all ranks have
delivered is where the next piece goes on, from that state as JSON, with other threads, budget, batch size and ranks.
Everything is drawn from the seed.
"""

import json
import os
import signal
import time

import h5py
import numpy as np
import pytest

import penstock as ps

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

ROWS = 240


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The same rows in files of small rows, and in chunks of many, which are mixed in windows."""
    folder = tmp_path_factory.mktemp("data")
    values = np.arange(ROWS)[:, None] * 1000 + np.arange(50)
    for part in range(3):
        np.save(folder / f"part{part}.npy", values[80 * part : 80 * part + 80])
    with h5py.File(folder / "chunks.h5", "w") as file:
        file.create_dataset("data", data=values, chunks=(7, 50), compression="gzip")
    return folder


RUNS = r"""
import json, os, select, signal, sys, zlib
import numpy as np
import penstock as ps

import h5py, hdf5plugin, imagecodecs  # once, and not in each process that is forked

folder, seed, runs, varied = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
EPOCHS = 2

def make(run, rank=0, world=1, batch=7, threads=1, memory="64MiB"):
    ds = ps.open(f"{folder}/{run['files']}", index_dir=False)
    return ps.Loader(ds, batch_size=batch, shuffle=run["shuffle"], seed=run["seed"], window=run["window"], rank=rank,
                     world_size=world, threads=threads, memory=memory, output="numpy")

def told(batch):
    rows = batch["data"]
    return [[int(row[0]) // 1000, zlib.crc32(row.tobytes())] for row in rows]

def forked(work):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with os.fdopen(writing, "w", buffering=1) as out:
            try:
                work(lambda *words: out.write(json.dumps(words) + "\n"))
            except BaseException as error:
                out.write(json.dumps(["failed", repr(error)]) + "\n")
                out.flush()
        os._exit(0)
    os.close(writing)
    return pid, reading

def read_rank(run, state, how, rank):
    def work(say):
        loader = make(run, rank, how["world"], how["batch"], how["threads"], how["memory"])
        if state is not None:
            loader.load_state_dict(json.loads(state))
        while loader.state_dict()["epoch"] < EPOCHS:
            for batch in loader:
                say(told(batch), loader.state_dict())
    return work

def piece(run, state, how):
    '''What each rank said before all were killed, once one had said so much.'''
    ranks = [forked(read_rank(run, state, how, rank)) for rank in range(how["world"])]
    said = {reading: b"" for _, reading in ranks}
    victim, alive = ranks[how["victim"]][1], set(said)
    while alive:
        if said[victim].count(b"\n") >= how["kill_after"]:
            break
        for reading in select.select(list(alive), [], [], 60)[0]:
            some = os.read(reading, 65536)
            said[reading] += some
            if not some:
                alive.discard(reading)
    for pid, _ in ranks:
        os.kill(pid, signal.SIGKILL)
    for reading in said:  # what was written before
        while some := os.read(reading, 65536):
            said[reading] += some
        os.close(reading)
    for pid, _ in ranks:
        os.waitpid(pid, 0)
    lines = [[json.loads(line) for line in text.split(b"\n")[:-1]] for text in said.values()]
    for line in (line for rank in lines for line in rank):
        assert line[0] != "failed", line
    return lines, bool(alive)

def drawn(random, left, fixed):
    '''How the next piece is read. Where fewer samples than ranks remain at the end, some come twice by design.'''
    while True:
        how = {"world": int(random.integers(1, 5)), "batch": int(random.integers(1, 20)),
               "threads": int(random.integers(1, 5)), "memory": f"{random.integers(8, 65)}MiB"}
        how |= fixed
        rest = left % (how["world"] * how["batch"])
        if rest == 0 or rest >= how["world"]:
            break
    steps = -(-left // (how["world"] * how["batch"]))
    at = [0, steps, steps + 1, *random.integers(0, 2 * steps, 6).tolist()]
    return how | {"kill_after": int(random.choice(at)), "victim": int(random.integers(how["world"]))}

for files in ("part*.npy", "chunks.h5"):
    list(make({"files": files, "shuffle": True, "seed": 0, "window": 20}))
total = {"runs": 0, "kills": 0, "lost": 0, "repeated": 0, "out of order": 0, "other bytes": 0}
for number in range(runs):
    random = np.random.default_rng([seed, number])
    run = {"files": str(random.choice(["part*.npy", "chunks.h5"])), "shuffle": bool(random.random() < 0.8),
           "seed": int(random.integers(1000)), "window": int(random.integers(14, 60))}
    pid, reading = forked(lambda say: [say(epoch, [one for batch in loader for one in told(batch)])
                                       for loader in [make(run)] for epoch in range(EPOCHS)])
    with os.fdopen(reading) as whole:
        order = {epoch: rows for epoch, rows in map(json.loads, whole)}
    os.waitpid(pid, 0)
    length = len(order[0])
    fixed = {}
    if varied != "ranks":
        fixed["world"] = int(random.integers(1, 4))
    if varied == "nothing":
        fixed |= {"batch": 8, "threads": 2, "memory": "64MiB"}
    came, state, epoch, position = {each: [] for each in range(EPOCHS)}, None, 0, 0
    while epoch < EPOCHS:
        how = drawn(random, length - position, fixed)
        lines, killed = piece(run, state, how)
        total["kills"] += killed
        for step in zip(*lines):
            rows = [row for rank in step for row in rank[0]]
            came[epoch] += rows
            expected = order[epoch][position : position + len(rows)]
            total["out of order"] += [row for row, _ in rows] != [row for row, _ in expected]
            total["other bytes"] += rows != expected
            position += len(rows)
            if position >= length:
                epoch, position = epoch + 1, 0
            states = {json.dumps(rank[1]) for rank in step}
            assert len(states) == 1, states
            state = states.pop()
            at = json.loads(state)
            assert (at["epoch"], at["samples"]) == (epoch, position), (at, epoch, position, how)
    for rows in came.values():
        ids = [row for row, _ in rows]
        total["lost"] += len(set(range(length)) - set(ids))
        total["repeated"] += len(ids) - len(set(ids))
    total["runs"] += 1
    bad = [name for name in ("lost", "repeated", "out of order", "other bytes") if total[name]]
    if bad:
        sys.exit(f"seed {seed}, run {number}: {total}")
print(json.dumps(total))
"""


def campaign(apart, data, seed, runs, varied, deadline):
    ended = apart(RUNS, data, seed, runs, varied, deadline=deadline)
    assert ended.code == 0, ended.err
    total = json.loads(ended.out)
    assert total["runs"] == runs
    assert total["kills"] >= runs
    assert [total[name] for name in ("lost", "repeated", "out of order", "other bytes")] == [0, 0, 0, 0]
    assert ended.left == ()
    return total


@pytest.mark.case(34, 35, 36)
@pytest.mark.parametrize(
    "varied", ["settings", *(pytest.param(each, marks=pytest.mark.slow) for each in ("nothing", "ranks"))]
)
def test_a_few_runs(apart, data, any_seed, varied):
    campaign(apart, data, any_seed, 6, varied, 100)


TRAINING = """
import json, os, sys
import numpy as np
import penstock as ps

data, folder, threads, memory = sys.argv[1:]
loader = ps.Loader(ps.open(data), batch_size=6, shuffle=True, seed=5, threads=int(threads), memory=memory,
                   output="numpy")
if os.path.exists(f"{folder}/state.json"):
    with open(f"{folder}/state.json") as file:
        loader.load_state_dict(json.load(file))
with open(f"{folder}/log", "a") as log:
    while loader.state_dict()["epoch"] < 3:
        for batch in loader:
            state = loader.state_dict()
            log.write(json.dumps([state["epoch"], state["samples"], batch["data"][:, 0].tolist()]) + chr(10))
            log.flush()
            with open(f"{folder}/part", "w") as file:
                json.dump(state, file)
            os.replace(f"{folder}/part", f"{folder}/state.json")
            print("one more", flush=True)
"""


@pytest.mark.slow
@pytest.mark.case(34)
def test_a_program_that_saves_its_state_after_every_batch(data, tmp_path, start, any_seed):
    """As people write it: the state in a file, another interpreter after each kill, also a kill amid its start."""
    random = np.random.default_rng(any_seed)
    kills, log = 0, []
    for _ in range(10):
        threads, memory = int(random.integers(1, 5)), f"{random.integers(16, 65)}MiB"
        child = start(TRAINING, data / "chunks.h5", tmp_path, threads, memory)
        for _ in range(int(random.choice([0, *random.integers(1, 30, 4)]))):
            child.stdout.readline()
        time.sleep(float(random.uniform(0, 0.002)))
        os.kill(child.pid, signal.SIGKILL)
        err = child.communicate(timeout=60)[1]
        assert child.returncode in (0, -signal.SIGKILL), err
        kills += child.returncode != 0
        if (tmp_path / "state.json").exists():
            state = json.loads((tmp_path / "state.json").read_text())
            log = [json.loads(line) for line in (tmp_path / "log").read_text().split("\n")[:-1]]
            log = [line for line in log if tuple(line[:2]) <= (state["epoch"], state["samples"])]
            (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in log))
        if child.returncode == 0 or (log and log[-1][:2] == [3, 0]):
            break
    assert kills > 3
    with ps.Loader(ps.open(data / "chunks.h5"), batch_size=6, shuffle=True, seed=5, memory="64MiB") as loader:
        whole = [batch["data"][:, 0].tolist() for _ in range(3) for batch in loader]
    assert [rows for _, _, rows in log] == whole[: len(log)]
    assert len(log) > 10


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_runs(apart, data, any_seed):
    total = campaign(apart, data, any_seed, 200, "ranks", 800)
    print(f"seed {any_seed}: {total}")
