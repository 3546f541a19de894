"""What is kept between runs is believed only where nobody else can have written it or put it there."""

import errno
import os

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, Unsafe
from penstock.files import locks, manifest
from penstock.files import saved as saved_tables
from penstock.files.cache import FileCache
from penstock.files.handles import identify

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give folders away")
NOBODY = 65534


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "above" / "folder"
    found.mkdir(parents=True, mode=0o700)
    return found


def above(folder, mode):
    folder.parent.chmod(mode)


UNSAFE = {
    "anybody may write": lambda folder: folder.chmod(0o777),
    "anybody may write to one that is sticky": lambda folder: folder.chmod(0o1777),
    "its group may write": lambda folder: folder.chmod(0o770),
    "anybody may write above": lambda folder: above(folder, 0o777),
    "by way of a link, anybody may write above": lambda folder: above(folder, 0o777),
}
SAFE = {
    "others may look": lambda folder: folder.chmod(0o755),
    "anybody may write above, which is sticky": lambda folder: above(folder, 0o1777),
    "a group may write above": lambda folder: above(folder, 0o775),
}


@pytest.mark.case(22)
@pytest.mark.parametrize("case", UNSAFE)
def test_unsafe(folder, tmp_path, case):
    assert locks.why_distrusted(str(folder)) == ""
    UNSAFE[case](folder)
    if "link" in case:
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"
    why = locks.why_distrusted(str(folder))
    assert "may write to" in why
    assert "chmod go-w" in why
    cache = FileCache(str(folder))
    with pytest.raises(ConfigError, match=r"cache_dir=.*may write to.*chmod"), cache.lent(_file(tmp_path), _fetch):
        pass
    with pytest.raises(ConfigError, match=r"index_dir=.*may write to.*chmod"):
        ps.open(_data(tmp_path), index_dir=folder)


@pytest.mark.case(22)
@pytest.mark.parametrize("case", SAFE)
def test_safe(folder, tmp_path, case):
    SAFE[case](folder)
    assert locks.why_distrusted(str(folder)) == ""
    with FileCache(str(folder)).lent(_file(tmp_path), _fetch):
        pass
    assert len(ps.open(_data(tmp_path), index_dir=folder)) == 3


@pytest.mark.case(22)
@as_root
def test_of_another_user(folder):
    os.chown(folder.parent, NOBODY, NOBODY)
    assert locks.why_distrusted(str(folder)) == "", "a colleague's folder may hold one of our own"
    os.chown(folder, NOBODY, NOBODY)
    assert "its owner is another user (uid 65534" in locks.why_distrusted(str(folder))


@pytest.mark.case(22)
def test_a_table_that_others_could_have_written_is_not_read(folder, tmp_path):
    file = identify(_data(tmp_path))
    saved = saved_tables.save(str(folder), file, "table", {}, {"a": np.arange(3)})
    assert saved_tables.load(str(folder), file, "table") is not None
    os.chmod(saved.path, 0o660)
    assert saved_tables.load(str(folder), file, "table") is None
    os.chmod(saved.path, 0o600)
    folder.chmod(0o770)
    assert saved_tables.load(str(folder), file, "table") is None
    assert saved_tables.save(str(folder), file, "other", {}, {"a": np.arange(3)}) is None


@pytest.mark.case(22)
def test_a_copy_that_others_may_write_to_is_refused(folder, tmp_path):
    cache, file = FileCache(str(folder)), _file(tmp_path)
    with cache.lent(file, _fetch):
        pass
    os.chmod(cache.path(file), 0o664)
    with pytest.raises(Unsafe, match=r"others may write to it \(mode 664\)"), cache.lent(file, _fetch):
        pass


@pytest.mark.case(22)
def test_a_default_folder_that_is_not_safe_is_not_used(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(folder / "cache"))
    folder.chmod(0o777)
    path = tmp_path / "many.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=np.zeros((5000, 1), "u1"), chunks=(1, 1))
    assert len(ps.open(path)) == 5000
    assert not list(folder.rglob("*.table"))


@pytest.mark.case(22)
def test_folders_are_made_for_the_user_alone(tmp_path):
    before = os.umask(0)
    try:
        locks.make_folder(str(tmp_path / "a" / "b" / "c"))
    finally:
        os.umask(before)
    assert [os.stat(tmp_path / each).st_mode & 0o777 for each in ("a", "a/b", "a/b/c")] == [0o700] * 3
    assert locks.why_distrusted(str(tmp_path / "a/b/c")) == ""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="exists"):
        locks.make_folder(str(tmp_path / "file"))


@pytest.mark.case(22)
@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_manifest_that_others_may_write_to_is_refused(tmp_path, mode):
    path = ps.write_manifest(_data(tmp_path))
    assert manifest.load(path)
    os.chmod(path, mode)
    with pytest.raises(Unsafe, match=r"may write to this manifest.*chmod go-w"):
        ps.open(_data(tmp_path), manifest=path)


def _data(tmp_path):
    path = tmp_path / "a.npy"
    if not path.exists():
        np.save(path, np.arange(3))
    return str(path)


def _file(tmp_path):
    return identify(_data(tmp_path))


def _fetch(descriptor):
    os.ftruncate(descriptor, os.fstat(descriptor).st_size)


def test_a_lock_is_taken_by_one_at_a_time(tmp_path, monkeypatch):
    path = tmp_path / "locked"
    path.touch()
    with open(path, "r+b") as one, open(path, "r+b") as other:
        assert not locks.is_taken(one.fileno())
        assert locks.is_taken(other.fileno())
        locks.unlock(one.fileno())
        assert not locks.is_taken(other.fileno())

    def refuse(*_):
        raise OSError(errno.ENOSYS, "no locks on this file system")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with open(path, "r+b") as file:
        assert not locks.is_taken(file.fileno()), "where there are no locks, nobody has one"
