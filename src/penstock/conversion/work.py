"""The folder in which a conversion is under way, and how a finished file gets its name.

It lies beside the output, so that renaming moves files without copying them:

    .out.zarr.penstock/lock           locked while a call of ``convert`` works in the folder
    .out.zarr.penstock/plan.json      which conversion it is
    .out.zarr.penstock/done/17.json   task 17 is done, and what it wrote
    .out.zarr.penstock/partial/       files that are being written; worthless after an interruption
    .out.zarr.penstock/data/          files that are whole

Each task writes its own files and its own note, so that any number of processes on any number of machines can work
in the same folder, and whatever is killed leaves nothing that looks finished. Calls that do a part share the lock; a
call that finishes the output, and removes the folder, has it alone.
"""

import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from penstock.base.dataclass import dataclass
from penstock.errors import ConvertFailed
from penstock.files import locks
from penstock.files.manifest import Digests

CHECKSUM = "crc32 of the rest"
LOCK_TRIES = 10


@dataclass(frozen=True)
class Written:
    """A whole file: its name in the data folder, its size, and digests of its blocks (empty: not known yet)."""

    name: str
    size: int
    digests: str


class Work:
    """The folder of one conversion."""

    def __init__(self, goal: str) -> None:
        self.goal = os.path.abspath(goal)
        parent, name = os.path.split(self.goal)
        self.folder = os.path.join(parent, f".{name}.penstock")

    def path(self, *parts: str) -> str:
        """A place in it."""
        return os.path.join(self.folder, *parts)

    def data(self, name: str) -> str:
        """Where a whole file lies until all are."""
        return self.path("data", *name.split("/"))

    def key(self) -> str | None:
        """Which conversion is under way here; None for none, and like no other's if the plan is damaged."""
        plan = self.read_json("plan.json")
        return None if plan is None else str(plan.get("key", "damaged"))

    @contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Refuse to go on while another call works here; ``shared``: unless that one shares the folder, too."""
        with self._lock_file() as file:
            if locks.is_taken(file.fileno(), shared=shared) or not os.fstat(file.fileno()).st_nlink:
                raise ConvertFailed(
                    f"{self.goal}: another process is converting to it. Wait until it has ended, and convert again, "
                    f"which goes on with what it did"
                )
            try:
                yield
            finally:
                if self.key() is None and not locks.is_taken(file.fileno()):  # nothing was begun
                    with suppress(OSError):
                        os.unlink(self.path("lock"))
                        os.rmdir(self.folder)

    def _lock_file(self) -> BinaryIO:
        with writing(self.folder):
            for _ in range(LOCK_TRIES):
                os.makedirs(self.folder, exist_ok=True)
                with suppress(FileNotFoundError):  # the folder was removed this moment
                    return open(self.path("lock"), "ab")
            raise FileNotFoundError(errno.ENOENT, "is removed again and again")

    def partial(self, name: str, ending: str = "") -> str:
        """A place for a file that is being written: nobody else has this name, on this machine or another."""
        unique = f"{os.urandom(8).hex()}.{os.getpid()}"
        return self.path("partial", f"{name.replace('/', '-')}.{unique}{ending}")

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Create the folder if it does not exist."""
        with writing(self.folder):
            for name in ("done", "partial", "data"):
                os.makedirs(self.path(name), exist_ok=True)
            if self.key() is None:
                self.write_json("plan.json", plan)

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """A small file, whole or not there, with a checksum of itself."""
        path, plain = self.path(name), json.loads(json.dumps(document))
        plain[CHECKSUM] = _checksum(plain)
        partial = self.partial(os.path.basename(name))
        with _removed_on_failure(partial):
            with open(partial, "w", encoding="utf-8") as file:
                json.dump(plain, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """What ``write_json`` wrote; None where it is not there, and empty if it is damaged."""
        try:
            with open(self.path(name), "rb") as file:
                document = json.load(file)
            found = document.pop(CHECKSUM)
            return document if found == _checksum(document) else {}
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    @contextmanager
    def whole(self, name: str) -> Iterator["OutputFile"]:
        """A file of the data folder to write from beginning to end; it is there when it is whole."""
        path, partial = self.data(name), self.partial(name)
        with writing(path), _removed_on_failure(partial):
            with open(partial, "w+b", buffering=0) as file:
                yield OutputFile(file)
                os.fsync(file.fileno())
            self._make_folders(name)
            os.replace(partial, path)

    def _make_folders(self, name: str) -> None:
        """The folders of a file, but not those above: a task that ends after the conversion leaves nothing behind."""
        parts = name.split("/")
        for depth in range(1, len(parts)):
            with suppress(FileExistsError):
                os.mkdir(self.path("data", *parts[:depth]))

    def note(self, number: int, files: list[Written], about: Mapping[str, Any]) -> None:
        """Write down that a task is done."""
        with writing(self.folder):
            listed = [[each.name, each.size, each.digests] for each in files]
            self.write_json(f"done/{number}.json", {"files": listed, **about})

    def done(self, number: int) -> list[Written] | None:
        """What a task wrote; None where it is not done, or what it wrote is gone."""
        note = self.read_json(f"done/{number}.json")
        if not note:
            return None
        found = [Written(*each) for each in note["files"]]
        if note.get("boot"):  # what was only in the system's memory is gone if the machine was started again
            return found if note["boot"] == boot_id() else None
        return found if all(_is_there(self, each) for each in found) else None

    def remove(self) -> None:
        """Take the folder away. The caller has the lock."""
        self.forget()
        with suppress(OSError):  # another call, which finds the output whole, looks at it this moment
            os.unlink(self.path("lock"))
            os.rmdir(self.folder)

    def forget(self) -> None:
        """Remove all that was done; the plan goes last, so that an interrupted removal is taken up again."""
        for name in ("partial", "data", "done", "replaced"):
            with suppress(FileNotFoundError):
                shutil.rmtree(self.path(name))
        for name in ("files.json", "provenance.json", "plan.json"):
            with suppress(FileNotFoundError):
                os.unlink(self.path(name))

    def clear_partial(self) -> None:
        """Remove what was being written when it was interrupted. The caller has the lock."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self.path("partial")):
                os.unlink(self.path("partial", name))


def _checksum(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def boot_id() -> str:
    """Which start of this machine this is; unlike any other where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"process {os.getpid()}"


def _is_there(work: Work, file: Written) -> bool:
    try:
        return os.path.getsize(work.data(file.name)) == file.size
    except OSError:
        return False


class OutputFile:
    """A file that is written from beginning to end; its blocks are digested on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self._digests = file, 0, Digests()

    def write(self, data: Any) -> int:
        """Append bytes, and return their offset."""
        view, begin = memoryview(data).cast("B"), self.size
        self._digests.add(view)
        write_at(self.file.fileno(), view, begin)
        self.size += len(view)
        return begin

    def digests(self) -> str:
        """Of all blocks, when everything is written."""
        return self._digests.whole().hex()


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """All of it, however many calls that takes."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def read_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill ``view``; what is not there is an error."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError(0, "the file ends too early")
        done += count


@contextmanager
def _removed_on_failure(partial: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


@contextmanager
def writing(path: str) -> Iterator[None]:
    """What the system says of writing, as an error of ours."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)  # HDF5 adds a page to it
        raise ConvertFailed(
            f"{path}: cannot be written ({reason}, errno {error.errno}). What was written before "
            f"stays: remove the cause (make room, say) and convert again with the same arguments, which goes on from "
            f"there"
        ) from error
