"""The dataset to train on: voxels, pictures and other columns, one sample per trial or per picture."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.base import checks
from penstock.base.sizes import MiB, format_size, parse_size
from penstock.dataset.composition import join
from penstock.dataset.dataset import Dataset, Index
from penstock.errors import BudgetExceeded, ConfigError, DataError
from penstock.loader.loader import Loader
from penstock.nsd.layout import SubjectLayout
from penstock.nsd.regions import Voxels
from penstock.nsd.repetitions import OneOfEach
from penstock.nsd.window import windowed_loader

if TYPE_CHECKING:
    from penstock.nsd.samples import Samples

OPENING_BYTES = 3 * MiB
OPENING_BYTES_PER_TRIAL = 1280
"""Measured for a whole subject that is opened for the first time: tables, masks and the libraries that parse them."""

COLUMNS = ("voxels", "image", "coco")


def opening_bytes(trials: int) -> int:
    """Memory that a subject with this many trials on disk takes."""
    return OPENING_BYTES + OPENING_BYTES_PER_TRIAL * trials


class NSDDataset(Dataset):
    """``ds[i]`` is a tuple of the columns: voxels, picture, number of the picture.

    ``NSD.dataset`` makes it, or ``NSDDataset(fmri_dir, …, max_open_files=5)``:

    fmri_dir:        the root of the release, the folder of one version of betas in it (which names subject, space and
                     version), or a folder with session files
    columns:         what a sample consists of
    subject:         1 to 8; needed if the folder's name does not say
    max_open_files:  data files held open at once
    options:         all other arguments of ``NSD`` and ``NSD.dataset``

    It works inside torch's own ``DataLoader``, with workers too; ``ds.loader(…)`` makes a penstock ``Loader``.
    """

    def __init__(
        self,
        fmri_dir: str | os.PathLike[str],
        columns: Sequence[str] = COLUMNS,
        *,
        subject: int | None = None,
        max_open_files: int | None = None,
        **options: Any,
    ) -> None:
        from penstock.nsd.subject import NSD

        folder = checks.path("fmri_dir", fmri_dir)
        layout = SubjectLayout.of_folder(folder)
        if layout.root != folder and subject not in (None, layout.subject):
            raise ConfigError(f"subject={subject}: but {folder} is a folder of subject {layout.subject}")
        of_subject: dict[str, Any] = {"space": layout.space, "betas": layout.betas}
        for name in ("space", "betas", "prepared", "remote", "cache_dir"):
            if name in options:
                of_subject[name] = options.pop(name)
        nsd = NSD(layout.root, layout.subject if subject is None else subject, **of_subject)
        vars(self).update(vars(nsd.dataset(columns, max_open_files=max_open_files, **options)))

    @classmethod
    def of(cls, samples: "Samples", left_out: Sequence[DataError] = ()) -> "NSDDataset":
        """The dataset of these samples; ``left_out`` are the reasons why sessions are not among them."""
        made = cls.__new__(cls)
        made._fill(samples, left_out)
        return made

    def _fill(self, samples: "Samples", left_out: Sequence[DataError]) -> None:
        made = join(**samples.parts())
        super().__init__(made.store, made.casts, left_out, made.axes, made.fields_left_out)
        self.columns = samples.request.columns
        self.table = samples.table()
        """The same as ``trials``, as plain arrays."""
        self.voxels: Voxels | None = samples.request.voxels
        """Which voxels, in the order in which they come; None for whole volumes."""
        self._lines = samples.lines_of_samples()
        self._trials_on_disk = len(samples.choice.everything)

    def __getitem__(self, index: Index | str) -> Any:
        sample = super().__getitem__(index)
        return tuple(sample[name] for name in self.columns)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [tuple(sample[name] for name in self.columns) for sample in super().__getitems__(indices)]

    @property
    def trials(self) -> Any:
        """The trial table of the samples; where samples are pictures, the row of each picture's first trial."""
        return self.table.frame

    @property
    def trial_map(self) -> list[tuple[int, int, int]]:
        """(session, trial_in_session, global_trial) of each sample."""
        columns = (self.table[name].tolist() for name in ("session", "trial_in_session", "global_trial"))
        return list(zip(*columns, strict=True))

    def order(self, seed: int = 0, *, shuffle: bool = True) -> OneOfEach:
        """For ``reps="random"``: every picture once per epoch, by one of its trials drawn anew."""
        if self._lines is None:
            raise ConfigError('order(): for datasets made with reps="random"')
        return OneOfEach(self._lines, seed, shuffle)

    def loader(self, batch_size: int, *, shuffle: Any = False, seed: int = 0, **options: Any) -> Loader:
        """A ``penstock.Loader`` of the columns; ``options`` are its own.

        Where trials can only be read session by session, those of several sessions are mixed: some 256 MiB and at least
        four sessions; or four, three, two or one where ``memory`` does not allow more; ``window=`` chooses otherwise.
        Copies by trial (``NSD.prepare``) need no window.
        Part of ``memory`` is set aside for what opening took.
        """
        if self._lines is not None and isinstance(shuffle, bool):
            shuffle = self.order(seed, shuffle=shuffle)
        given = options.pop("memory", None)
        options = {"columns": self.columns, "batch_size": batch_size, "shuffle": shuffle, "seed": seed, **options}
        if given is None:
            return windowed_loader(self, memory=None, **options)
        memory, opening = parse_size(given, argument="memory"), self.opening_bytes
        try:
            loader = windowed_loader(self, memory=max(1, memory - opening), **options)
        except BudgetExceeded as refusal:
            smallest = opening + (refusal.smallest_bytes or 0)
            raise BudgetExceeded(
                f"memory={format_size(memory)} is too small: the smallest that works is {format_size(smallest)} "
                f"({smallest:,} bytes, of which {opening:,} are set aside for the trial table and masks). "
                f"{refusal.reason}",
                smallest_bytes=smallest,
            ) from refusal
        holders, smallest = {**loader.plan.holders, "opening": opening}, loader.plan.smallest_bytes + opening
        loader.plan = replace(loader.plan, limit_bytes=memory, holders=holders, smallest_bytes=smallest)
        return loader

    @property
    def opening_bytes(self) -> int:
        """Memory outside the plan: the trial table, masks, and what the libraries that read them keep."""
        return opening_bytes(self._trials_on_disk)
