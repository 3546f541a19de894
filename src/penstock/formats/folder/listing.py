"""Files of a folder and of the folders in it, listed once.

Rules:
1. Folders are in the order of their paths, files of a folder in the order of their names, as in torchvision.
2. Hidden files and folders are skipped.
3. A link that leads out of the folder is an error, and so is a link to a folder. Links to files inside are files. A
   pipe or device with the name of a wanted file is an error.
4. A list is saved with the times of all folders, and used again while they are the same: a file that is added, removed
   or renamed changes its folder's time. One that is rewritten in place is noticed when it is read.
5. A list is columns and one buffer of names: a million files take some 70 MB, or none if it is saved and mapped.
"""

import errno
import os
import stat
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from operator import attrgetter

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.text_column import TextColumn
from penstock.errors import Corrupt, DataError, Missing, Unavailable, Unsafe
from penstock.files import saved as saved_tables
from penstock.files.saved import SavedTable

_SAVED_AS = "files of a folder"


@dataclass(frozen=True)
class FileList:
    """The wanted files of one folder."""

    root: str
    names: TextColumn
    """Paths from the root, with slashes."""
    sizes: np.ndarray
    mtimes: np.ndarray
    inodes: np.ndarray
    tops: np.ndarray
    """The folder of the root that each is in, as an index into ``top_names`` (int32); -1 for none."""
    top_names: tuple[str, ...]
    passed_over: int = 0
    """Files of other kinds."""
    beside: Mapping[str, int] = field(default_factory=dict)
    """How many of these have the name of a wanted file with another extension, by extension."""
    left_out: tuple[DataError, ...] = ()
    """Why links and pipes were left out."""
    saved: str = ""
    """Where the list is saved; it is mapped from there, and takes no memory."""

    @property
    def index_bytes(self) -> int:
        """Memory that the list takes."""
        columns = (self.sizes, self.mtimes, self.inodes, self.tops)
        return 0 if self.saved else self.names.nbytes + sum(column.nbytes for column in columns)

    def __len__(self) -> int:
        return len(self.names)


def list_files(root: str, is_wanted: Callable[[str], bool], folder: str | None, what: str) -> FileList:
    """The files whose extension is wanted (``what`` describes them); from ``folder`` if the saved list is current."""
    where = FileId(os.path.abspath(root), 0, 0, 0)
    name = f"{_SAVED_AS}: {what}"
    if folder is not None:
        found = _open_saved(root, saved_tables.load(folder, where, name))
        if found is not None:
            return found
    walk = _FolderWalk(root, is_wanted)
    walk.folder("")
    listed = walk.files()
    if folder is None or listed.left_out:
        return listed
    columns = {
        "names": listed.names.buffer, "ends": listed.names.ends, "sizes": listed.sizes, "mtimes": listed.mtimes,
        "inodes": listed.inodes, "tops": listed.tops, **walk.folders(),
    }  # fmt: skip
    header = {"passed_over": walk.passed_over, "beside": dict(walk.beside)}
    return _open_saved(root, saved_tables.save(folder, where, name, header, columns)) or listed


def _open_saved(root: str, saved: SavedTable | None) -> FileList | None:
    if saved is None:
        return None
    try:
        found = saved.columns()
        folders = TextColumn(found["folders"], found["folder_ends"])
        for name, mtime in zip(folders.raws(), found["folder_mtimes"].tolist(), strict=True):
            if os.stat(os.path.join(os.fsencode(root), name)).st_mtime_ns != mtime:
                return None
        top_names = tuple(TextColumn(found["top_names"], found["top_ends"]))
        return FileList(
            root, TextColumn(found["names"], found["ends"]), sizes=found["sizes"], mtimes=found["mtimes"],
            inodes=found["inodes"], tops=found["tops"], top_names=top_names,
            passed_over=int(saved.header["passed_over"]), beside=dict(saved.header["beside"]), saved=saved.path,
        )  # fmt: skip
    except (Corrupt, OSError, ValueError, KeyError, TypeError):
        return None


