"""Reading files: right bytes, few descriptors, and no other file than the one that was opened."""

import contextlib
import gc
import os
import pickle
import random
import socket
import threading
import time

import numpy as np
import pytest

from penstock.base import policy
from penstock.base.file_id import FileId
from penstock.base.policy import ReadPolicy
from penstock.errors import Changed, ConfigError, Missing, Truncated, Unavailable
from penstock.files import handles, pool
from penstock.files.files import Files
from penstock.files.handles import check_unchanged, identify

PROC = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def contents(number, size=10_000):
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


@pytest.fixture
def files_of(tmp_path):
    """So many files with known contents, as they are now."""

    def make(count):
        paths = [tmp_path / f"file{number}" for number in range(count)]
        for number, path in enumerate(paths):
            path.write_bytes(contents(number).tobytes())
        return [identify(str(path)) for path in paths]

    return make


def descriptors(folder):
    """How many descriptors of this process point into a folder."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith(str(folder))
        except OSError:
            continue
    return count


def mappings(folder):
    """How many mappings of this process are of files in a folder."""
    with open("/proc/self/maps") as maps:
        return sum(str(folder) in line for line in maps)


def held(folder):
    """Descriptors and mappings: what a limit on open files counts."""
    return descriptors(folder) + mappings(folder)


def read(files, file, offset=0, count=10_000, mapped=False):
    target = np.empty(count, np.uint8)
    with files.lend(file, mapped=mapped) as handle:
        if mapped:
            target[:] = handle.mapping[offset : offset + count]
        else:
            handle.read_into(offset, target)
    return target


# Right bytes.


@pytest.mark.parametrize(("offset", "count"), [(0, 10_000), (0, 1), (9_999, 1), (17, 4_000), (5, 0), (10_000, 0)])
def test_reads_the_bytes_asked_for(files_of, offset, count):
    (file,) = files_of(1)
    assert np.array_equal(read(Files(), file, offset, count), contents(0)[offset : offset + count])


def test_reads_into_any_contiguous_array(files_of):
    (file,) = files_of(1)
    target = np.zeros((3, 5, 7), np.float64)
    with Files().lend(file) as handle:
        handle.read_into(8, target[1:2])
    expected = contents(0)[8 : 8 + 5 * 7 * 8].view(np.float64).reshape(5, 7)
    assert target[1].tobytes() == expected.tobytes()
    assert not target[[0, 2]].any()


def test_short_reads_go_on(files_of):
    (file,) = files_of(1)
    assert np.array_equal(read(Files(policy=ReadPolicy(bytes_per_call=999)), file), contents(0))


def test_without_positioned_reads_threads_take_turns(files_of):
    (file,) = files_of(1)
    files, wrong = Files(policy=ReadPolicy(use_preadv=False)), []

    def work(seed):
        chance = random.Random(seed)
        for _ in range(200):
            offset = chance.randrange(9_000)
            if not np.array_equal(read(files, file, offset, 1_000), contents(0)[offset : offset + 1_000]):
                wrong.append(offset)

    in_threads(work, 4)
    assert wrong == []
    with pytest.raises(Truncated):
        read(files, file, 9_999, 2)


@pytest.mark.parametrize(
    ("offset", "count", "there"), [(9_999, 2, 1), (10_000, 1, 0), (20_000, 5, 0), (0, 10_001, 10_000)]
)
def test_an_early_end_is_an_error(files_of, offset, count, there):
    (file,) = files_of(1)
    with pytest.raises(Truncated) as ended:
        read(Files(), file, offset, count)
    assert file.path in str(ended.value)
    assert f"{count:,} bytes were expected at offset {offset:,}" in str(ended.value)
    assert f"after {there:,} of them" in str(ended.value)


def test_mapped_bytes_are_the_file(files_of):
    (file,) = files_of(1)
    with Files().lend(file, mapped=True) as handle:
        assert np.array_equal(handle.mapping, contents(0))
        assert not handle.mapping.flags.writeable


# The file that was opened, and no other.


def rewrite(path):
    with open(path, "r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(0, os.stat(path).st_mtime_ns + 1_000_000_000))


def lengthen(path):
    with open(path, "ab") as file:
        file.write(b"more")


def shorten(path):
    os.truncate(path, 100)


def replace(path):
    """Another file of the same size and time under the same name."""
    before = os.stat(path)
    with open(f"{path}.new", "wb") as file:
        file.write(bytes(before.st_size))
    os.utime(f"{path}.new", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(f"{path}.new", path)


CHANGES = [(rewrite, "rewritten"), (lengthen, "rewritten"), (shorten, "rewritten"), (replace, "replaced")]


ALWAYS_CHECK = ReadPolicy(check_file_every_s=0.0)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("already_open", [False, True])
@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_a_changed_file_is_refused(files_of, change, told, already_open, mapped):
    (file,) = files_of(1)
    files = Files(policy=ALWAYS_CHECK)
    if already_open:
        read(files, file, mapped=mapped)
    change(file.path)
    for _ in range(2):
        with pytest.raises(Changed) as refused:
            read(files, file, mapped=mapped)
        assert file.path in str(refused.value)
        assert told in str(refused.value)
        assert "Open the dataset again" in str(refused.value)
    assert len(read(files, identify(file.path), count=100, mapped=mapped)) == 100, "the new file can be had as such"


@pytest.mark.parametrize("already_open", [False, True])
@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_a_changed_file_is_noticed_soon(files_of, change, told, already_open):
    (file,) = files_of(1)
    files = Files()
    if already_open:
        read(files, file)
    change(file.path)
    if already_open:
        time.sleep(2 * policy.DEFAULT.check_file_every_s)
    with pytest.raises(Changed, match=told):
        read(files, file)


def test_a_file_replaced_a_moment_ago_still_gives_its_own_bytes(files_of):
    (file,) = files_of(1)
    files = Files()
    read(files, file)
    replace(file.path)
    with contextlib.suppress(Changed):
        assert np.array_equal(read(files, file), contents(0))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("already_open", [False, True])
def test_an_emptied_file_is_refused(files_of, already_open, mapped):
    (file,) = files_of(1)
    files = Files(policy=ALWAYS_CHECK)
    if already_open:
        read(files, file, mapped=mapped)
    os.truncate(file.path, 0)
    with pytest.raises(Changed, match="now 0"):
        read(files, file, mapped=mapped)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("already_open", [False, True])
def test_a_deleted_file_is_missing(files_of, already_open, mapped):
    (file,) = files_of(1)
    files = Files(policy=ALWAYS_CHECK)
    if already_open:
        read(files, file, mapped=mapped)
    os.remove(file.path)
    with pytest.raises(Missing) as missed:
        read(files, file, mapped=mapped)
    assert file.path in str(missed.value)


def test_identified_by_size_time_and_inode(files_of):
    (file,) = files_of(1)
    found = os.stat(file.path)
    assert (file.size, file.mtime_ns, file.inode) == (10_000, found.st_mtime_ns, found.st_ino)
    check_unchanged(file)


def test_what_is_not_there_cannot_be_identified(tmp_path):
    with pytest.raises(Missing, match="nowhere"):
        identify(str(tmp_path / "nowhere"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable, match="file/below"):
        identify(str(tmp_path / "file" / "below"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_refused_and_a_folder_is_not(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unavailable, match="a pipe, expected a plain file"):
        identify(str(tmp_path / "pipe"))
    assert identify(str(tmp_path)).path == str(tmp_path)


def test_what_cannot_be_opened_is_unavailable(unopenable):
    with pytest.raises(Unavailable) as refused, Files().lend(unopenable):
        pass
    assert unopenable.path in str(refused.value)


@pytest.fixture
def unopenable(tmp_path, monkeypatch):
    """Something with a name, a size and a time that cannot be opened as a file."""
    monkeypatch.chdir(tmp_path)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        found = os.stat("socket")
        yield FileId("socket", found.st_size, found.st_mtime_ns, found.st_ino)


# Few descriptors.


@PROC
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("max_open", [1, 2, 3, 10])
def test_never_more_open_than_allowed(files_of, tmp_path, max_open, mapped):
    many = files_of(6)
    files = Files(max_open)
    for turn in range(30):
        number = turn * 5 % 6
        assert np.array_equal(read(files, many[number], mapped=mapped), contents(number))
        assert held(tmp_path) == min(max_open, turn + 1, 6)
    files.close()
    assert descriptors(tmp_path) == 0


@PROC
def test_mapped_and_plain_handles_count_together(files_of, tmp_path):
    many = files_of(4)
    files = Files(2)
    for turn in range(20):
        assert np.array_equal(read(files, many[turn % 4], mapped=turn % 3 == 0), contents(turn % 4))
        assert held(tmp_path) <= 2


@PROC
def test_without_a_number_the_system_decides_and_mappings_hold_nothing(files_of, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "descriptor_limit", lambda: 4 * 5 + 3)
    monkeypatch.setattr(pool, "MOST_MAPPED", 7)
    many = files_of(9)
    files, expected = Files(), [contents(number) for number in range(9)]
    for mapped, most in ((False, 5), (True, 5 + 7)):
        for turn in range(30):
            assert np.array_equal(read(files, many[turn % 9], mapped=mapped), expected[turn % 9])
        assert held(tmp_path) == most
        assert descriptors(tmp_path) == 5, "mappings take none"

    def work(seed):
        chance = random.Random(seed)
        for _ in range(100):
            number = chance.randrange(9)
            assert np.array_equal(read(files, many[number], mapped=chance.random() < 0.5), expected[number])

    in_threads(work, 8)
    files.close()
    assert descriptors(tmp_path) == 0


@PROC
def test_the_least_recently_used_goes_first(files_of, tmp_path):
    one, two, three = files_of(3)
    files = Files(2)
    for file in (one, two, one, three):
        read(files, file)
    names = {os.path.basename(os.readlink(f"/proc/self/fd/{name}")) for name in proc_entries(tmp_path)}
    assert names == {"file0", "file2"}


def proc_entries(folder):
    entries = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(str(folder)):
                entries.append(name)
        except OSError:
            continue
    return entries


@PROC
@pytest.mark.parametrize("mapped", [False, True])
def test_with_none_allowed_nothing_stays_open(files_of, tmp_path, mapped):
    many = files_of(3)
    files = Files(0)
    for turn in range(9):
        assert np.array_equal(read(files, many[turn % 3], mapped=mapped), contents(turn % 3))
        assert held(tmp_path) == 0


@PROC
def test_one_file_lent_twice_is_open_once(files_of, tmp_path):
    (file,) = files_of(1)
    files = Files(1)
    with files.lend(file) as one, files.lend(file) as other:
        assert one is other
        assert descriptors(tmp_path) == 1
    assert descriptors(tmp_path) == 1


@PROC
@pytest.mark.parametrize("max_open", [0, 3])
def test_many_threads_share_few_descriptors(files_of, tmp_path, max_open):
    many = files_of(20)
    expected = [contents(number) for number in range(20)]
    files, wrong, most = Files(max_open), [], []
    allowed = max_open or 8  # each of the eight opens its own

    def work(seed):
        chance = random.Random(seed)
        for turn in range(60):
            number, offset = chance.randrange(20), chance.randrange(9_000)
            got = read(files, many[number], offset, 1_000, mapped=chance.random() < 0.3)
            if not np.array_equal(got, expected[number][offset : offset + 1_000]):
                wrong.append(number)
            if turn % 5 == seed % 5:
                with files._pool._changed:  # nothing is opened or closed while we count
                    most.append(held(tmp_path))

    in_threads(work, 8)
    assert wrong == []
    assert max(most) <= allowed
    files.close()
    assert descriptors(tmp_path) == 0


def in_threads(work, count):
    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "waits for a handle that never comes"


def waiting(files, count):
    """Until so many threads wait for a handle."""
    while True:
        with files._pool._changed:
            if len(files._pool._changed._waiters) == count:
                return


def test_who_must_wait_gets_a_handle_when_one_comes_back(files_of):
    one, two = files_of(2)
    files, got = Files(1), []
    with files.lend(one):
        thread = threading.Thread(target=lambda: got.append(read(files, two)), daemon=True)
        thread.start()
        waiting(files, 1)
        assert got == []
    thread.join(10)
    assert np.array_equal(got[0], contents(1))


def test_a_file_that_cannot_be_opened_leaves_nobody_else_waiting(files_of, unopenable):
    one, two = files_of(2)
    files, got = Files(1), []

    def refused():
        with pytest.raises(Unavailable), files.lend(unopenable):
            pass
        got.append("refused")

    def wanted():
        got.append(read(files, two))

    with files.lend(one):
        threads = []
        for number, work in enumerate((refused, wanted), 1):  # in this order, so that the bad one is woken first
            threads.append(threading.Thread(target=work, daemon=True))
            threads[-1].start()
            waiting(files, number)
    for thread in threads:
        thread.join(2)
    assert len(got) == 2, "the second thread still waits, though nothing is open"


def test_a_failed_open_takes_no_place(files_of, unopenable):
    (file,) = files_of(1)
    files = Files(1)
    for _ in range(3):
        with pytest.raises(Unavailable), files.lend(unopenable):
            pass
        assert np.array_equal(read(files, file), contents(0))


@PROC
def test_closed_files_can_be_read_again(files_of, tmp_path):
    (file,) = files_of(1)
    files = Files()
    for _ in range(3):
        assert np.array_equal(read(files, file), contents(0))
        assert descriptors(tmp_path) == 1
        files.close()
        assert descriptors(tmp_path) == 0


@PROC
@pytest.mark.parametrize("mapped", [False, True])
def test_files_that_nobody_has_any_more_are_closed(files_of, tmp_path, mapped):
    many = files_of(3)
    files = Files()
    for file in many:
        read(files, file, mapped=mapped)
    assert held(tmp_path) == 3
    del files
    gc.collect()
    assert held(tmp_path) == 0


@PROC
def test_closing_spares_what_is_lent(files_of, tmp_path):
    one, two = files_of(2)
    files = Files()
    read(files, two)
    with files.lend(one) as handle:
        files.close()
        assert descriptors(tmp_path) == 1
        target = np.empty(10_000, np.uint8)
        handle.read_into(0, target)
        assert np.array_equal(target, contents(0))


@PROC
def test_an_error_inside_a_loan_returns_it(files_of, tmp_path):
    one, two = files_of(2)
    files = Files(1)
    with pytest.raises(KeyError), files.lend(one):
        raise KeyError
    assert np.array_equal(read(files, two), contents(1))
    assert descriptors(tmp_path) == 1


@pytest.mark.parametrize("max_open", [-1, -100])
def test_fewer_than_none_is_refused(max_open):
    with pytest.raises(ConfigError, match=f"max_open_files={max_open}"):
        Files(max_open)


@pytest.mark.parametrize("max_open", ["3", 1.5, ()])
def test_a_limit_that_is_no_number_is_refused(max_open):
    with pytest.raises(ConfigError, match="max_open_files"):
        Files(max_open)


# Other processes.


@PROC
@FORK
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("mapped", [False, True])
def test_a_forked_child_closes_what_it_inherited_and_opens_its_own(files_of, tmp_path, mapped):
    one, two = files_of(2)
    files = Files(2)
    read(files, one, mapped=mapped)
    read(files, two, mapped=mapped)
    child = os.fork()
    if child == 0:
        try:
            inherited = held(tmp_path)
            right = np.array_equal(read(files, one, mapped=mapped), contents(0))
            own = held(tmp_path)
            os._exit(0 if (inherited, right, own) == (0, True, 1) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held(tmp_path) == 2, "the parent keeps its own"
    assert np.array_equal(read(files, two, mapped=mapped), contents(1))


@PROC
@FORK
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_another_thread_reads_does_not_wait_for_it(files_of):
    one, two = files_of(2)
    files, go_on, borrowed = Files(1), threading.Event(), threading.Event()

    def hold():
        with files.lend(one):
            borrowed.set()
            go_on.wait(30)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    borrowed.wait(30)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if np.array_equal(read(files, two), contents(1)) else 1)
        finally:
            os._exit(2)
    go_on.set()
    thread.join(30)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@PROC
def test_pickled_without_what_is_open(files_of, tmp_path):
    (file,) = files_of(1)
    files = Files(7)
    read(files, file)
    again = pickle.loads(pickle.dumps(files))
    assert again.max_open == 7
    assert descriptors(tmp_path) == 1
    assert np.array_equal(read(again, pickle.loads(pickle.dumps(file))), contents(0))
    assert descriptors(tmp_path) == 2
    again.close()
    assert descriptors(tmp_path) == 1


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
@pytest.mark.parametrize("order", ["forward", "in pieces, at random", "two threads, forward"])
def test_the_system_is_told_not_to_read_ahead_of_who_jumps(tmp_path, monkeypatch, order):
    advice = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, offset, length, what: advice.append(what))
    with open(tmp_path / "large", "wb") as file:  # a hole: it takes no room
        file.truncate(2 * 2**30)
    files = Files()
    piece, row = np.empty(2**20, np.uint8), 8 * 2**20
    rows = {"forward": range(40), "in pieces, at random": [200, 3, 150, 77, 240, 9], "two threads, forward": []}[order]
    offsets = [number * row + inside * 2**20 for number in rows for inside in range(3)]
    if not rows:
        offsets = [place * row + ahead for place in range(40) for ahead in (4 * row, 0)]
    with files.lend(files.identify(str(tmp_path / "large"))) as handle:
        for offset in offsets:
            handle.read_into(offset, piece)
    files.close()
    assert advice == ([os.POSIX_FADV_RANDOM] if order == "in pieces, at random" else [])


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="advice is POSIX")
@pytest.mark.parametrize("rate", [1e18, 1e-3])  # every read is slower than the one, and quicker than the other
def test_what_comes_next_is_announced_where_reads_are_slow(files_of, monkeypatch, rate):
    told = []
    monkeypatch.setattr(handles, "CACHED_BYTES_PER_S", rate)
    monkeypatch.setattr(handles, "CALL_S", 0.0)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *advice: told.append(advice))
    (file,) = files_of(1)
    goal = np.empty(1_000, np.uint8)
    with Files().lend(file) as handle:
        handle.expect(0, 5_000)
        assert told == [], "nothing is known before the first read"
        handle.read_into(0, goal)
        handle.expect(1_000, 4_000)
    assert np.array_equal(goal, contents(0)[:1_000])
    assert told == ([(1_000, 4_000, os.POSIX_FADV_WILLNEED)] if rate > 1 else [])
