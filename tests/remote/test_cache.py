"""Copies of files from elsewhere: whole or not there, fetched once, within their limit."""

import base64
import contextlib
import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.base.file_id import FileId
from penstock.errors import Changed, ConfigError, Corrupt, LimitExceeded, Unavailable, Unsafe
from penstock.files import cache as filecache
from penstock.files.cache import FileCache, key_of
from penstock.files.files import remote_files
from penstock.remote.ranges import RemoteOptions

OPTIONS = RemoteOptions(retries=2, deadline_s=20, stall_timeout_s=1)
SIZE = 50_000


def contents(number, size=SIZE):
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def file(number, size=SIZE):
    return FileId(f"http://host/{number}", size, 0, 0, etag=f'"{number}"')


def writing(number):
    return lambda descriptor: (os.write(descriptor, contents(number).tobytes()), None)[1]


def take(cache, number):
    with cache.lent(file(number), writing(number)) as descriptor:
        return os.pread(descriptor, SIZE, 0) == contents(number).tobytes()


def kept(folder):
    """Files of a cache, besides the digests of copies that are there."""
    there = set(os.listdir(folder)) - {filecache.FOLDER_LOCK}
    return sorted(name for name in there if not (name.endswith(".sums") and f"{name[:-5]}.cached" in there))


def age(cache, number, seconds):
    then = time.time() - seconds
    os.utime(cache.path(file(number)), (then, then))


def test_fetched_once(tmp_path):
    cache, fetched = FileCache(str(tmp_path / "cache")), []
    for _ in range(3):
        with cache.lent(file(0), lambda fd: (fetched.append(1), writing(0)(fd))[1]):
            pass
    assert fetched == [1]
    assert kept(tmp_path / "cache") == [f"{key_of(file(0))}.cached"]
    if os.name == "posix":
        assert os.stat(tmp_path / "cache").st_mode & 0o777 == 0o700
        assert os.stat(cache.path(file(0))).st_mode & 0o777 == 0o600


@pytest.mark.case(22)
def test_versions_and_addresses_are_apart():
    one = FileId("http://host/train/a.tar", 10, 5, 0, etag='"x"')
    others = [
        FileId("http://host/val/a.tar", 10, 5, 0, etag='"x"'),
        FileId("http://host/train/a.tar", 11, 5, 0, etag='"x"'),
        FileId("http://host/train/a.tar", 10, 6, 0, etag='"x"'),
        FileId("http://host/train/a.tar", 10, 5, 0, etag='"y"'),
    ]
    assert len({key_of(each) for each in [one, *others]}) == 5


def test_least_recently_used_goes_first(tmp_path):
    cache = FileCache(str(tmp_path), 3 * SIZE)
    for number in range(3):
        assert take(cache, number)
        age(cache, number, 100 - number)
    assert take(cache, 0)  # so 1 is now the one that was not read for longest
    assert take(cache, 3)
    there = [number for number in range(4) if os.path.exists(cache.path(file(number)))]
    assert there == [0, 2, 3]


def test_the_limit_holds_while_fetching(tmp_path):
    cache = FileCache(str(tmp_path), 2 * SIZE)
    seen = []

    def fetch(descriptor):
        seen.append(sum(entry.stat().st_size for entry in os.scandir(tmp_path)))
        writing(number)(descriptor)

    for number in range(6):
        with cache.lent(file(number), fetch):
            pass
    assert max(seen) <= 2 * SIZE


@pytest.mark.case(22)
def test_what_is_read_is_not_removed(tmp_path):
    cache = FileCache(str(tmp_path), 2 * SIZE, patience_s=0.2)
    with cache.lent(file(0), writing(0)) as descriptor:
        age(cache, 0, 100)
        assert take(cache, 1)
        assert take(cache, 2)  # in the place of 1
        assert os.path.exists(cache.path(file(0)))
        assert os.pread(descriptor, SIZE, 0) == contents(0).tobytes()
        with cache.lent(file(2), writing(2)), pytest.raises(LimitExceeded, match=f"cache_bytes={3 * SIZE:,}"):
            take(cache, 3)
    assert take(cache, 3)


def test_a_limit_below_one_file_is_refused(tmp_path):
    with pytest.raises(LimitExceeded, match=f"cache_bytes={SIZE:,}"):
        take(FileCache(str(tmp_path), SIZE - 1), 0)


