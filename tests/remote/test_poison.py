"""Bytes that are damaged on their way, and copies that are damaged where they lie: never delivered, never kept."""

import os
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.base.sizes import MiB
from penstock.errors import Corrupt, Unavailable
from penstock.files.files import remote_files
from penstock.remote.ranges import RemoteOptions

OPTIONS = RemoteOptions(retries=1, deadline_s=20, stall_timeout_s=2)
VALUES = np.random.default_rng(0).integers(0, 255, (300, 10_000), np.uint8)  # three blocks


def npy(folder):
    np.save(folder / "a.npy", VALUES)
    return (folder / "a.npy").read_bytes()


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


@pytest.fixture
def address(server, tmp_path):
    return server.put("a.npy", npy(tmp_path))


@pytest.fixture
def manifest(address, tmp_path):
    return ps.write_manifest(address, tmp_path / "manifest.json")


@pytest.fixture
def cached(address, tmp_path):
    """The copy of a file in a cache, after it was read once."""
    ds = ps.open(address, cache_dir=tmp_path / "cache", remote=OPTIONS)
    assert np.array_equal(ds[:]["data"], VALUES)
    (copy,) = (tmp_path / "cache").glob("*.cached")
    return copy


def flip_on_the_way(times):
    """A server that sends another byte than it has in its middle, so many times."""
    left = [times]

    def act(handler, data, wanted):
        begin, _, end = (wanted or "bytes=0-").removeprefix("bytes=").partition("-")
        if left[0] > 0 and int(begin) <= 1_500_000 < int(end or len(data)):
            left[0] -= 1
            data = flipped(data, 1_500_000)
        handler.serve(data, wanted)

    return act


@pytest.mark.case(45)
@pytest.mark.parametrize("cache", [False, True])
def test_a_flip_on_the_way_is_asked_for_once_more(server, address, manifest, tmp_path, cache):
    server.always = flip_on_the_way(2 if cache else 1)
    ds = ps.open(address, manifest=manifest, remote=OPTIONS, cache_dir=tmp_path / "cache" if cache else None)
    assert np.array_equal(ds[:]["data"], VALUES)
    server.always = None
    assert sum(path == "/a.npy" for _, path, _ in server.asked) > 1
    assert np.array_equal(ps.open(address, manifest=manifest, cache_dir=tmp_path / "cache")[:]["data"], VALUES)


@pytest.mark.case(45)
@pytest.mark.parametrize("cache", [False, True])
def test_one_that_stays_is_an_error_and_not_kept(server, address, manifest, tmp_path, cache):
    server.files["/a.npy"] = flipped(server.files["/a.npy"], 1_500_000)  # under the same ETag
    ds = ps.open(address, manifest=manifest, remote=OPTIONS, cache_dir=tmp_path / "cache" if cache else None)
    assert np.array_equal(ds[0]["data"], VALUES[0])
    with pytest.raises(Corrupt, match=r"a\.npy: bytes 1,048,576 to 2,097,152 .*sha256"):
        ds[150]
    assert not cache or not list((tmp_path / "cache").glob("*.cached"))


@pytest.mark.case(45)
@pytest.mark.parametrize("how", ["flipped", "garbage", "partial", "empty"])
def test_a_copy_that_was_damaged_is_fetched_anew(cached, address, how):
    whole, about = cached.read_bytes(), os.stat(cached)
    damaged = {
        "flipped": flipped(whole, 2_000_000), "garbage": os.urandom(len(whole)), "partial": whole[:1_000_000],
        "empty": b"",
    }  # fmt: skip
    cached.write_bytes(damaged[how])
    os.utime(cached, ns=(about.st_atime_ns, about.st_mtime_ns))
    for _ in range(2):
        assert np.array_equal(ps.open(address, cache_dir=cached.parent, remote=OPTIONS)[:]["data"], VALUES)
    assert cached.read_bytes() == whole, "the poison is gone"


@pytest.mark.case(45)
@pytest.mark.parametrize("sums", [None, b"", b"\0" * 32])
def test_a_copy_whose_digests_are_lost_is_fetched_anew(cached, address, sums):
    """As a machine may leave them that lost its power."""
    whole, beside = cached.read_bytes(), cached.with_suffix(".sums")
    cached.write_bytes(bytes(len(whole)))
    if sums is None:
        beside.unlink()
    else:
        beside.write_bytes(sums)
    assert np.array_equal(ps.open(address, cache_dir=cached.parent, remote=OPTIONS)[:]["data"], VALUES)
    assert cached.read_bytes() == whole


