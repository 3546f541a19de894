"""Memory that is short: skewed samples, a sample above the budget, a limit of the system, epochs without end, and plans
of any shape. Each runs in a process of its own, whose whole tree is measured.
"""

import json
import os
import sys

import numpy as np
import pytest

from penstock.base import cgroups
from penstock.base.sizes import KiB, MiB
from penstock.base.spec import FieldSpec
from penstock.errors import BudgetExceeded
from penstock.loader.plan import holders, least, make_plan
from penstock.loader.plan_request import Request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

SKEWED = """
import io, json, sys, tarfile, zlib
import numpy as np
import penstock as ps
from penstock.base import cgroups
from penstock.errors import BudgetExceeded
from penstock.testing.measure import MemoryWatch

rng = np.random.default_rng(5)
contents = [rng.bytes(12_000_000 if row % 10 == 9 else 400_000) for row in range(40)]
with tarfile.open("skewed.tar", "w") as archive:
    for row, content in enumerate(contents):
        member = tarfile.TarInfo(f"{row:04d}.bin")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
sums = {zlib.crc32(content): row for row, content in enumerate(contents)}
assert len(sums) == 40
del contents, content

def loader(memory, threads):
    ds = ps.open("skewed.tar", decoders={"bin": "bytes"}, index_dir=False)
    return ps.Loader(ds, batch_size=1, memory=memory, threads=threads, shuffle=True, output="numpy")

try:
    loader(1, 1)
except BudgetExceeded as error:
    least = int(str(error).split("(")[1].split(" bytes")[0].replace(",", ""))
told = []
for threads in (1, 4):
    for memory in (least, 100_000_000):
        with MemoryWatch() as watch:
            rows = []
            for batch in loader(memory, threads):
                rows.append(sums[zlib.crc32(batch["bin"][0])])
                del batch
        assert sorted(rows) == list(range(40))
        told.append((watch.peak_bytes, memory))
print(json.dumps(told))
"""


@pytest.mark.case(39)
def test_samples_of_very_different_sizes_stay_inside_the_budget(apart):
    done = apart(SKEWED, deadline=60)
    assert done.code == 0, done.err
    for peak, memory in json.loads(done.out):
        assert peak <= memory, json.loads(done.out)
        assert peak > 12_000_000, "less than the largest sample cannot have been measured right"


TOO_LARGE = """
import sys
import numpy as np
import penstock as ps
from penstock.base import cgroups
from penstock.errors import BudgetExceeded
from penstock.base.machine import held_bytes

np.lib.format.open_memmap("large.npy", "w+", np.float32, (3, 30_000_000))
before = held_bytes()
try:
    ps.Loader(ps.open("large.npy"), batch_size=1, memory="64MiB", output="numpy")
except BudgetExceeded as error:
    print(error)
assert held_bytes() - before < 16 * 2**20
"""


@pytest.mark.case(40)
def test_a_sample_above_the_budget_is_refused_before_anything_is_allocated(apart):
    done = apart(TOO_LARGE)
    assert done.code == 0, done.err
    assert "memory=64.0 MiB is too small" in done.out
    assert "'data' (float32 (30000000,))" in done.out


UNDER_A_LIMIT = """
import resource, sys
import numpy as np
import penstock as ps
from penstock.base.machine import free_bytes

np.lib.format.open_memmap("wide.npy", "w+", np.float32, (256, 2**18))  # rows of 1 MiB, read without a mapping
kind, name = sys.argv[1:]
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024
limit = used + 160 * 2**20
resource.setrlimit(getattr(resource, kind), (limit, limit))
assert free_bytes() <= 160 * 2**20, free_bytes()
ds = ps.open("wide.npy")
loader = ps.Loader(ds, batch_size=4, output="numpy")
assert loader.plan.limit_bytes <= 40 * 2**20, loader.plan
print(sum(len(batch["data"]) for batch in loader))
try:
    list(ps.Loader(ds, batch_size=64, memory="4GiB", threads=1, output="numpy"))
except ps.Unavailable as error:
    print(error)
"""


@pytest.mark.case(40)
@pytest.mark.parametrize("limit", [("RLIMIT_DATA", "VmData:"), ("RLIMIT_AS", "VmSize:")])
def test_without_a_budget_training_stays_inside_the_limits_of_the_process(apart, limit):
    done = apart(UNDER_A_LIMIT, *limit, env={"OPENBLAS_NUM_THREADS": "1"})
    assert done.code == 0, done.err
    rows, refused = done.out.splitlines()
    assert rows == "256"
    assert "MiB of memory: Cannot allocate memory. Lower memory=, or raise the limit" in refused