def test_foreign_files_are_left_alone(tmp_path):
    others = ["mine.tar", "a" * 40 + ".cached.bak", "A" * 40 + ".cached", "x.part"]
    for name in others:
        (tmp_path / name).write_bytes(bytes(10 * SIZE))
    os.mkdir(tmp_path / "folder")
    cache = FileCache(str(tmp_path), SIZE)
    for number in range(3):
        assert take(cache, number)
    assert all((tmp_path / name).stat().st_size == 10 * SIZE for name in others)


@pytest.mark.case(45)
def test_a_copy_of_another_size_is_replaced(tmp_path):
    cache = FileCache(str(tmp_path / "cache"))
    os.mkdir(tmp_path / "cache")
    Path(cache.path(file(0))).write_bytes(b"short")
    assert take(cache, 0)
    assert os.path.getsize(cache.path(file(0))) == SIZE


@pytest.mark.case(22)
def test_something_else_under_an_entrys_name_is_refused(tmp_path):
    cache = FileCache(str(tmp_path / "cache"))
    os.mkdir(tmp_path / "cache")
    (tmp_path / "elsewhere").write_bytes(contents(0).tobytes())
    os.symlink(tmp_path / "elsewhere", cache.path(file(0)))
    with pytest.raises(Unsafe, match="not a file that this cache wrote"):
        take(cache, 0)


@pytest.mark.case(22)
@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_folder_that_anybody_may_write_to_is_refused(tmp_path):
    os.chmod(tmp_path, 0o777)
    with pytest.raises(ConfigError, match="anybody may write"):
        take(FileCache(str(tmp_path)), 0)


@pytest.mark.case(22)
@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_folder_and_files_are_the_users_alone(tmp_path):
    before = os.umask(0)
    try:
        assert take(FileCache(str(tmp_path / "cache")), 0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "cache").st_mode) == 0o700
    assert {stat.S_IMODE(os.stat(tmp_path / "cache" / name).st_mode) for name in os.listdir(tmp_path / "cache")} == {
        0o600
    }


@pytest.mark.case(22)
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_refused(tmp_path):
    cache = FileCache(str(tmp_path / "cache"))
    assert take(cache, 0)
    os.chown(cache.path(file(0)), 65534, 65534)
    with pytest.raises(Unsafe, match=r"put there by another user \(uid 65534\)"):
        take(cache, 0)
    os.unlink(cache.path(file(0)))
    os.chown(tmp_path / "cache", 65534, 65534)
    with pytest.raises(ConfigError, match="its owner is another user"):
        take(cache, 0)


@pytest.mark.case(22)
def test_two_files_of_one_name_are_two_entries(server, tmp_path):
    for folder, number in (("train", 0), ("val", 1)):
        server.put(f"{folder}/a.bin", contents(number))
    server.gives_etag = False
    some = remote_files(tmp_path, None, OPTIONS)
    for folder, number in (("train", 0), ("val", 1), ("train", 0)):
        assert np.array_equal(read(some, f"{server.url}/{folder}/a.bin"), contents(number))
    assert len(kept(tmp_path)) == 2


def test_a_failed_fetch_leaves_nothing(tmp_path):
    cache = FileCache(str(tmp_path), SIZE)

    def broken(descriptor):
        os.write(descriptor, b"half")
        raise Unavailable("gone")

    with pytest.raises(Unavailable, match="gone"), cache.lent(file(0), broken):
        pass
    assert kept(tmp_path) == []
    assert take(cache, 0)


@pytest.mark.case(42)
def test_a_full_disk_is_told(tmp_path):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(Unavailable, match=f"errno {errno.ENOSPC}"), FileCache(str(tmp_path)).lent(file(0), full):
        pass
    assert kept(tmp_path) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user who may not write everywhere")
def test_a_folder_that_cannot_be_written_to_is_read(tmp_path):
    cache = FileCache(str(tmp_path))
    assert take(cache, 0)
    os.chmod(tmp_path, 0o500)
    try:
        assert take(cache, 0)
        with pytest.raises(Unavailable, match="cannot be written to"):
            take(cache, 1)
    finally:
        os.chmod(tmp_path, 0o700)


