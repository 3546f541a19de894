"""Changes datasets and reads what becomes of them: ``python fuzz_child.py SAMPLES SCRATCH FORMAT:FIRST:END …``.

Prints a line when a mutation begins (``FORMAT seed``), so that a parent knows which one a dead or hanging child was at,
and one when it is over: ``FORMAT seed seconds peak_bytes outcome``, tabs between. An outcome that begins with ``BAD``
breaks a promise; the others say what happened. ``… FORMAT:SEED:SEED+1`` does one again, and leaves it in SCRATCH.
"""

import gzip
import io
import json
import os
import resource
import shutil
import sys
import time
import traceback
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import mutations
import numpy as np
import oracles
from mutations import mutate, mutate_same_length, mutate_text, pick

import penstock as ps
from penstock.errors import PenstockError

BUDGET = 64 * 2**20
SPARE = 64 * 2**20
"""What may be held above the budget: what opening takes, and what allocators keep."""
CPU_S = 5.0
MANY_ROWS = 10_000
"""A document may declare millions of rows that are not there; to tell of each of them takes its time."""
DOCUMENTS = (".json", ".zarray", ".zattrs", ".zgroup")


@dataclass
class Sample:
    """A dataset as it was written, and what is known of its bytes."""

    name: str
    path: Path
    data: dict
    covered: dict
    sealed: list
    weak: bool
    """Whether its checksum is Fletcher's, to which a chunk of zeros has the sum 0, and so is whole."""
    other: bytes
    verified: dict
    """What ``verify`` alone compares with a checksum."""
    expected: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, name: str) -> "Sample":
        known = json.loads((folder / f"{name}.json").read_text())
        path = folder / name / known["path"]
        others = [each for each in sorted(folder.glob(f"*/{known['path']}")) if each != path and each.is_file()]
        other = others[len(name) % len(others)].read_bytes() if others else b""
        sealed, weak = known.get("sealed", []), known.get("weak", False)
        return cls(name, path, known["data"], known["covered"], sealed, weak, other, known.get("verified", {}))

    def covers(self, change: "Change") -> bool:
        """Whether a checksum must notice a change."""
        after = change.after.get("") or b""
        spans = self.covered.get("", [])
        return change.lies_in(self.covered) and not (
            self.weak and any(len(set(after[begin:end])) == 1 for begin, end in spans)
        )

    def focus(self, file: str, data: bytes) -> list[tuple[int, int]]:
        """What is not values."""
        ends = self.data.get(file, [])
        if ends is True or not ends:
            return [(0, min(400, len(data))), (max(0, len(data) - 400), len(data))]
        between = zip([0, *(end for _, end in sorted(ends))], [*(at for at, _ in sorted(ends)), len(data)], strict=True)
        return [(begin, end) for begin, end in between if begin < end]


@dataclass
class Change:
    """What was done to a dataset: files before and after, and whether checksums were made right again."""

    before: dict[str, bytes] = field(default_factory=dict)
    after: dict[str, bytes | None] = field(default_factory=dict)
    sealed: bool = False

    def lies_in(self, spans: dict) -> bool:
        """Whether only bytes in these spans differ."""
        return not self.sealed and all(self._lies_in(name, spans.get(name, [])) for name in self.after)

    def _lies_in(self, name: str, spans) -> bool:
        before, after = self.before[name], self.after[name]
        if spans is True:
            return after is not None
        if after is None or len(before) != len(after):
            return False
        differs = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
        inside = np.zeros(len(before), bool)
        for begin, end in spans:
            inside[begin:end] = True
        return bool(inside[differs].all())


def change(sample: Sample, goal: Path, rng: np.random.Generator) -> Change:
    """Copy a dataset, changed."""
    if sample.path.is_dir():
        shutil.copytree(sample.path, goal)
        return change_folder(sample, goal, rng)
    before = sample.path.read_bytes()
    after, sealed = change_bytes(sample, before, rng)
    goal.write_bytes(after)
    return Change({"": before}, {"": after}, sealed)


def change_folder(sample: Sample, goal: Path, rng: np.random.Generator) -> Change:
    files = sorted(str(each.relative_to(goal)) for each in goal.rglob("*") if each.is_file())
    documents = [name for name in files if name.endswith(DOCUMENTS)]
    name = pick(rng, documents) if documents and rng.random() < 0.4 else pick(rng, files)
    other = pick(rng, files)
    before, second = (goal / name).read_bytes(), (goal / other).read_bytes()
    how, done = rng.random(), Change({name: before, other: second})
    if how < 0.04:
        (goal / name).unlink()
        done.after = {name: None}
    elif how < 0.08 and not other.endswith(DOCUMENTS) and not name.endswith(DOCUMENTS):
        done.after, done.sealed = {name: second}, True
    elif name.endswith(DOCUMENTS) and rng.random() < 0.85:
        done.after = {name: mutate_text(before, rng)}
    else:
        parts = b"" if sample.covered.get(name) is True else second  # chunks of another shard are whole, too
        after = mutate(before, rng, sample.focus(name, before), parts)
        if name.endswith(".png") and rng.random() < 0.5:
            after, done.sealed = mutations.seal_png(after), True
        done.after = {name: after}
    for changed, content in done.after.items():
        if content is not None:
            (goal / changed).write_bytes(content)
    return done


