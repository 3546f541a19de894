"""Folders of pictures, against Pillow's own reading of the same files."""

import io
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import penstock as ps
from penstock.errors import Changed, ConfigError, Corrupt, DecodeFailed, LimitExceeded, Missing, SchemaMismatch, Unsafe
from penstock.formats.folder import listing
from penstock.testing import check_store

SIZE = (18, 23)
CLASSES = ("ant", "bee", "zebra fish")


def picture(number: int, size: tuple[int, int] = SIZE) -> Image.Image:
    smooth = np.cumsum(np.random.default_rng(number).integers(-9, 10, (*size, 3)), axis=1)
    return Image.fromarray((smooth + 128).astype(np.uint8))


def save(path: Path, number: int, size: tuple[int, int] = SIZE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(number, size).save(path)
    return path


def pixels(paths: Sequence[Path]) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes of several kinds of files, some of them deeper; 12 pictures."""
    root = tmp_path / "photos"
    for n in range(12):
        inner = ("", "deep/", "deep/er/")[n % 3] if n % 4 == 0 else ""
        save(root / CLASSES[n % 3] / f"{inner}{n}.{('jpg', 'png', 'JPEG', 'webp')[n % 4]}", n)
    (root / "README.txt").write_text("not a picture")
    (root / ".hidden.jpg").write_bytes(b"nothing")
    (root / "ant" / "._0.jpg").write_bytes(b"nothing")
    (root / ".thumbnails").mkdir()
    (root / ".thumbnails" / "x.jpg").write_bytes(b"nothing")
    return root


def as_torchvision_has_them(root: Path) -> list[tuple[Path, int]]:
    """The order of ``torchvision.datasets.ImageFolder``."""
    found = []
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(root / name)):
            found += [(Path(folder, file), label) for file in sorted(files) if not file.startswith(".")]
    return found


def test_a_folder_a_class(photos: Path) -> None:
    paths, labels = zip(*as_torchvision_has_them(photos), strict=True)
    assert len(paths) == 12
    check_store(lambda: ps.open(photos).store, {"image": pixels(paths), "label": np.array(labels)})
    ds = ps.open(photos)
    assert ds.classes == CLASSES
    assert ds.cast("image", "float32").cast("label", "int32").select([3, 1]).classes == CLASSES
    assert ps.concat([ds, ds]).classes == CLASSES
    assert list(ds.keys) == [str(path.relative_to(photos)) for path in paths]
    assert ds.keys.find("bee/1.png") == [str(path.relative_to(photos)) for path in paths].index("bee/1.png")
    assert list(ps.open(photos, fields=["label"]).fields) == ["label"]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{n:03d}.png", n) for n in range(5)]
    save(tmp_path / "more" / "9.png", 9)
    check_store(lambda: ps.open(tmp_path).store, {"image": pixels([*paths, tmp_path / "more" / "9.png"])})


def test_arrays_in_folders(tmp_path: Path) -> None:
    arrays = [np.random.default_rng(n).normal(size=(3, 4)) for n in range(6)]
    for n, values in enumerate(arrays):
        (tmp_path / f"c{n % 2}").mkdir(exist_ok=True)
        np.save(tmp_path / f"c{n % 2}" / f"{n}.npy", values)
    expected = np.stack([arrays[n] for n in (0, 2, 4, 1, 3, 5)])
    check_store(lambda: ps.open(tmp_path).store, {"data": expected, "label": np.array([0, 0, 0, 1, 1, 1])})


TABLES = ["paths", "names", "stems"]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("named", TABLES)
def test_a_table_beside_the_files(tmp_path: Path, ending: str, named: str) -> None:
    order = [3, 0, 2, 5]
    for n in range(6):
        save(tmp_path / "train" / f"{n:04d}.png", n)
    short = {"paths": "train/{:04d}.png", "names": "{:04d}.png", "stems": "{:04d}"}[named]
    columns = {
        "age": [31, 45, 7, -1], "weight": [1.5, 2.0, float("nan"), 4.25],
        "photo": [short.format(n) for n in order], "who": ["Zoë, X", "b", "", 'say "c"'],
    }  # fmt: skip
    if ending == "csv":
        lines = ["age,weight,photo,who", *(f'{columns["age"][k]},{columns["weight"][k]},{columns["photo"][k]},{_quoted(columns["who"][k])}' for k in range(4))]  # fmt: skip  # noqa: E501
        (tmp_path / "any name.csv").write_text("\n".join(lines) + "\n")
    else:
        pq.write_table(pa.table(columns), tmp_path / "metadata.parquet")
    ds = ps.open(tmp_path)
    assert list(ds.fields) == ["image", "age", "weight", "who"]
    assert ds[:]["who"] == columns["who"]
    expected = {
        "image": pixels([tmp_path / "train" / f"{n:04d}.png" for n in order]),
        "age": np.array(columns["age"]), "weight": np.array(columns["weight"]),
    }  # fmt: skip
    check_store(lambda: ps.open(tmp_path, fields=["image", "age", "weight"]).store, expected)
    assert list(ds.keys) == [f"train/{n:04d}.png" for n in order]


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def test_tables_that_do_not_fit(tmp_path: Path) -> None:
    for n in range(3):
        save(tmp_path / f"{n}.png", n)
    table = tmp_path / "metadata.csv"
    table.write_text("file,x\n0.png,5\nno.png,6\n2.png,7\n")
    with pytest.raises(Missing, match=r"metadata\.csv: row 2 names a file that is not among the 3"):
        ps.open(tmp_path)
    skipping = ps.open(tmp_path, on_error="skip")
    assert skipping[:]["x"].tolist() == [5, 7]
    assert "row 2 names a file" in str(skipping.left_out[0])
    table.write_text("file,x\nphotos/zero.png,5\n")
    with pytest.raises(SchemaMismatch, match=r"no column names the files .*'0\.png'.*'photos/zero\.png'"):
        ps.open(tmp_path)
    table.write_text("file,x\n0.png,5\n1.png\n")
    with pytest.raises(Corrupt, match="line 3 has 1 entries, and the header has 2"):
        ps.open(tmp_path)
    table.write_bytes(b"file,x\n\xff\xfe,5\n")
    with pytest.raises(Corrupt, match="not a CSV table in UTF-8"):
        ps.open(tmp_path)
    table.write_text("file,x\n")
    with pytest.raises(Missing, match="without rows"):
        ps.open(tmp_path)
    table.rename(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("")
    with pytest.raises(ConfigError, match=r"a\.csv, b\.csv: expected one table"):
        ps.open(tmp_path)


def test_pictures_of_several_sizes(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{n}.png", n, (18 + n, 40 - n)) for n in range(6)]
    with pytest.raises(SchemaMismatch, match=r"3\.png.*is 21 x 37, but the first sample's is 18 x 40.*size="):
        ps.open(tmp_path)[3]
    scaled = [np.asarray(Image.open(path).resize((20, 16), Image.Resampling.BILINEAR)) for path in paths]
    check_store(lambda: ps.open(tmp_path, size=(16, 20)).store, {"image": np.stack(scaled)})
    with pytest.raises(LimitExceeded, match="max_pixels=100"):
        ps.open(tmp_path, max_pixels=100)


@pytest.mark.parametrize("workers", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_in_workers_of_torch(photos: Path, workers: str) -> None:
    paths, labels = zip(*as_torchvision_has_them(photos), strict=True)
    loaded = torch.utils.data.DataLoader(ps.open(photos), 5, num_workers=2, multiprocessing_context=workers)
    batches = list(loaded)
    assert torch.cat([batch["label"] for batch in batches]).tolist() == list(labels)
    assert np.array_equal(torch.cat([batch["image"] for batch in batches]).numpy(), pixels(paths))


@pytest.mark.parametrize("most", [0, 1, 3])
def test_open_files_are_bounded(photos: Path, most: int, open_in: Callable[[Path], int]) -> None:
    ds = ps.open(photos, max_open_files=most)
    ds.store.close()
    with ps.Loader(ds, batch_size=4, memory="64MiB", threads=4, output="numpy") as loader:
        for _ in loader:
            assert open_in(photos) <= max(most, 4)
    ds.store.close()
    assert open_in(photos) == 0


def test_the_list_is_saved(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "index"
    first = ps.open(photos, index_dir=index)
    with monkeypatch.context() as patch:
        patch.setattr(listing, "_FolderWalk", lambda *_: pytest.fail("listed again"))
        second = ps.open(photos, index_dir=index)
        assert list(second.keys) == list(first.keys)
        assert second.fingerprint == first.fingerprint
    save(photos / "bee" / "new.png", 77)
    assert len(ps.open(photos, index_dir=index)) == 13
    (photos / "bee" / "new.png").unlink()
    assert len(ps.open(photos, index_dir=index)) == 12


def test_a_file_that_is_rewritten(photos: Path, tmp_path: Path) -> None:
    """Its folder does not know; reading does, and the list is made anew."""
    index = tmp_path / "index"
    ps.open(photos, index_dir=index)
    save(photos / "bee" / "1.png", 500)
    ds = ps.open(photos, index_dir=index)
    with pytest.raises(Changed, match=r"1\.png: the file was rewritten after it was opened"):
        ds["bee/1.png"]
    assert np.array_equal(ps.open(photos, index_dir=index)["bee/1.png"]["image"], np.asarray(picture(500)))


def test_a_file_that_is_gone(photos: Path) -> None:
    ds = ps.open(photos)
    (photos / "bee" / "1.png").unlink()
    with pytest.raises(Missing, match=r"1\.png: the file was there when the dataset was opened"):
        ds["bee/1.png"]


def test_damaged_files(photos: Path) -> None:
    bad = photos / "ant" / "6.JPEG"
    bad.write_bytes(bad.read_bytes()[:-100])
    (photos / "bee" / "empty.png").write_bytes(b"")
    ds = ps.open(photos)
    with pytest.raises(DecodeFailed, match=r"photos: ant/6\.JPEG .*cut short.*on_error="):
        ds["ant/6.JPEG"]
    with pytest.raises(DecodeFailed, match=r"bee/empty\.png .*0 bytes"):
        ds["bee/empty.png"]
    with ps.Loader(ds, batch_size=4, memory="64MiB", on_error="skip", output="numpy") as loader:
        assert sum(len(batch["label"]) for batch in loader) == 11
        assert loader.stats().left_out_samples == 2


@pytest.mark.case(14)
def test_links(photos: Path, tmp_path: Path) -> None:
    (photos / "ant" / "same.png").symlink_to(photos / "bee" / "1.png")
    assert len(ps.open(photos)) == 13
    outside = save(tmp_path / "elsewhere" / "x.png", 3)
    for link, goal, kind in (("y.png", outside, "file"), ("w.png", tmp_path / "no", "file that is not there")):
        (photos / "ant" / link).symlink_to(goal)
        with pytest.raises(Unsafe, match=rf"{link}: a link to a {kind}.*followed to files inside"):
            ps.open(photos)
        skipping = ps.open(photos, on_error="skip")
        assert (len(skipping), len(skipping.left_out)) == (13, 1)
        (photos / "ant" / link).unlink()
    (photos / "loop").symlink_to(photos)
    with pytest.raises(Unsafe, match="loop: a link to a folder"):
        ps.open(photos)


def test_what_is_no_folder_of_pictures(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a")
    for name in ("empty", "text"):
        with pytest.raises(ConfigError, match=r"is a folder of no known format.*a folder with pictures in it"):
            ps.open(tmp_path / name)


def test_a_picture_beside_other_data_is_no_dataset(tmp_path: Path) -> None:
    save(tmp_path / "figure.png", 1)
    (tmp_path / "betas_session01.hdf5").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is a folder of no known format.*Name the files in it, .*hdf5' \(1\)$"):
        ps.open(tmp_path)


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/b\xff.png"
    stream = io.BytesIO()
    picture(4).save(stream, "PNG")
    with open(raw, "wb") as file:
        file.write(stream.getvalue())
    save(tmp_path / "a.png", 1)
    assert np.array_equal(ps.open(tmp_path)[1]["image"], np.asarray(picture(4)))


def test_folders_moved_elsewhere_are_the_same_data(photos: Path, tmp_path: Path) -> None:
    before = ps.open(photos).fingerprint
    (tmp_path / "other").mkdir()
    shutil.copytree(photos, tmp_path / "other" / "photos")
    assert ps.open(tmp_path / "other" / "photos").fingerprint == before
    save(tmp_path / "other" / "photos" / "bee" / "more.png", 5)
    assert ps.open(tmp_path / "other" / "photos").fingerprint != before


def test_casts_as_for_any_pictures(photos: Path) -> None:
    paths: Any = [path for path, _ in as_torchvision_has_them(photos)]
    ds = ps.open(photos).cast("image", "float32", divisor=255).permute("image", 2, 0, 1)
    expected = np.moveaxis(pixels(paths).astype(np.float32) / np.float32(255), 3, 1)
    check_store(lambda: ds.only("image").delivered, {"image": np.ascontiguousarray(expected)})