def test_threads_fetch_once(tmp_path):
    cache, fetched, right = FileCache(str(tmp_path)), [], []

    def fetch(descriptor):
        fetched.append(1)
        time.sleep(0.1)
        writing(0)(descriptor)

    def work():
        with cache.lent(file(0), fetch) as descriptor:
            right.append(os.pread(descriptor, SIZE, 0) == contents(0).tobytes())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(fetched), right) == (1, [True] * 8)
    assert kept(tmp_path) == [f"{key_of(file(0))}.cached"]


def test_waiting_for_one_that_is_stuck_ends(tmp_path):
    cache, go = FileCache(str(tmp_path), patience_s=0.3), threading.Event()
    stuck = threading.Thread(target=lambda: hold(cache, go))
    stuck.start()
    while not any(name.endswith(".part") for name in os.listdir(tmp_path)):
        time.sleep(0.01)
    with pytest.raises(Unavailable, match="another process fetches it"):
        take(cache, 0)
    go.set()
    stuck.join()
    assert take(cache, 0)


def hold(cache, go):
    with cache.lent(file(0), lambda fd: (go.wait(20), writing(0)(fd))[1]):
        pass


# Over the network.


def read(some, url, count=None):
    here = some.identify(some.remote.admit(url))
    target = np.empty(here.size if count is None else count, np.uint8)
    with some.lend(here) as handle:
        handle.read_into(0, target)
    return target


@pytest.mark.parametrize("ranges", [True, False])
def test_files_come_from_their_copies(server, wrong, tmp_path, ranges):
    server.always = None if ranges else wrong.no_ranges
    some = remote_files(tmp_path, "10MB", OPTIONS)
    url = server.put("a.bin", contents(0))
    for _ in range(3):
        assert np.array_equal(read(some, url), contents(0))
    assert server.whole_downloads("a.bin") == 1
    server.put("a.bin", contents(1))
    assert np.array_equal(read(some, url), contents(1)), "another version is another entry"


@pytest.mark.case(43)
def test_a_broken_download_goes_on(server, wrong, tmp_path):
    some = remote_files(tmp_path, None, OPTIONS)
    url = server.put("a.bin", contents(0))
    here = some.identify(some.remote.admit(url))
    server.asked.clear()
    server.once = [wrong.drop(20_000), wrong.status(503)]
    with some.lend(here):
        pass
    assert [wanted for _, _, wanted in server.asked] == [None, "bytes=20000-", "bytes=20000-"]
    assert Path(some.cache.path(here)).read_bytes() == contents(0).tobytes()


@pytest.mark.case(43)
@pytest.mark.parametrize("case", ["drops", "replaced", "lies", "stalls"])
def test_a_partial_file_is_never_there(server, wrong, tmp_path, case):
    some = remote_files(tmp_path, None, RemoteOptions(retries=1, deadline_s=1, stall_timeout_s=0.3))
    here = some.identify(some.remote.admit(server.put("a.bin", contents(0))))
    if case == "replaced":
        server.put("a.bin", contents(1))
    else:
        server.always = {"drops": wrong.drop(0), "lies": wrong.announce(-1000), "stalls": wrong.stall(100, 5)}[case]
    with pytest.raises((Unavailable, Changed), match=r"a\.bin"), some.lend(here):
        pass
    assert kept(tmp_path) == []
    server.always = None


@pytest.mark.case(45)
def test_checksums_are_compared(server, tmp_path):
    some = remote_files(tmp_path, None, OPTIONS)
    url = server.put("a.bin", contents(0))
    server.extra_headers = {"Content-MD5": "1B2M2Y8AsgTpgAmY7PhCfg=="}
    with pytest.raises(Corrupt, match="md5"):
        read(some, url)
    assert kept(tmp_path) == []
    server.extra_headers = {"Content-MD5": base64.b64encode(hashlib.md5(contents(0)).digest()).decode()}
    assert np.array_equal(read(some, url), contents(0))


def test_cache_bytes_below_a_file_says_how_much(server, tmp_path):
    with pytest.raises(LimitExceeded, match="cache_bytes=50,000"):
        read(remote_files(tmp_path, 40_000, OPTIONS), server.put("a.bin", contents(0)))
    with pytest.raises(ConfigError, match="cache_dir"):
        remote_files(None, "1GB", None)


