"""Whole files fetched once, kept in a folder of limited size, and shared by all processes that name it.

Each version of a file is one entry, ``<hash>.cached``. The hash is of its address without the signature, its size, its
ETag and its time: two addresses never share an entry, and neither do two versions.

Rules:
1. An entry is complete: it is written under another name, checked, and renamed. Digests of its blocks are written
   beside it, so that a copy that was damaged later is noticed when it is read; it is then removed and fetched again,
   and so is one of another size.
2. One process fetches and the others wait for it. Its lock ends with the process, however that ends; the next process
   removes what it left unfinished.
3. Room is made before it is used, by removing the copies that were not read for the longest time; never one that is
   being read, which is locked, and never a file that is not named as above.
4. The folder and what is in it are the user's own, or root's, and no other user may write to it or replace it: such a
   user could choose the data. Folders are made 0700 and files 0600, and no link is followed.
5. Waiting ends when the fetching process has written nothing for ``patience_s``, or there was no room for that long.
"""

import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field

from penstock.base import stop
from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.sizes import format_size
from penstock.errors import ConfigError, LimitExceeded, SourceError, Unavailable, Unsafe
from penstock.files import locks

_ENTRY_NAME = r"([0-9a-f]{40})\.(cached|part|lock|sums)"
FOLDER_LOCK = "penstock-cache.lock"

PATIENCE_S = 60.0

TOUCH_EVERY_S = 1.0
"""How precisely the time of last use is kept."""

_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)

Fetch = Callable[[int], bytes | None]
"""Writes all of a file to an open descriptor, or raises; returns digests of its blocks, if there are to be any."""

