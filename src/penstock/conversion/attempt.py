"""One call of ``convert``: takes up what an earlier call began, runs what is left, and gives the output its name."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import penstock
from penstock.base import executors
from penstock.base.dataclass import dataclass
from penstock.base.sizes import format_size
from penstock.conversion import hdf5, source, zarr
from penstock.conversion.compare import compare_task
from penstock.conversion.plan import ALL_FIELDS, NUMBERED, ConversionPlan, Task
from penstock.conversion.rows import digests_of
from penstock.conversion.tasks import Job, file_name, prepare_outputs, run_task
from penstock.conversion.work import Written, writing
from penstock.dataset.dataset import Dataset
from penstock.errors import ConfigError, ConvertFailed, PenstockError
from penstock.files import manifest as manifests

if TYPE_CHECKING:
    from penstock.conversion.estimate import Estimate  # made of attempts

Progress = Callable[[int, int], None]
"""Called with how many bytes of values are written, and of how many."""


@dataclass(frozen=True)
class Converted:
    """What a conversion did."""

    plan: ConversionPlan
    path: str
    done: int
    """Tasks that were run."""
    found_done: int
    """Tasks that an earlier run had done."""
    finished: bool
    """Whether the output is there, under its name."""
    bytes_read: int
    """From the source's files, by the tasks that were run."""
    bytes_written: int
    seconds: float
    manifest: str
    """Where sizes and digests of the output are written down."""
    expected: "Estimate | None" = None
    """With ``like``: what was expected before it began."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        plain = {name: value for name, value in vars(self).items() if name not in ("plan", "expected")}
        expected = None if self.expected is None else self.expected.as_json()
        return {**plain, "expected": expected, "plan": self.plan.as_json()}

    def __str__(self) -> str:
        if not self.finished:
            left = self.plan.tasks - self.done - self.found_done
            return f"{self.path}: {self.done:,} tasks done, {left:,} of {self.plan.tasks:,} left; not finished"
        if not self.done:
            return f"{self.path}: whole, nothing was left to do"
        again = f", {self.found_done:,} tasks were done before" if self.found_done else ""
        return (
            f"{self.path}: whole; {format_size(self.bytes_read)} read, {format_size(self.bytes_written)} written in "
            f"{self.seconds:.1f} s{again}"
        )


class Attempt:
    """One call of ``convert``."""

    def __init__(
        self, job: Job, origin: Dataset, *, overwrite: bool, restart: bool, expected: "Estimate | None" = None
    ) -> None:
        """``origin``: what the caller gave; the job may read a copy of it."""
        self.job, self.plan, self.work = job, job.plan, job.work
        self.overwrite, self.restart = overwrite, restart
        self._files = source.files_of(origin)
        self._key = f"{job.plan.key}-{source.digest_of_files(self._files)}"
        self._began = time.perf_counter()
        self._done = self._found_done = self._read = self._written = 0
        self.expected = expected

    @property
    def manifest(self) -> str:
        return f"{_plain_name(self.plan.goal)}.manifest.json"

    @property
    def provenance(self) -> str:
        return f"{_plain_name(self.plan.goal)}.provenance.json"

    def result(self, *, finished: bool) -> Converted:
        seconds = time.perf_counter() - self._began
        return Converted(
            self.plan, self.plan.goal, done=self._done, found_done=self._found_done, finished=finished,
            bytes_read=self._read, bytes_written=self._written, seconds=seconds, manifest=self.manifest,
            expected=self.expected,
        )  # fmt: skip

    def run(
        self, mode: Any, progress: Progress, *, part: tuple[int, int] | None = None, only_finish: bool = False
    ) -> Converted:
        """Do what is left: of all tasks, and finish the output; or of a part of the tasks."""
        if self.is_there():
            return self.result(finished=True)
        with self.work.locked(shared=part is not None):
            if not self.is_there():  # another call may have finished it this moment
                self.begin(alone=part is None)
                if not only_finish:
                    self.tasks(part or (1, 1), mode, self.plan.workers, progress)
                if part is not None:
                    return self.result(finished=False)
                self.finish(mode, self.plan.workers)
        return self.result(finished=True)

    def is_there(self) -> bool:
        """Whether the output is whole already; refuses to write over something else."""
        there = self._existing()
        if there and any(_is_in(path, there) for path in self._files):
            raise ConfigError(f"{there}: is what this conversion reads, and cannot be its output; choose another name")
        if _key_in(self.provenance) == self._key and self._is_as_listed():  # written last: all the rest is there
            self._remove_rest()
            return True
        if there and not self.overwrite and self.work.key() is None:
            raise ConfigError(
                f"{there}: exists already, and is not the result of this conversion; choose another name, remove it, "
                f"or pass overwrite=True (--overwrite), which replaces it when the new one is whole"
            )
        return False

    def _is_as_listed(self) -> bool:
        try:
            known = manifests.load(self.manifest)
            return all(os.path.getsize(os.path.join(known.folder, name)) == size for name, size in known.sizes.items())
        except (PenstockError, OSError):
            return False

    def _existing(self) -> str:
        names = [os.path.join(os.path.dirname(self.plan.goal), name) for name in self._outputs()]
        return next((path for path in names if os.path.lexists(path)), "")

    def _outputs(self) -> Iterator[str]:
        """Names of what will be there at the end."""
        if ALL_FIELDS not in self.plan.cuts:
            return iter([self.job.name])
        names = (file_name(self.job.name, number) for number in range(self.plan.cuts[ALL_FIELDS].grid[0]))
        return iter(dict.fromkeys(names))

    def _remove_rest(self) -> None:
        """What an interruption left of a conversion that is whole; whoever has the lock is about to do the same."""
        if os.path.isdir(self.work.folder):
            with suppress(ConvertFailed), self.work.locked():
                self.work.remove()

    def begin(self, *, alone: bool = True) -> None:
        """Take up what was begun, or begin. The caller has the lock; ``alone``: and shares it with nobody."""
        if self.restart:
            with writing(self.work.folder):
                self.work.forget()
        before = self.work.key()
        if before is not None and before != self._key:
            raise ConvertFailed(
                f"{self.work.folder}: another conversion to {self.plan.goal} was begun and not finished: of other "
                f"data, of a file that changed since, or with other arguments (memory and compression count); or its "
                f"plan.json is damaged. Repeat that one, or pass restart=True (--restart) to forget it"
            )
        if alone:
            with writing(self.work.folder):
                self.work.clear_partial()
        self.work.begin({"key": self._key, "plan": self.plan.as_json()})
        if not self._names_are_given:
            prepare_outputs(self.job)

    @property
    def _names_are_given(self) -> bool:
        """Whether everything was written, and outputs may have moved to their places."""
        return os.path.exists(self.work.path("files.json"))

    def tasks(self, part: tuple[int, int], mode: Any, workers: int, progress: Progress) -> None:
        """Run the tasks that are not done yet."""
        number, of = part
        mine = [task for task in self.plan.all_tasks() if task.number % of == number - 1]
        left = [] if self._names_are_given else [task for task in mine if self.work.done(task.number) is None]
        self._found_done = len(mine) - len(left)
        done_bytes = self.plan.bytes * self._found_done // max(1, self.plan.tasks)
        for done in executors.run(mode, run_task, self.job, left, workers):
            self._done += 1
            self._read += done.bytes_read
            self._written += done.bytes_written
            done_bytes = min(self.plan.bytes, done_bytes + done.value_bytes)
            progress(done_bytes, self.plan.bytes)

    def finish(self, mode: Any, workers: int) -> None:
        """All tasks are done: give everything its name. May be interrupted, and done again."""
        missing = [task.number for task in self.plan.all_tasks() if not self._is_done(task)]
        if missing:
            raise ConvertFailed(
                f"{self.plan.goal}: {len(missing):,} of {self.plan.tasks:,} tasks are not done (number {missing[0]} is "
                f"the first); run the parts that are missing, or convert without part"
            )
        source.check_unchanged(self._files)
        files = self._assemble()
        if self.plan.options.compare and all(os.path.lexists(self.work.data(name)) for name in self._outputs()):
            for _ in executors.run(mode, compare_task, self.job, list(self.plan.all_tasks()), workers):
                pass
        with writing(self.plan.goal):
            for name in self._outputs():
                self._put_in_place(name)
            folder = os.path.dirname(self.plan.goal)
            listed = ((os.path.join(folder, each.name), each.size, bytes.fromhex(each.digests)) for each in files)
            manifests.write(manifests.new(self.manifest), listed)
            self._write_provenance()
            self.work.remove()

    def _is_done(self, task: Task) -> bool:
        return os.path.exists(self.work.path("done", f"{task.number}.json"))

    def _assemble(self) -> list[Written]:
        """What tasks wrote, and what only the whole can have: metadata, one file of many pieces."""
        if self._names_are_given:
            given = self.work.read_json("files.json")
            if not given:
                raise ConvertFailed(
                    f"{self.work.path('files.json')}: is damaged, and says what was written; pass restart=True "
                    f"(--restart) to begin again"
                )
            return [Written(*each) for each in given["files"]]
        options, work, name = self.plan.options, self.work, self.job.name
        files = [each for task in self.plan.all_tasks() for each in self._written_by(task)]
        if options.format == "zarr":
            files += zarr.write_metadata(work, self.plan.cuts, self.job.attributes)
        elif options.format in ("npy", "hdf5"):
            if not self.job.has_fixed_places:
                hdf5.assemble(work, name, self.plan.cuts, self.job.attributes)
            with open(work.data(name), "r+b") as file:
                os.fsync(file.fileno())
            files = [Written(name, os.path.getsize(work.data(name)), digests_of(work.data(name)))]
        with writing(work.folder):
            work.write_json("files.json", {"files": [[each.name, each.size, each.digests] for each in files]})
        return files

    def _written_by(self, task: Task) -> list[Written]:
        found = self.work.done(task.number)
        if found is None:
            raise ConvertFailed(f"{self.work.folder}: what task {task.number} wrote is gone; convert again")
        return found

    def _put_in_place(self, name: str) -> None:
        new, place = self.work.data(name), os.path.join(os.path.dirname(self.plan.goal), name)
        if not os.path.lexists(new):  # done before an interruption
            return
        if os.path.lexists(place):
            if not self.overwrite:
                raise ConvertFailed(f"{place}: appeared while this conversion ran, and is not replaced; move it away")
            os.makedirs(self.work.path("replaced"), exist_ok=True)
            os.rename(place, self.work.path("replaced", name))
        os.rename(new, place)

    def _write_provenance(self) -> None:
        of_this_run = ("to", "workers", "planned_bytes")
        document = {
            "penstock conversion": 1, "version": penstock.__version__, "key": self._key,
            "source": {"fingerprint": self.plan.fingerprint, "files": _base_names(self._files)},
            "plan": {name: value for name, value in self.plan.as_json().items() if name not in of_this_run},
        }  # fmt: skip
        self.work.write_json("provenance.json", document)
        os.replace(self.work.path("provenance.json"), self.provenance)


def remove_output(path: str) -> None:
    """A file that a conversion made, and what lies beside it; nothing where the path is empty."""
    for name in (path, f"{path}.manifest.json", f"{path}.provenance.json") if path else ():
        with suppress(FileNotFoundError):
            os.unlink(name)


def _plain_name(goal: str) -> str:
    """The goal, or for numbered files what is the same in their names."""
    folder, name = os.path.split(goal)
    return os.path.join(folder, NUMBERED.sub("all", name, count=1))


def _is_in(path: str, other: str) -> bool:
    """Whether a file is another, or in that folder, whatever links lead there."""
    real, above = os.path.realpath(path), os.path.realpath(other)
    return real == above or real.startswith(above + os.sep)


def _base_names(files: Mapping[str, list[int]]) -> dict[str, int]:
    return {os.path.basename(path): size for path, (size, _) in files.items()}


def _key_in(provenance: str) -> str | None:
    try:
        with open(provenance, encoding="utf-8") as file:
            return str(json.load(file)["key"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