def test_a_copy_is_not_used_without_its_server(server, tmp_path):
    some = remote_files(tmp_path, None, RemoteOptions(retries=0, deadline_s=1))
    url = server.put("a.bin", contents(0))
    read(some, url)
    with pytest.raises(Unavailable, match="no answer"):
        read(some, url.replace(str(server.http.server_port), "1"))


CHILD = """
import sys
import numpy as np
from penstock.files.files import remote_files
from penstock.remote.ranges import RemoteOptions

folder, limit, *urls = sys.argv[1:]
some = remote_files(folder, int(limit), RemoteOptions(deadline_s=60))
for url in urls:
    file = some.identify(some.remote.admit(url))
    target = np.empty(file.size, np.uint8)
    with some.lend(file) as handle:
        handle.read_into(0, target)
    seed = int(url.rsplit("/", 1)[1])
    assert np.array_equal(target, np.random.default_rng(seed).integers(0, 256, file.size, np.uint8)), url
"""


def started(tmp_path, *args):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    source = str(Path(filecache.__file__).parents[1])
    return subprocess.Popen([sys.executable, script, *map(str, args)], env={**os.environ, "PYTHONPATH": source})


@pytest.mark.case(22)
def test_eight_processes_fetch_each_file_once(server, tmp_path):
    urls = [server.put(str(number), contents(number, 300_000)) for number in range(3)]
    server.latency_s = 0.02
    running = [started(tmp_path, tmp_path / "cache", 10**7, *urls) for _ in range(8)]
    assert [each.wait(90) for each in running] == [0] * 8
    assert [server.whole_downloads(str(number)) for number in range(3)] == [1, 1, 1]
    assert len(kept(tmp_path / "cache")) == 3


def test_a_copy_gets_its_name_while_nobody_counts(tmp_path):
    """Whoever listed the folder before, and looks at sizes after it, would miss the copy and take too much."""
    cache = FileCache(str(tmp_path), 2 * SIZE)
    fetched, counts = threading.Event(), threading.Event()

    def fetch(descriptor):
        writing(0)(descriptor)
        fetched.set()
        counts.wait(30)

    def obtain():
        with cache.lent(file(0), fetch):
            pass

    thread = threading.Thread(target=obtain)
    with contextlib.ExitStack() as counting:
        thread.start()
        assert fetched.wait(30)
        counting.enter_context(cache._lock_folder())
        counts.set()
        time.sleep(0.1)
        assert not os.path.exists(cache.path(file(0)))
    thread.join(30)
    assert os.path.exists(cache.path(file(0)))


@pytest.mark.case(22)
def test_processes_share_a_cache_that_is_too_small_for_all(server, tmp_path):
    urls = [server.put(str(number), contents(number, 100_000)) for number in range(5)]
    running = [started(tmp_path, tmp_path / "cache", 450_000, *(urls if n % 2 else urls[::-1])) for n in range(4)]
    assert [each.wait(90) for each in running] == [0] * 4
    assert sum(os.stat(tmp_path / "cache" / name).st_size for name in kept(tmp_path / "cache")) <= 450_000


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_download_frees_itself(server, wrong, tmp_path):
    folder = tmp_path / "cache"
    one, two = (server.put(str(number), contents(number)) for number in range(2))
    server.once = [None, wrong.stall(20_000, 10)]
    child = started(tmp_path, folder, 10**6, one)
    while not (folder.exists() and any(name.endswith(".part") for name in os.listdir(folder))):
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait(20)
    left = kept(folder)
    assert [name[-5:] for name in left] == [".lock", ".part"]
    some = remote_files(folder, None, OPTIONS)
    assert np.array_equal(read(some, two), contents(1))
    assert [name[-7:] for name in kept(folder)] == [".cached"], "the next one to fetch anything clears up"
    assert np.array_equal(read(some, one), contents(0))


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_download_is_begun_anew(server, wrong, tmp_path):
    folder = tmp_path / "cache"
    url = server.put("0", contents(0))
    server.once = [None, wrong.stall(20_000, 10)]
    child = started(tmp_path, folder, 10**6, url)
    while not (folder.exists() and any(name.endswith(".part") for name in os.listdir(folder))):
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait(20)
    assert np.array_equal(read(remote_files(folder, None, OPTIONS), url), contents(0))
    assert [name[-7:] for name in kept(folder)] == [".cached"]