FolderState = tuple[int, int, int, int] | None
"""Device, number, mode and owner of a folder; None where there is none."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheFull(Unavailable):
    """The disk has no room for a copy."""


@dataclass(frozen=True)
class FileCache:
    """A folder of files from elsewhere, at most ``limit_bytes`` of them; None for as many as the disk holds."""

    folder: str
    limit_bytes: int | None = None
    patience_s: float = PATIENCE_S
    _trusted: set[FolderState] = field(default_factory=set, init=False, repr=False, compare=False)
    """How the folder looked when it was checked: the check takes longer than reading from a copy."""

    def _prepare(self) -> None:
        """Make and check the folder, when it is first used: many programs name a cache and then read local files."""
        if _folder_state(self.folder) in self._trusted:
            return
        try:
            locks.make_folder(self.folder)
        except OSError as error:
            raise ConfigError(f"cache_dir={self.folder!r}: cannot be used ({error.strerror})") from error
        locks.check_folder(self.folder, f"cache_dir={self.folder!r}")
        self._trusted.add(_folder_state(self.folder))

    @contextmanager
    def lent(self, file: FileId, fetch: Fetch) -> Iterator[int]:
        """A descriptor of the file's copy, fetched if need be; the copy is not removed while it is lent."""
        self._check_fits(file)
        self._prepare()
        key = key_of(file)
        while (descriptor := self._open(key, file)) is None:
            self._fetch_copy(key, file, fetch)
        try:
            yield descriptor
        finally:
            locks.unlock(descriptor)
            os.close(descriptor)

    def path(self, file: FileId) -> str:
        """Where a file's copy is, if it is there."""
        return self._path(key_of(file), "cached")

    def has(self, file: FileId) -> bool:
        """Whether its copy is there now."""
        return os.path.exists(self.path(file))

    def sums(self, file: FileId) -> bytes:
        """Digests of the blocks of a copy as it was made; empty if they were not saved."""
        try:
            descriptor = os.open(self._path(key_of(file), "sums"), os.O_RDONLY | _FLAGS)
        except OSError:
            return b""
        with open(descriptor, "rb") as written:
            return written.read(file.size // 1024 + 1024)

    def remove(self, file: FileId) -> None:
        """Remove a damaged copy; threads that read it can finish."""
        for kind in ("cached", "sums"):
            with suppress(OSError):
                os.unlink(self._path(key_of(file), kind))

    # Reading.

    def _open(self, key: str, file: FileId) -> int | None:
        """The copy, locked against removal; None if there is none."""
        path = self._path(key, "cached")
        try:
            descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unsafe(f"{path}: is not a file that this cache wrote ({error.strerror}); remove it") from error
        try:
            found = os.fstat(descriptor)
            if not locks.try_lock(descriptor, shared=True) or not _is_at(path, found):
                os.close(descriptor)  # it is being removed this moment
                return None
            if not locks.is_trusted(found):
                raise Unsafe(
                    f"{path}: the copy of {file.path} was put there by another user (uid {found.st_uid}), or others "
                    f"may write to it (mode {stat.S_IMODE(found.st_mode):o}); remove it, and use a cache_dir that "
                    f"nobody else may write to"
                )
            if not stat.S_ISREG(found.st_mode):
                raise Unsafe(f"{path}: is not a file that this cache wrote; remove it")
            if found.st_size != file.size:  # cut short or written to since: not a copy any more
                self.remove(file)
                os.close(descriptor)
                return None
            if time.time() - found.st_mtime > TOUCH_EVERY_S:
                with suppress(OSError):
                    os.utime(path)
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
        return descriptor

    # Fetching.

    def _fetch_copy(self, key: str, file: FileId, fetch: Fetch) -> None:
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise Unavailable(f"{file.path}: has no copy in cache_dir={self.folder!r}, which cannot be written to")
        with self._lock_entry(key, file):
            final, partial = self._path(key, "cached"), self._path(key, "part")
            if os.path.exists(final):
                return
            with suppress(FileNotFoundError):
                os.unlink(partial)  # of a process that was killed
            try:
                descriptor = self._reserve(partial, file)
                try:
                    sums = fetch(descriptor)
                    _check_written(descriptor, file)
                finally:
                    os.close(descriptor)
                self._write_sums(key, sums)
                with self._lock_folder():  # a process that counts meanwhile would find it under neither name
                    os.replace(partial, final)
            except OSError as error:
                raise (CacheFull if error.errno in _FULL else Unavailable)(
                    f"{file.path}: cannot be kept in cache_dir={self.folder!r}: {error.strerror} (errno {error.errno})"
                ) from error
            finally:
                with suppress(OSError):
                    os.unlink(partial)

    def _write_sums(self, key: str, sums: bytes | None) -> None:
        path = self._path(key, "sums")
        with suppress(FileNotFoundError):
            os.unlink(path)
        if sums:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
            with open(descriptor, "wb") as file:
                file.write(sums)

    @contextmanager
    def _lock_entry(self, key: str, file: FileId) -> Iterator[None]:
        """No other process fetches this file meanwhile."""
        path = self._path(key, "lock")
        waiting = _Backoff(self.patience_s)
        while (descriptor := _lock_file(path)) is None:
            with suppress(OSError):
                waiting.note(os.stat(self._path(key, "part")).st_mtime_ns)
            if os.path.exists(self._path(key, "cached")):
                waiting.note("there")
            if waiting.gives_up():
                raise Unavailable(
                    f"{file.path}: another process fetches it into cache_dir={self.folder!r}, and has written nothing "
                    f"for {self.patience_s:g} s; if it hangs, end it"
                )
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(path)
            locks.unlock(descriptor)
            os.close(descriptor)

    def _reserve(self, partial: str, file: FileId) -> int:
        """A new file of the right size, which counts as used from now on."""
        waiting = _Backoff(self.patience_s)
        while True:
            with self._lock_folder():
                used = self._make_room(file.size)
                if self.limit_bytes is None or used + file.size <= self.limit_bytes:
                    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
                    os.ftruncate(descriptor, file.size)
                    return descriptor
            if waiting.gives_up():
                raise LimitExceeded(
                    f"{file.path}: no room in cache_dir={self.folder!r} for its {file.size:,} bytes: {used:,} of "
                    f"cache_bytes={self.limit_bytes:,} belong to files that are being read or fetched. Give at least "
                    f"cache_bytes={used + file.size:,}, or use fewer threads and processes"
                )

    def _check_fits(self, file: FileId) -> None:
        if self.limit_bytes is not None and file.size > self.limit_bytes:
            raise LimitExceeded(
                f"{file.path}: has {file.size:,} bytes ({format_size(file.size)}), more than "
                f"cache_bytes={self.limit_bytes:,} in all; give cache_bytes={file.size:,} at least, and better as much "
                f"for every file that is read at a time"
            )

    # Removing.

    def _make_room(self, wanted: int) -> int:
        """Remove abandoned downloads, then the copies that were not read for longest; returns the bytes still used."""
        entries: list[tuple[int, int, str]] = []
        used = 0
        with os.scandir(self.folder) as found:
            for entry in list(found):
                named = re.fullmatch(_ENTRY_NAME, entry.name)
                if named is None:
                    continue
                if named[2] == "sums":
                    if not any(os.path.exists(self._path(named[1], kind)) for kind in ("cached", "part")):
                        with suppress(OSError):
                            os.unlink(entry.path)
                    continue
                if named[2] != "cached" and self._remove_leftover(named[1], entry.path):
                    continue
                with suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    used += about.st_size
                    if named[2] == "cached":
                        entries.append((about.st_mtime_ns, about.st_size, entry.path))
        if self.limit_bytes is None:
            return used
        for _, size, path in sorted(entries):
            if used + wanted <= self.limit_bytes:
                break
            if _remove_unread(path):
                used -= size
        return used

    def _remove_leftover(self, key: str, path: str) -> bool:
        """Remove what a process left that ended while fetching."""
        lock = self._path(key, "lock")
        descriptor = _lock_file(lock)
        if descriptor is None:
            return False
        with suppress(OSError):
            os.unlink(path)
        with suppress(OSError):
            os.unlink(lock)
        locks.unlock(descriptor)
        os.close(descriptor)
        return True

    @contextmanager
    def _lock_folder(self) -> Iterator[None]:
        """No other process counts or removes meanwhile."""
        descriptor = os.open(os.path.join(self.folder, FOLDER_LOCK), os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        waiting = _Backoff(self.patience_s)
        try:
            while not locks.try_lock(descriptor):
                if waiting.gives_up():
                    raise Unavailable(f"cache_dir={self.folder!r}: stays locked by another process")
            yield
        finally:
            locks.unlock(descriptor)
            os.close(descriptor)

    def _path(self, key: str, kind: str) -> str:
        return os.path.join(self.folder, f"{key}.{kind}")


class _Backoff:
    """Waits a little longer every time, and ends if nothing changes for long."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s, self._nap_s = patience_s, 0.005
        self._seen: object = None
        self._since = time.monotonic()

    def note(self, what: object) -> None:
        """Start waiting anew if this has changed."""
        if what != self._seen:
            self._seen, self._since = what, time.monotonic()

    def gives_up(self) -> bool:
        """Sleep a little; True once nothing has changed for as long as the patience."""
        if stop.is_asked():
            raise SourceError("was interrupted: the loader was closed")
        stop.sleep(self._nap_s)
        self._nap_s = min(0.1, 1.5 * self._nap_s)
        return time.monotonic() - self._since > self._patience_s


def _folder_state(folder: str) -> FolderState:
    try:
        about = os.stat(folder)
    except OSError:
        return None
    return about.st_dev, about.st_ino, about.st_mode, about.st_uid


def key_of(file: FileId) -> str:
    """The name of a version of a file."""
    parts = (file.kept_as, file.size, file.etag, file.mtime_ns)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


def _lock_file(path: str) -> int | None:
    """A lock file, made if need be and locked; None if somebody else has it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
    except PermissionError:  # Windows: it is being removed
        return None
    if locks.try_lock(descriptor) and _is_at(path, os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)  # locked by another, or removed by the one that had it
    return None


def _is_at(path: str, found: os.stat_result) -> bool:
    """Whether an open file is still the one under this name."""
    try:
        now = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino)


def _remove_unread(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | _FLAGS)
    except OSError:
        return False
    try:
        if not locks.try_lock(descriptor):
            return False
        os.unlink(path)
        with suppress(FileNotFoundError):
            os.unlink(f"{path.removesuffix('cached')}sums")
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _check_written(descriptor: int, file: FileId) -> None:
    written = os.fstat(descriptor).st_size
    if written != file.size:
        raise Unavailable(f"{file.path}: {written:,} bytes arrived instead of {file.size:,}; the copy is not kept")