LIMITED = """
import importlib, os, resource, sys, traceback
import numpy as np
import penstock as ps
from penstock.base import cgroups
from penstock.errors import BudgetExceeded

for library in ("h5py", "imagecodecs", "PIL.Image", "zarr", "tiledb", "pyarrow.parquet", "hdf5plugin", "torch"):
    importlib.import_module(library)

def loader(path, memory, output):
    ds = ps.open(path, index_dir=False)
    return ps.Loader(ds, batch_size=5, memory=memory, threads=2, shuffle=True, output=output)

def epoch(path, output):
    try:
        loader(path, 1, output)
    except BudgetExceeded as error:
        least = int(str(error).split("(")[1].split(" bytes")[0].replace(",", ""))
    with open("/proc/self/status") as status:
        data = next(int(line.split()[1]) for line in status if line.startswith("VmData:")) * 1024
    limit = data + least + 64 * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return sum(len(next(iter(batch.values()))) for batch in loader(path, least, output))

folder, names = sys.argv[1], sys.argv[2].split()
ps.open, ps.Loader  # imported now
for name in names:
    child = os.fork()  # memory as it is after the imports, which take a while
    if child == 0:
        try:
            print(name, epoch(f"{folder}/{name}", "torch" if name == "a.npy" else "numpy"), flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name, "died")
"""

GROUPED = """
import os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))  # before anything is taken: what is held already stays with the group it was taken in
import numpy as np
import torch
import penstock as ps

rng = np.random.default_rng(3)
values = np.lib.format.open_memmap("large.npy", "w+", np.float32, (1600, 2**17))
for row in values:
    row[:] = rng.random(len(row), np.float32)
del values, row
loader = ps.Loader(ps.open("large.npy"), batch_size=32, memory=None, shuffle=True, processes=int(sys.argv[2]))
print(loader.plan.limit_bytes)
model = torch.nn.Linear(2**17, 4)
samples = 0
for batch in loader:
    model(batch["data"]).sum().backward()
    samples += len(batch["data"])
print(samples)
"""


@pytest.fixture
def group_of_600_mib():
    """A memory cgroup below this process's own, and below one whose limit it has."""
    try:
        own = next(iter(cgroups.memory_groups()), None)
        outer = own.folder / f"penstock-test-{os.getpid()}"
        outer.mkdir()
    except (AttributeError, OSError) as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    inner = outer / "inner"
    try:
        if own.version == 2:
            (outer / "cgroup.subtree_control").write_text("+memory")
        inner.mkdir()
        (outer / ("memory.max" if own.version == 2 else "memory.limit_in_bytes")).write_text(str(600 * MiB))
        yield inner
    except OSError as error:
        pytest.skip(f"no memory cgroup can be limited here: {error}")
    finally:
        for folder in (inner, outer):
            if folder.exists():
                folder.rmdir()


@pytest.mark.slow
@pytest.mark.case(40)
@pytest.mark.parametrize("processes", [0, 2])
def test_without_a_budget_training_stays_inside_the_limit_of_a_nested_cgroup(apart, group_of_600_mib, processes):
    """800 MiB of data in 600 MiB, which are the limit of the parent group alone."""
    done = apart(GROUPED, group_of_600_mib / "cgroup.procs", processes, deadline=120)
    assert done.code == 0, done.err
    limit, samples = map(int, done.out.split())
    assert limit < 600 * MiB / 4
    assert samples == 1600


FORMATS = (
    *("contiguous.h5", "chunks.h5", "pieces.h5", "library.h5", "a.tar", "a.npy", "a.npz", "packed.npz", "a.nii"),
    *("b.nii.gz", "a.zarr", "shards.zarr", "old.zarr", "a.lmdb", "a.tiledb", "a.parquet", "a.arrow", "pictures"),
    *("arrays",),
)


@pytest.mark.slow
@pytest.mark.case(40)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_epoch_of_every_format_comes_to_its_end_under_a_limit_of_the_system(apart, every_format):
    """RLIMIT_DATA at what the process has, the smallest budget, and 64 MiB."""
    done = apart(LIMITED, every_format, " ".join(FORMATS), deadline=100)
    assert done.out.splitlines() == [f"{name} 24" for name in FORMATS], done.err
    assert (done.code, done.left) == (0, ())


EPOCHS = """
import importlib, json, os, sys, threading
import numpy as np
import penstock as ps
from penstock.base.machine import held_bytes

folder, names, epochs = sys.argv[1], sys.argv[2].split(), int(sys.argv[3])
told = {}
for name in names:
    ds = ps.open(f"{folder}/{name}")
    loader = ps.Loader(ds, batch_size=5, memory="64MiB", threads=2, shuffle=True, output="numpy")
    counts = []
    for epoch in range(epochs):
        for batch in loader:
            pass
        del batch
        counts.append((held_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()))
    told[name] = counts
print(json.dumps(told))
"""