def change_bytes(sample: Sample, data: bytes, rng: np.random.Generator) -> tuple[bytes, bool]:
    """A changed file, and whether its checksums were made right again."""
    kind, focus, seals = sample.name.partition("-")[0], sample.focus("", data), rng.random() < 0.6
    if kind == "tar":
        text = sample.name == "tar-pax" and rng.random() < 0.4
        after = mutate_same_length(data, rng, focus) if text else mutate(data, rng, focus, sample.other)
        return (mutations.seal_tar(after), True) if seals else (after, False)
    if sample.sealed:
        after = mutate(data, rng, sample.sealed, sample.other)
        return (mutations.seal_hdf5(after, sample.sealed), True) if seals else (after, False)
    if sample.path.suffix == ".gz" and seals:
        return gzip.compress(mutate(gzip.decompress(data), rng, [(0, 352)]), 1, mtime=0), True
    if kind in ("npz", "zarr") and seals:
        return change_member(data, rng), True
    if kind == "npy" and rng.random() < 0.5:
        return change_npy(data, rng), False
    return mutate(data, rng, focus, sample.other), False


def change_npy(data: bytes, rng: np.random.Generator) -> bytes:
    """Words of its header, the length of which is right again as a rule."""
    end = 10 + int.from_bytes(data[8:10], "little")
    header = mutate_text(data[10:end].rstrip(), rng)
    length = pick(rng, (len(header) + 1, end - 10, end - 10))
    return data[:8] + (length % 65536).to_bytes(2, "little") + header.ljust(length - 1) + b"\n" + data[end:]


def change_member(data: bytes, rng: np.random.Generator) -> bytes:
    """A member of a zip archive changed, and the archive written anew."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(stream, "w") as after:
        names = before.namelist()
        chosen = pick(rng, names)
        for member in before.infolist():
            content = before.read(member)
            if member.filename == chosen and chosen.endswith(".npy"):
                content = change_npy(content, rng) if rng.random() < 0.6 else mutate(content, rng, [(0, 128)])
            elif member.filename == chosen:
                content = mutate_text(content, rng) if chosen.endswith(DOCUMENTS) else mutate(content, rng)
            after.writestr(member, content, member.compress_type)
    return stream.getvalue()


def loaded(ds: ps.Dataset, **options) -> tuple[dict[str, np.ndarray], ps.Loader]:
    """What a loader delivers, in the order of the rows, with the rows themselves."""
    columns = (*ds.fields, "__index__")
    batches: list[tuple] = []
    with ps.Loader(
        ds, batch_size=5, memory=BUDGET, threads=2, shuffle=True, output="numpy", columns=columns, **options
    ) as loader:
        batches += (tuple(each if isinstance(each, list) else np.array(each) for each in batch) for batch in loader)
        loader.report()
    parts = [[_array(each) for each in column] for column in zip(*batches, strict=True)]
    whole = {name: np.concatenate(column) for name, column in zip(columns, parts, strict=True)} if batches else {}
    order = np.argsort(whole["__index__"]) if batches else []
    return {name: column[order] for name, column in whole.items()}, loader


def _array(values) -> np.ndarray:
    return np.array([repr(each) for each in values], object) if isinstance(values, list) else values


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(*map(_bits, (one[name], other[name]))) for name in one
    )


def _bits(values: np.ndarray) -> np.ndarray:
    """So that NaN is like itself."""
    return values if values.dtype.hasobject else np.ascontiguousarray(values)[..., None].view(np.uint8)


def schema(values: dict[str, np.ndarray]) -> dict:
    return {name: (column.dtype, column.shape) for name, column in values.items() if name != "__index__"}


def judged(sample: Sample, changed: Change, path: Path) -> str:
    try:
        ds = ps.open(path, index_dir=False)
        got, _ = loaded(ds)
    except PenstockError as error:
        if not str(error):
            return f"BAD {type(error).__name__} without a text"
        told = "" if rows_of(path) > MANY_ROWS else f"{verified(path, fails=True)}{skipped(sample, changed, path)}"
        return f"{type(error).__name__} {told}"
    rows = len(ds)
    if any(len(column) != rows for column in got.values()) or not np.array_equal(got["__index__"], np.arange(rows)):
        return f"BAD rows: {rows} samples, {schema(got)}"
    told = verified(path, fails=False) if rows <= MANY_ROWS else ""
    if same(got, sample.expected):
        return f"right {told}"
    if sample.covers(changed):
        return f"BAD silent: covered bytes changed, other values came {told}"
    if sample.verified and changed.lies_in(sample.verified) and ps.verify(path, memory=BUDGET, index_dir=False).sound:
        return "BAD silent: verify found nothing where covered bytes changed"
    if changed.lies_in(sample.data):
        alike = schema(got) == schema(sample.expected)
        return f"values {told}" if alike else f"BAD schema: {schema(got)} from other values"
    return f"{compared(sample, path, got)} {told}"


def rows_of(path: Path) -> int:
    try:
        return len(ps.open(path, index_dir=False, on_error="skip"))
    except PenstockError:
        return 0


def compared(sample: Sample, path: Path, got: dict[str, np.ndarray]) -> str:
    """What was delivered from a dataset whose description changed, beside what the format's library reads."""
    said = oracles.read(sample.name, path)
    if isinstance(said, str):
        if sample.verified and "CRC" in said and not ps.verify(path, memory=BUDGET, index_dir=False).sound:
            return "values that verify alone compares with a checksum"
        return f"BAD lenient: delivered {schema(got)} where the format's library says {said}"
    for name in ps.open(path, index_dir=False).fields_left_out:  # with the reason, in a warning
        said.pop(name, None)
    if sample.name in oracles.PICTURES:  # decoders differ in what they make of damaged pictures
        alike = schema(got)["image"][1] == schema(said)["image"][1]
    elif sample.name in oracles.SHAPES_ALONE:
        alike = schema(got) == schema(said)
    elif sample.name in oracles.SCALED:  # nibabel scales in float64, penstock in float32
        alike = schema(got)["data"][1] == said["data"].shape and np.allclose(got["data"], said["data"], equal_nan=True)
    else:
        alike = same({name: got[name] for name in got if name != "__index__"}, said)
    return "as the library" if alike else f"BAD unlike the library: {schema(got)} against {schema(said)}"