class _FolderWalk:
    """Collects files, folder by folder."""

    def __init__(self, root: str, is_wanted: Callable[[str], bool]) -> None:
        self.root, self.is_wanted = root, is_wanted
        self.inside = os.path.join(os.path.realpath(root), "")
        self.names, self.ends = bytearray(), array("q")
        self.sizes, self.mtimes, self.inodes, self.tops = array("q"), array("q"), array("Q"), array("i")
        self.top_names: list[str] = []
        self.folder_names, self.folder_ends, self.folder_mtimes = bytearray(), array("q"), array("q")
        self.passed_over = 0
        self.beside: Counter[str] = Counter()
        self.left_out: list[DataError] = []

    def folder(self, path: str) -> None:
        """Add a folder and those in it; ``path`` is relative to the root."""
        full = os.path.join(self.root, path) if path else self.root
        try:
            mtime = os.stat(full).st_mtime_ns  # before listing: a file added meanwhile makes the list outdated
            with os.scandir(full) as found:
                entries = sorted((each for each in found if not each.name.startswith(".")), key=attrgetter("name"))
        except FileNotFoundError:
            raise Missing(f"{full}: no such folder; check the path") from None
        except OSError as error:
            raise Unavailable(f"{full}: cannot be listed ({error.strerror})") from error
        self.folder_names += os.fsencode(path)
        self.folder_ends.append(len(self.folder_names))
        self.folder_mtimes.append(mtime)
        inner, before = [], f"{path}/" if path else ""
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner.append(before + entry.name)
            else:
                self._file(entry, before + entry.name)
        self._count_beside([entry.name for entry in entries])
        for name in inner:
            self.folder(name)

    def _count_beside(self, names: Sequence[str]) -> None:
        """Captions, masks and the like: files that go with the wanted ones of a folder."""
        others: dict[str, list[str]] = {}
        for name in names:
            if (ending := _ending(name)) and not self.is_wanted(ending):
                others.setdefault(_stem(name), []).append(ending)
        for name in names if others else ():
            if self.is_wanted(_ending(name)):
                self.beside.update(others.pop(_stem(name), ()))

    def _file(self, entry: "os.DirEntry[str]", name: str) -> None:
        wanted = self.is_wanted(_ending(entry.name))
        if entry.is_symlink() and (wanted or os.path.isdir(entry.path)) and not self._leads_inside(entry):
            return
        if not wanted:
            self.passed_over += 1
            return
        try:
            about = entry.stat()
        except OSError as error:
            raise Unavailable(f"{entry.path}: cannot be read ({error.strerror})") from error
        if not stat.S_ISREG(about.st_mode):  # a pipe would wait for its writer
            why = "a pipe, socket or device, expected a plain file; remove it, or leave it out"
            self.left_out.append(Unsafe(f'{entry.path}: {why} with on_error="skip"'))
            return
        if not os.access(entry.path, os.R_OK):  # better now than in the middle of an epoch
            raise Unavailable(
                f"{entry.path}: cannot be read ({os.strerror(errno.EACCES)}, errno {errno.EACCES}); check who may read "
                f"it, or move it elsewhere"
            )
        self.names += os.fsencode(name)
        self.ends.append(len(self.names))
        self.sizes.append(about.st_size)
        self.mtimes.append(about.st_mtime_ns)
        self.inodes.append(about.st_ino)
        self.tops.append(self._top(name))

    def _top(self, name: str) -> int:
        """Folders are walked through one after another, so it is the last or a new one."""
        top, inside, _ = name.partition("/")
        if not inside:
            return -1
        if not self.top_names or self.top_names[-1] != top:
            self.top_names.append(top)
        return len(self.top_names) - 1

    def _leads_inside(self, entry: "os.DirEntry[str]") -> bool:
        goal = os.path.realpath(entry.path)
        if goal.startswith(self.inside) and os.path.isfile(goal):
            return True
        kind = "folder" if os.path.isdir(goal) else "file" if os.path.isfile(goal) else "file that is not there"
        self.left_out.append(
            Unsafe(
                f"{entry.path}: a link to a {kind}, {goal}. Links are followed to files inside {self.root} alone: open "
                f'the folder that holds the files, or pass on_error="skip" to leave links out'
            )
        )
        return False

    def files(self) -> FileList:
        names = TextColumn(np.frombuffer(self.names, np.uint8), np.frombuffer(self.ends, np.int64))
        sizes, mtimes = np.frombuffer(self.sizes, np.int64), np.frombuffer(self.mtimes, np.int64)
        inodes, tops = np.frombuffer(self.inodes, np.uint64), np.frombuffer(self.tops, np.int32)
        return FileList(
            self.root, names, sizes=sizes, mtimes=mtimes, inodes=inodes, tops=tops, top_names=tuple(self.top_names),
            passed_over=self.passed_over, beside=self.beside, left_out=tuple(self.left_out),
        )  # fmt: skip

    def folders(self) -> dict[str, np.ndarray]:
        """Names of folders, and their times, which show whether the list is current."""
        tops = [os.fsencode(name) for name in self.top_names]
        return {
            "top_names": np.frombuffer(b"".join(tops), np.uint8),
            "top_ends": np.cumsum([len(name) for name in tops], dtype=np.int64),
            "folders": np.frombuffer(self.folder_names, np.uint8),
            "folder_ends": np.frombuffer(self.folder_ends, np.int64),
            "folder_mtimes": np.frombuffer(self.folder_mtimes, np.int64),
        }


def _ending(name: str) -> str:
    return name.rpartition(".")[2].lower() if "." in name else ""


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def find_any(root: str, is_wanted: Callable[[str], bool], depth: int = 2, looked_at: int = 200) -> bool:
    """Whether there seems to be one, by the first entries of the folder and of the folders in it."""
    try:
        with os.scandir(root) as found:
            entries = [entry for entry, _ in zip(found, range(looked_at), strict=False) if entry.name[0] != "."]
    except OSError:
        return False
    if any(is_wanted(_ending(entry.name)) and os.path.isfile(entry.path) for entry in entries):
        return True
    inner = [entry.path for entry in entries if depth and entry.is_dir(follow_symlinks=False)]
    return any(find_any(path, is_wanted, depth - 1, looked_at) for path in inner[:10])