def check_flat(told):
    for name, counts in told.items():
        held, descriptors, threads = (np.array(each) for each in zip(*counts[1:], strict=True))  # the first warms up
        slope = np.polyfit(np.arange(len(held)), held, 1)[0]
        assert slope < 1e6, (name, held.tolist())
        assert len(set(descriptors)) == 1, (name, descriptors.tolist())
        assert len(set(threads)) == 1, (name, threads.tolist())


@pytest.mark.slow
@pytest.mark.case(41)
def test_ten_epochs_leave_nothing_behind(apart, every_format):
    done = apart(EPOCHS, every_format, " ".join(FORMATS), 10, deadline=100)
    assert done.code == 0, done.err
    check_flat(json.loads(done.out))


@pytest.mark.soak
@pytest.mark.case(41)
def test_two_hundred_epochs_leave_nothing_behind(apart, every_format):
    done = apart(EPOCHS, every_format, " ".join(FORMATS), 200, deadline=1500)
    assert done.code == 0, done.err
    for name, counts in json.loads(done.out).items():
        held = [each[0] for each in counts[1:]]
        assert np.polyfit(np.arange(len(held)), held, 1)[0] < 50_000, (name, held)


QUERIES = """
import json, sys
import numpy as np
import penstock as ps
from penstock.base.machine import held_bytes

ds = ps.open(sys.argv[1])
rows, out = np.arange(4), {name: spec.empty(4) for name, spec in ds.fields.items()}
held = []
for number in range(1800):
    ds.store.read_into(rows, rows, out)
    if number % 600 == 599:
        held.append(held_bytes())
print(json.dumps(held))
"""


@pytest.mark.slow
@pytest.mark.case(41)
def test_a_library_that_keeps_something_of_every_read_is_begun_anew(apart, every_format):
    done = apart(QUERIES, every_format / "a.tiledb", deadline=60)
    assert done.code == 0, done.err
    held = json.loads(done.out)
    assert max(held) - held[0] < 4 * MiB, held


WORKERS = """
import gc, json, os
import numpy as np
import torch
import penstock as ps
from penstock.base.machine import proportional_bytes
from penstock.base.machine import children

gc.disable()  # collecting touches every object of Python's and torch's, and so copies its page: not what is measured
ROWS = 10_000_000
np.save("a.npy", np.zeros(ROWS, np.int8))
ds = ps.open("a.npy").select(np.random.default_rng(0).permutation(ROWS))

def grown(batches):
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(64 * batches)), 64, False)
    loader = iter(torch.utils.data.DataLoader(ds, batch_sampler=sampler, num_workers=2))
    next(loader)
    workers = children(os.getpid())
    before = sum(map(proportional_bytes, workers))
    for number, _ in enumerate(loader, 2):
        if number == batches - 8:  # they end after their last
            return (sum(map(proportional_bytes, workers)) - before) / len(workers)

print(json.dumps(grown(150)))
"""


@pytest.mark.slow
@pytest.mark.case(41)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_index_of_ten_million_samples_is_shared_by_workers(apart):
    done = apart(WORKERS, deadline=60)
    assert done.code == 0, done.err
    assert json.loads(done.out) < 5e6


# Plans of any shape.

DTYPES = ("u1", "i2", "f4", "f8")


def some_request(rng: np.random.Generator) -> Request:
    """Fields, batch, threads and what reading borrows, as they come."""
    fields = {
        f"field{number}": FieldSpec(rng.choice(DTYPES), (int(2 ** rng.uniform(0, 23)),))
        for number in range(rng.integers(1, 5))
    }
    row_scratch, base_scratch = int(2 ** rng.uniform(0, 24)), int(2 ** rng.uniform(0, 22))
    batch, steps = int(2 ** rng.uniform(0, 9)), int(rng.integers(1, 1000))
    block = int(rng.integers(2, 200)) if rng.random() < 0.3 else 0
    return Request(
        fields=fields, batch_rows=batch, steps=steps, threads=int(rng.integers(1, 33)), limit_bytes=1,
        scratch_bytes=lambda rows: base_scratch + min(rows, 4) * row_scratch,
        index_bytes=int(2 ** rng.uniform(0, 26)), block_rows=block, window_rows=block * int(rng.integers(1, 9)),
        spare_slots=int(rng.integers(0, 3)),
    )  # fmt: skip


def with_limit(request: Request, limit: int) -> Request:
    return Request(**{**vars(request), "limit_bytes": limit})


