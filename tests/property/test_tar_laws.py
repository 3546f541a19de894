"""Headers understood many at a time say what they say one by one, in whole archives and in damaged ones."""

import io
import random
import tarfile

import pytest

from penstock import tarwalk
from penstock.errors import PenstockError

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
KINDS = [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """So that a few members are many."""
    monkeypatch.setattr(tarwalk, "WORTH_BYTES", 40 * 512)
    monkeypatch.setattr(tarwalk, "WORTH_MEMBERS", 2)
    monkeypatch.setattr(tarwalk, "ALONE_AT_FIRST", 1)
    monkeypatch.setattr(tarwalk, "ALONE_AT_MOST", 2)
    monkeypatch.setattr(tarwalk, "FIRST_BYTES", 64 * 512)


def archive(rng):
    """Mostly usual members, some of other kinds and with long names."""
    out = io.BytesIO()
    odd = ["a" * 130 + ".x", "\u00e9" * 45 + ".y", "folder/", "__meta__/a", "b" * 99, "b" * 100]
    with tarfile.open(fileobj=out, mode="w", format=rng.choice(FORMATS)) as tar:
        for number in range(rng.randrange(60)):
            info = tarfile.TarInfo(f"{number:03d}.x" if rng.random() < 0.8 else rng.choice(odd))
            info.mtime = rng.choice([0, 1.5])
            if rng.random() < 0.1:
                info.type = rng.choice(KINDS)
            else:
                info.size = rng.choice([0, 1, 511, 512, 513, 3000])
            if tar.format == tarfile.PAX_FORMAT and rng.random() < 0.05:
                info.pax_headers = {"path": "other.z"}
            try:
                tar.addfile(info, io.BytesIO(rng.randbytes(info.size)))
            except ValueError:  # ustar has no room for the name
                assert tar.format == tarfile.USTAR_FORMAT
    return bytearray(out.getvalue())


def damaged(data, rng):
    """Some bytes of headers changed, perhaps with a checksum that holds again; perhaps cut."""
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        begin = rng.randrange(len(data) // 512) * 512
        at = begin + rng.choice([rng.randrange(512), rng.randrange(100, 160), 156, 124, 148])
        data[at] = rng.choice([0, 32, 48, 55, 56, 120, 103, 255, rng.randrange(256)])
        if rng.random() < 0.6:
            header = data[begin : begin + 512]
            header[148:156] = b" " * 8
            data[begin + 148 : begin + 156] = b"%06o\0 " % sum(header)
    return data[: rng.randrange(len(data))] if rng.random() < 0.2 else data


def told(path):
    try:
        return list(tarwalk.walk(path))
    except PenstockError as error:
        return type(error), str(error)


@pytest.mark.parametrize("seed", range(3))
def test_many_at_a_time_is_one_by_one(tmp_path, monkeypatch, seed):
    rng, path = random.Random(seed), str(tmp_path / "a.tar")
    many, kinds = tarwalk._Walk._usual, set()
    for _ in range(120):
        with open(path, "wb") as file:
            file.write(damaged(archive(rng), rng))
        monkeypatch.setattr(tarwalk._Walk, "_usual", many)
        together = told(path)
        monkeypatch.setattr(tarwalk._Walk, "_usual", lambda walk, at: (0, at))
        assert together == told(path)
        kinds.add(type(together))
    assert kinds == {list, tuple}, "some are whole, and some are not"