def verified(path: Path, fails: bool) -> str:
    """Whether a verification says the same as the loader."""
    try:
        verdict = ps.verify(path, memory=BUDGET, index_dir=False)
    except PenstockError:
        return "" if fails else "BAD verify raised where the loader delivered"
    if fails == (verdict.unreadable == 0):
        return f"BAD verify found {verdict.unreadable} where the loader {'failed' if fails else 'delivered'}"
    return ""


def skipped(sample: Sample, changed: Change, path: Path) -> str:
    """With on_error="skip" every row comes or is told, and what is covered is right."""
    try:
        ds = ps.open(path, index_dir=False, on_error="skip")
        got, loader = loaded(ds, on_error="skip")
    except PenstockError:
        return ""
    report, came = loader.stats(), len(got.get("__index__", ()))
    if came + report.left_out_samples != len(ds):
        return f"BAD skip: {came} came and {report.left_out_samples} were left out of {len(ds)}"
    if not got or ds.left_out or not sample.covers(changed):
        return "skipped"
    rows = got["__index__"]
    right = same(got, {name: column[rows] for name, column in sample.expected.items()})
    return "skipped" if right else "BAD silent: rows left by skip are others"


def memory(entry: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(entry))


def one(sample: Sample, scratch: Path, seed: int) -> tuple[float, int, str]:
    """Seconds, peak of memory, and what came of it."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    rng = np.random.default_rng([seed, *sample.name.encode()])
    path = scratch / sample.path.name
    changed = change(sample, path, rng)
    Path("/proc/self/clear_refs").write_text("5")
    before, began = memory("VmRSS:"), (time.monotonic(), time.process_time())
    try:
        outcome = judged(sample, changed, path)
    except BaseException:
        outcome = f"BAD foreign: {traceback.format_exc()[-1500:]!r}"
    peak, cpu = memory("VmHWM:") - before, time.process_time() - began[1]
    if peak > BUDGET + SPARE:
        outcome = f"BAD memory: {peak / 2**20:.0f} MiB; {outcome}"
    if cpu > CPU_S:
        outcome = f"BAD slow: {cpu:.1f} s; {outcome}"
    return time.monotonic() - began[0], peak, outcome


def main(samples: Path, scratch: Path, jobs: list[str]) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    warnings.simplefilter("ignore")
    limit = memory("VmData:") + 2**31
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for job in jobs:
        name, first, end = job.split(":")
        sample = Sample.load(samples, name)
        sample.expected, _ = loaded(ps.open(sample.path, index_dir=False))
        ps.verify(sample.path, memory=BUDGET, index_dir=False)
        if isinstance(oracles.read(name, sample.path), str) or "BAD" in compared(sample, sample.path, sample.expected):
            raise AssertionError(f"{name}: the library reads the unchanged file otherwise")
        for seed in range(int(first), int(end)):
            print(name, seed, sep="\t", file=out)
            seconds, peak, outcome = one(sample, scratch, seed)
            print(name, seed, f"{seconds:.2f}", peak, outcome.replace("\n", " "), sep="\t", file=out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)