@pytest.mark.case(45)
def test_one_that_cannot_be_read_in_parts_is_removed_and_told(server, wrong, cached, address):
    server.always = wrong.no_ranges
    whole = cached.read_bytes()
    cached.write_bytes(flipped(whole, 2_000_000))
    ds = ps.open(address, cache_dir=cached.parent, remote=OPTIONS)
    with pytest.raises(Corrupt, match=r"a copy in .* which is removed: read again"):
        ds[:]
    assert np.array_equal(ds[:]["data"], VALUES)
    assert cached.read_bytes() == whole


@pytest.mark.case(45)
def test_a_loader_heals_too_and_declares_what_that_takes(cached, address):
    cached.write_bytes(flipped(cached.read_bytes(), 2_000_000))
    ds = ps.open(address, cache_dir=cached.parent, remote=OPTIONS)
    with ps.Loader(ds, batch_size=50, memory="64MiB", threads=2, output="numpy") as loader:
        assert np.array_equal(np.concatenate([batch["data"].copy() for batch in loader]), VALUES)


FULL = """
import sys, warnings
import numpy as np
import penstock as ps
from penstock.errors import CacheIsFull, Unavailable

address, folder = sys.argv[1:]
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    ds = ps.open(address, cache_dir=folder)
    loader = ps.Loader(ds, batch_size=50, memory="64MiB", threads=2, output="numpy")
    values = np.concatenate([batch["data"].copy() for batch in loader])
print(values.shape, int(values.sum()), [each.category.__name__ for each in told])
"""


TOLD = """
import sys
import penstock as ps
from penstock.errors import Unavailable

try:
    ps.open(sys.argv[1], cache_dir=sys.argv[2])[:]
except Unavailable as error:
    print(error)
"""


@pytest.mark.case(42)
def test_a_full_disk_is_no_reason_to_stop(server, address, tmp_path, on_a_small_disk):
    """2 MB of disk for a copy of 3 MB."""
    out = on_a_small_disk(FULL, address)
    assert out.strip() == f"{VALUES.shape} {int(VALUES.sum(dtype=np.int64))} ['CacheIsFull']"


@pytest.mark.case(42)
def test_without_ranges_a_full_disk_is_told(server, wrong, tmp_path, on_a_small_disk):
    address = server.put("a.npy", npy(tmp_path))
    server.always = wrong.no_ranges
    assert "cannot be kept in cache_dir=" in on_a_small_disk(TOLD, address)


@pytest.mark.case(44)
def test_a_host_without_a_name_is_told_in_time():
    with pytest.raises(Unavailable, match=r"nowhere\.invalid"):
        ps.open("http://nowhere.invalid/a.npy", remote=RemoteOptions(retries=0, deadline_s=5))


def test_sums_leave_with_their_copy(server, tmp_path):
    """Room is made for others, and nothing of what left stays."""
    some = remote_files(tmp_path / "cache", 5 * MiB, OPTIONS)
    for number in range(3):
        data = np.full(3 * MiB, number, np.uint8)
        here = some.identify(some.remote.admit(server.put(f"{number}.bin", data.tobytes())))
        some._known_bytes = 0  # as if each were the only one
        target = np.empty(3 * MiB, np.uint8)
        with some.lend(here) as handle:
            handle.read_into(0, target)
        assert (target == number).all()
    assert sorted(Path(name).suffix for name in os.listdir(tmp_path / "cache") if name[0] != "p") == [
        ".cached",
        ".sums",
    ]


def test_files_elsewhere_are_verified_too(server, address, manifest):
    assert ps.verify(address, manifest=manifest, remote=OPTIONS).sound
    server.files["/a.npy"] = flipped(server.files["/a.npy"], 1_500_000)
    verdict = ps.verify(address, manifest=manifest, remote=OPTIONS)
    assert [(damage.begin, damage.end) for damage in verdict.damages] == [(MiB, 2 * MiB)]
    assert sorted(row for fault in verdict.faults for row in fault.rows) == list(range(104, 210))
