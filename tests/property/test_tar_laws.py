"""Archives say the same as files and as streams, by any window, whole and damaged."""

import io
import random
import tarfile

import pytest

from penstock.errors import PenstockError
from penstock.files.compression import DecompressedStream
from penstock.files.files import Files
from penstock.files.handles import identify
from penstock.formats.tar.walk import Walk, Window, WindowSizes

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
KINDS = [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE]
SMALL = WindowSizes(most_bytes=2048, first_bytes=1024, page_bytes=512, near_bytes=1000)


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


def outcome(source):
    """The entries of whole files up to the end, or to the first error; and that error."""
    entries, walk = [], Walk(source)
    try:
        for entry in walk:
            walk.content(entry)
            entries.append(entry)
    except PenstockError as error:
        return entries, type(error), str(error)
    return entries, None, ""


@pytest.mark.parametrize("seed", range(3))
def test_files_and_streams_say_the_same(tmp_path, seed):
    rng, path = random.Random(seed), str(tmp_path / "a.tar")
    errors = set()
    for _ in range(120):
        data = bytes(damaged(archive(rng) + (archive(rng) if rng.random() < 0.3 else b""), rng))
        with open(path, "wb") as file:
            file.write(data)
        streamed = outcome(DecompressedStream(io.BytesIO(data), path))
        with Files(max_open=0).lend(identify(path)) as handle:
            assert outcome(Window(handle)) == outcome(Window(handle, SMALL)) == streamed
        errors.add(streamed[1])
    assert len(errors) >= 3, "some are whole, some are cut, and some are damaged"