@pytest.mark.case(40)
@pytest.mark.parametrize("plans", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_plans_keep_their_budgets(any_seed, plans):
    """What is accepted is planned within the budget; what is refused needs what the refusal names, and little more
    than two batches (or a window of them) and one thread's reading.
    """
    rng = np.random.default_rng([any_seed, 4])
    refused = 0
    for number in range(plans):
        request = some_request(rng)
        smallest = sum(holders([least(request)], threads=1).values())
        limit = int(smallest * 2 ** rng.uniform(-1, 4))
        if limit < smallest:
            refused += 1
            with pytest.raises(BudgetExceeded, match=f"the smallest that works is .*{smallest:,} bytes"):
                make_plan(with_limit(request, limit))
            limit = smallest
        plan = make_plan(with_limit(request, limit))
        assert plan.planned_bytes <= limit, number
        row = sum(spec.row_bytes for spec in request.fields.values())
        together = -(-request.window_rows // request.batch_rows) + 1 if request.window_rows else 1
        together = min(together, request.steps) if request.window_rows else 1
        rows = request.block_rows if request.window_rows else 1
        needed = (
            (1 + together + request.spare_slots) * request.batch_rows * row + request.scratch_bytes(rows)
            + request.index_bytes
        )  # fmt: skip
        assert smallest <= 1.3 * (needed + 6 * MiB + 4 * KiB * request.batch_rows), (number, smallest, needed)
    assert refused > plans / 20


RUN_PLANS = """
import json, os, sys
import h5py, imagecodecs
import numpy as np
import penstock as ps
from penstock.base import cgroups
from penstock.errors import BudgetExceeded
from penstock.testing.measure import MemoryWatch

seed, count = int(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng([seed, 40])
SHAPES = {"tiny": (300, 100), "small": (300, 8_000), "middle": (40, 200_000), "large": (6, 2_000_000)}
for name, shape in SHAPES.items():
    values = np.cumsum(rng.integers(-9, 10, shape, np.int8), axis=1, dtype=np.int16)
    np.save(f"{name}.npy", values)
    with h5py.File(f"{name}.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(1, shape[1]), compression="gzip", compression_opts=1)
    with h5py.File(f"{name}-rows.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(4, -(-shape[1] // 3)))
del values

def dataset(choice):
    parts = {}
    for number, (name, ending, rows, cast) in enumerate(choice):
        ds = ps.open(f"{name}{ending}", index_dir=False)
        (field,) = ds.fields
        ds = ds.cast(field, "float32", scale=0.5) if cast else ds
        parts[f"f{number}"] = (ds, rows)
    return ps.join(**parts)

def loader(choice, memory, batch, threads, shuffle):
    return ps.Loader(
        dataset(choice), batch_size=batch, memory=memory, threads=threads, shuffle=shuffle, output="numpy"
    )

def one(number):
    rng = np.random.default_rng([seed, 41, number])
    batch, threads, shuffle = int(rng.integers(1, 17)), int(rng.integers(1, 9)), bool(rng.integers(2))
    length, choice = batch * int(rng.integers(3, 7)), []
    for _ in range(rng.integers(1, 4)):
        name = str(rng.choice(list(SHAPES), p=[0.1, 0.2, 0.4, 0.3]))
        rows = rng.integers(0, SHAPES[name][0], length)
        choice.append((name, str(rng.choice([".npy", ".h5", "-rows.h5"])), rows, bool(rng.integers(2))))
    try:
        loader(choice, 1, batch, threads, shuffle)
    except BudgetExceeded as error:
        least = int(str(error).split("(")[1].split(" bytes")[0].replace(",", ""))
    tight = bool(rng.integers(2))
    limit = least if tight else int(least * rng.uniform(1, 3))
    with MemoryWatch() as watch:
        made, rows = loader(choice, limit, batch, threads, shuffle), 0
        for batch in made:
            rows += len(batch["f0"])
    told = {"number": number, "limit": limit, "peak": watch.peak_bytes, "tight": tight, "whole": rows == length}
    return told | {"batch": made.plan.batch_bytes, "kinds": [each[:2] for each in choice]}

ps.Loader  # imported now
for number in range(count):
    reads, writes = os.pipe()
    child = os.fork()  # fresh memory for each, and no second import of everything
    if child == 0:
        try:
            with os.fdopen(writes, "w") as out:
                out.write(json.dumps(one(number)))
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads) as told:
        print(told.read(), flush=True)
    assert os.waitpid(child, 0)[1] == 0, number
"""


def check_plans(done, count):
    assert done.code == 0, done.err
    told = [json.loads(line) for line in done.out.splitlines()]
    assert len(told) == count
    for each in told:
        assert each["whole"], each
        assert each["peak"] <= each["limit"], each
        assert each["peak"] > each["batch"] or each["batch"] < MiB, each
        if each["tight"]:
            assert each["limit"] <= 1.3 * each["peak"] + 8 * MiB, each


@pytest.mark.slow
@pytest.mark.case(40)
def test_some_plans_really_run(apart, any_seed):
    check_plans(apart(RUN_PLANS, any_seed, 6, deadline=100), 6)


@pytest.mark.soak
@pytest.mark.case(40)
def test_a_hundred_plans_really_run(apart, any_seed):
    check_plans(apart(RUN_PLANS, any_seed, 100, deadline=900), 100)
