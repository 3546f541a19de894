"""Functions of the caller's, and threads and workers, that raise: the error arrives, with what was raised and where."""

import json
import os
import subprocess
import traceback

import numpy as np
import pytest

import penstock as ps
from penstock.errors import TransformFailed, WorkerDied

ROWS, BAD = 60, 37


class TwoArguments(Exception):
    """What torch's workers cannot rebuild: it takes more than a text."""

    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")


RAISED = [
    (ValueError("bad value"), "ValueError: bad value"),
    (MemoryError("no more of it"), "MemoryError: no more of it"),
    (TwoArguments("broken", "here"), "TwoArguments: broken at here"),
    (SystemExit("the end"), "SystemExit: the end"),
    (StopIteration("no more"), "StopIteration: no more"),
    (KeyError("name"), "KeyError: 'name'"),
]


def raising(error):
    def augment(batch):
        if (batch["number"] == BAD).any():
            raise error
        return {"number": batch["number"] * 2}

    return augment


@pytest.fixture
def numbers(tmp_path):
    np.save(tmp_path / "numbers.npy", np.arange(ROWS))
    return ps.open(tmp_path / "numbers.npy").rename(number="data")


@pytest.mark.case(26, 32)
@pytest.mark.parametrize(("error", "told"), RAISED, ids=[told.partition(":")[0] for _, told in RAISED])
def test_a_function_that_raises(numbers, error, told):
    """Its own error, its own traceback, the sample and its file; the batches before are whole."""
    with ps.Loader(numbers.map(raising(error)), batch_size=8, memory="64MiB", threads=2, output="numpy") as loader:
        for epoch in range(2):
            seen = []
            with pytest.raises(TransformFailed) as failed:
                seen.extend(row for batch in loader for row in batch["number"].tolist())
            assert seen == list(range(0, 2 * (BAD // 8 * 8), 2))
            said = str(failed.value)
            assert f"map: augment raised {told}" in said
            assert f"fails for row {BAD}" in said
            assert "numbers.npy" in said
            cause = failed.value.__cause__
            assert cause is error
            assert cause.__traceback__ is not None
            names = [frame.name for frame in _frames(cause)]
            assert names[-1] == "augment", "the traceback ends in the function"
            assert f"batch {BAD // 8} of epoch {epoch}" in failed.value.__notes__[0]


def _frames(error):
    return traceback.extract_tb(error.__traceback__)


@pytest.mark.case(32)
def test_only_together(numbers):
    """Not every failure is one sample's."""

    def augment(batch):
        if len(batch["number"]) > 4 and batch["number"][0] >= 16:
            raise ValueError("too many")
        return {"number": batch["number"]}

    with (
        ps.Loader(numbers.map(augment), batch_size=8, memory="64MiB", threads=1, output="numpy") as loader,
        pytest.raises(TransformFailed, match=r"too many; it was given rows \d+, ") as failed,
    ):
        list(loader)
    assert "by itself" not in str(failed.value)


@pytest.mark.case(26)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, BaseException])
def test_what_would_end_a_program_does_not_end_a_thread_in_silence(numbers, kind):
    ds = numbers.map(raising(kind("who knows why")))
    with ps.Loader(ds, batch_size=8, memory="64MiB", threads=2, output="numpy") as loader:
        seen = []
        with pytest.raises(WorkerDied, match="who knows why") as failed:
            seen.extend(row for batch in loader for row in batch["number"].tolist())
        assert isinstance(failed.value.__cause__, kind)
        assert f"batch {BAD // 8} of epoch 0" in failed.value.__notes__[0]
        assert seen == list(range(0, 2 * (BAD // 8 * 8), 2)), "all batches before it"


# In workers of torch: forked, so that the functions need not be imported there.


WORKERS = """
import json, sys
import numpy as np
import penstock as ps
from torch.utils.data import DataLoader

error = None

class TwoArguments(Exception):
    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")

def augment(batch):
    if error is not None and (batch["number"] == 37).any():
        raise error
    return {"number": batch["number"] * 2}

ds = ps.open(sys.argv[1]).rename(number="data").map(augment)
for error in (ERRORS):
    seen = []
    try:
        for batch in DataLoader(ds, batch_size=8, num_workers=2, multiprocessing_context="fork"):
            seen += batch["number"].tolist()
    except Exception as raised:
        print(json.dumps([seen, type(raised).__name__, str(raised)]))
"""

IN_WORKERS = [
    ('ValueError("bad value")', "ValueError: bad value"),
    ('MemoryError("no more of it")', "MemoryError: no more of it"),
    ('TwoArguments("broken", "here")', "TwoArguments: broken at here"),
    ('SystemExit("the end")', "SystemExit: the end"),
]


@pytest.mark.slow
@pytest.mark.case(26, 32)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_function_that_raises_in_a_worker_of_torch(numbers, tmp_path, apart):
    """All in one process: importing torch takes longer than they do."""
    errors = ", ".join(error for error, _ in IN_WORKERS)
    ended = apart(WORKERS.replace("ERRORS", errors), tmp_path / "numbers.npy", deadline=60)
    assert ended.code == 0, ended.err
    for line, (_, told) in zip(ended.out.splitlines(), IN_WORKERS, strict=True):
        seen, kind, said = json.loads(line)
        assert seen == list(range(0, 64, 2)), told
        assert kind == "TransformFailed"
        assert f"map: augment raised {told}" in said
        assert f"fails for row {BAD}" in said
        assert "numbers.npy" in said
        assert ", in augment\n" in said, "the function's own line is shown too"
    assert ended.left == ()


@pytest.mark.case(26)
def test_results_that_cannot_be_sent_to_another_process(numbers):
    """A worker of torch would drop them in silence and leave its parent waiting; here they are refused before."""
    for thing in (lambda: 1, (value for value in (1, 2)), subprocess):
        with pytest.raises(TransformFailed, match="Python objects"):
            numbers.map(lambda batch, thing=thing: {"x": np.array([thing] * len(batch["number"]), object)})


UNSENDABLE = """
import json, sys, threading
import numpy as np
import penstock as ps
from penstock import webdataset as wds
from torch.utils.data import DataLoader

class Greedy:
    def __reduce__(self):
        raise MemoryError("no more of it")

things = {"pickle": threading.Lock, "more of it": Greedy}

def unsendable(samples):
    return [things[sys.argv[2]]() for sample in samples]

if sys.argv[1] == "map-style":
    loader = DataLoader(ps.from_arrays(x=np.arange(40)), batch_size=4, num_workers=2, collate_fn=unsendable,
                        multiprocessing_context="fork")
else:
    pipeline = wds.DataPipeline(tuple({"x": number} for number in range(40)), unsendable)
    loader = wds.WebLoader(pipeline, batch_size=None, num_workers=1, multiprocessing_context="fork")
try:
    print(len(list(loader)))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.case(26)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["map-style", pytest.param("stream", marks=pytest.mark.slow)])
@pytest.mark.parametrize("why", ["pickle", pytest.param("more of it", marks=pytest.mark.slow)])
def test_a_worker_that_cannot_send_what_it_made(apart, kind, why):
    """Python's queue drops it and goes on, so that torch would wait for ever."""
    ended = apart(UNSENDABLE, kind, why, deadline=40)
    assert ended.code == 0, ended.err
    assert "exited unexpectedly" in ended.out
    assert "cannot be sent to its parent" in ended.err
    assert why in ended.err
    assert ended.left == ()
