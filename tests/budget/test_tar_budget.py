"""The budget is a law for tar archives too: pictures that are decoded, arrays that are read straight, parts of both.

Each case runs in a fresh process, so that no memory freed by an earlier test can hide what is taken.
"""

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
from PIL import Image

CHILD = Path(__file__).with_name("files_child.py")
MIB = 2**20
SIZE = (425, 425, 3)
VOLUME = (150, 150, 100)  # 9 MB in singles


def npy(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def picture(rng: np.random.Generator, kind: str, mode: str = "RGB", **options: Any) -> bytes:
    smooth = np.cumsum(rng.integers(-9, 10, SIZE), axis=1)
    stream = io.BytesIO()
    Image.fromarray((smooth + 128).astype(np.uint8)).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def large(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    """A picture that is large when decoded and small as a file, so that what decoding takes stands out."""
    stream = io.BytesIO()
    Image.new(mode, LARGE).save(stream, kind, **options)
    return stream.getvalue()


def deep_png() -> bytes:
    """16 bits for each of red, green, blue and alpha."""
    return imagecodecs.png_encode(np.full((*LARGE, 4), 1000, np.uint16), level=1)


LARGE = (1200, 1200)
LARGE_PICTURES: dict[str, Callable[[], bytes]] = {
    "progressive": lambda: large("JPEG", progressive=True, subsampling=0),
    "inks": lambda: large("JPEG", "CMYK"),
    "png": lambda: large("PNG"),
    "alpha": lambda: large("PNG", "RGBA"),
    "deep": deep_png,
    "webp": lambda: large("WEBP"),
    "tiff": lambda: large("TIFF"),
}


def write(path: Path, samples: Iterable[tuple[str, dict[str, bytes]]]) -> None:
    with tarfile.open(path, "w") as archive:
        for key, members in samples:
            for field, content in members.items():
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards each of pictures with arrays, of volumes, and one of each kind of large picture."""
    root = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    jpegs = [picture(rng, "JPEG", quality=90) for _ in range(8)]
    arrays = [npy(rng.normal(size=(3, 15724)).astype(np.float16)) for _ in range(8)]
    volumes = [npy(rng.normal(size=VOLUME).astype(np.float32)) for _ in range(2)]
    for shard in range(2):
        write(
            root / f"pictures-{shard}.tar",
            ((f"{shard}-{n:03d}", {"jpg": jpegs[n % 8], "npy": arrays[-n % 8], "cls": b"%d" % n}) for n in range(48)),
        )
        write(root / f"volumes-{shard}.tar", ((f"{shard}-{n:03d}", {"npy": volumes[n % 2]}) for n in range(10)))
    for name, make in LARGE_PICTURES.items():
        write(root / f"{name}-0.tar", ((f"{n:03d}", {"png": make()}) for n in range(8)))
    sizes = [(300, 900), (1100, 1000), (64, 64), (500, 200)]
    write(root / "unequal-0.tar", ((f"{n:03d}", {"jpg": shaped(rng, sizes[n % 4])}) for n in range(40)))
    said = [json.dumps([[]] * (n % 7 * 4000)).encode() for n in range(40)]
    write(root / "said-0.tar", ((f"{n:03d}", {"json": said[n], "txt": said[-n], "cls": b"1"}) for n in range(40)))
    return root


def shaped(rng: np.random.Generator, size: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(stream, "JPEG")
    return stream.getvalue()


def run(folder: Path, shards: str, **job: Any) -> dict[str, int]:
    job |= {"path": str(folder / f"{shards}-*.tar")}
    done = subprocess.run([sys.executable, CHILD, json.dumps(job)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(held: dict[str, int]) -> None:
    assert held["samples"] > 5
    assert held["peak"] <= held["limit"], held
    assert held["peak"] > held["batch"], "a peak below one batch cannot have been measured right"


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 32])
@pytest.mark.parametrize(("memory", "threads"), [(None, 2), (512 * MIB, 4)])
def test_pictures_and_arrays(folder: Path, batch_size: int, memory: int | None, threads: int) -> None:
    held = run(folder, "pictures", cast=["jpg"], batch_size=batch_size, memory=memory, threads=threads)
    check(held)
    assert held["rows"] == 2 * 96
    assert held["planned"] <= held["limit"]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 256 * MIB])
def test_volumes(folder: Path, memory: int | None) -> None:
    check(run(folder, "volumes", batch_size=4, memory=memory, threads=2))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["crop", "mask"])
@pytest.mark.parametrize(("shards", "field"), [("volumes", "npy"), ("pictures", "jpg")])
def test_parts_of_each_row(folder: Path, shards: str, field: str, part: str) -> None:
    """What says which elements are wanted is part of the plan."""
    check(run(folder, shards, **{part: field}, cast=[field], batch_size=1, memory=None, threads=2))


@pytest.mark.slow
@pytest.mark.parametrize("fit", ["resize", "cover"])
def test_pictures_brought_to_one_size(folder: Path, fit: str) -> None:
    """The largest of them is decoded whole, and known before anything is read."""
    check(run(folder, "unequal", open={"size": (224, 224), "fit": fit}, batch_size=2, memory=None, threads=2))


@pytest.mark.slow
def test_text_and_json(folder: Path) -> None:
    """Empty lists are the worst that JSON can do: three bytes become many."""
    held = run(folder, "said", batch_size=4, memory=None, threads=2)
    assert held["limit"] // 8 < held["peak"] <= held["limit"], held


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGE_PICTURES)
def test_what_decoders_allocate(folder: Path, kind: str) -> None:
    """Decoders that cannot write into the batch allocate where no ledger sees it; the plan has room for that."""
    check(run(folder, kind, batch_size=1, memory=None, threads=4))
