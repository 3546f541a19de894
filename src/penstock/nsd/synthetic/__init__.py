"""A faithful synthetic NSD: the release's folders, files, types and traps, with values that prove their position.

The terms of the data forbid redistribution, so tests, demo and benchmarks run on this.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.nsd.layout import BETAS, SubjectLayout
from penstock.nsd.synthetic.pictures import write_coco, write_stimuli
from penstock.nsd.synthetic.scale import SCALES, Scale
from penstock.nsd.synthetic.sessions import STORED, WRITTEN, Stored, SyntheticSession, Written, write_sessions
from penstock.nsd.synthetic.tables import Experiment, write_design, write_responses, write_stim_info
from penstock.nsd.synthetic.values import Betas, pictures
from penstock.nsd.synthetic.volumes import Anatomy, write_volumes

__all__ = ["SCALES", "STORED", "WRITTEN", "Anatomy", "Betas", "Experiment", "Scale", "pictures", "steps", "synthesize"]


def synthesize(
    root: str | os.PathLike[str],
    scale: Scale | str = "tiny",
    *,
    subjects: Sequence[int] | None = None,
    space: str = "func1pt8mm",
    betas: str = "b3",
    stored: Stored | None = "voxel-major",
    written: Written = "brain",
    nifti: bool = False,
    stimuli: bool = True,
    coco: int = 0,
    signal: float = 0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Experiment:
    """Write a synthetic NSD under ``root``, in the release's layout; files of the same name are replaced.

    scale:     "tiny" (400 KiB), "small" (20 MiB), "full" (subject 1 as it is), or a ``Scale`` of your own
    subjects:  which to write; all of the scale by default
    stored:    how sessions lie in HDF5: "voxel-major" as released, "trial-major", "rechunked", or None for none
    written:   "brain", or "region" or "nothing" to leave the rest a hole in the file: full sizes on a small disk
    nifti:     write ``betas_sessionNN.nii.gz`` too
    stimuli:   write the pictures, ``nsd_stimuli.hdf5``
    coco:      height and width of MindEye2's ``coco_images_224_float16.hdf5``; 0 for none
    signal:    how much voxels depend on the pictures: the signal's standard deviation as a multiple of the noise's
    progress:  called with a description of each step
    """
    nifti, stimuli = checks.flag("nifti", nifti), checks.flag("stimuli", stimuli)
    coco, seed = checks.whole("coco", coco), checks.whole("seed", seed)
    signal, progress = checks.number("signal", signal), checks.function("progress", progress)
    form = Form(stored, written, nifti, signal)
    todo, experiment = _planned(os.fspath(root), scale, subjects, (space, BETAS.get(betas, betas)), form, seed)
    if stimuli:
        todo.append(("pictures", lambda: write_stimuli(os.fspath(root), experiment.scale)))
    if coco:
        todo.append(("smaller pictures", lambda: write_coco(os.fspath(root), experiment.scale, coco)))
    for step, write in todo:
        write()
        progress(step)
    return experiment


def steps(scale: Scale | str, subjects: Sequence[int] | None = None, *, stimuli: bool = True, coco: int = 0) -> int:
    """How many steps ``synthesize`` will report."""
    found = _scale(scale)
    chosen = found.sessions if subjects is None else subjects
    return 1 + sum(1 + found.sessions[subject] for subject in chosen) + bool(stimuli) + bool(coco)


Todo = list[tuple[str, Callable[[], None]]]


@dataclass(frozen=True)
class Form:
    """How sessions are written."""

    stored: Stored | None
    written: Written
    nifti: bool
    signal: float

    def __post_init__(self) -> None:
        if self.stored not in (*STORED, None) or self.written not in WRITTEN:
            raise ConfigError(
                f"stored={self.stored!r}, written={self.written!r}: expected one of {STORED} or None, and of {WRITTEN}"
            )


def _planned(
    root: str,
    scale: Scale | str,
    subjects: Sequence[int] | None,
    version: tuple[str, str],
    form: Form,
    seed: int,
) -> tuple[Todo, Experiment]:
    found = _scale(scale)
    unknown = sorted(set(subjects or ()) - set(found.sessions))
    if unknown:
        raise ConfigError(f"subjects={unknown}: the scale has sessions of {sorted(found.sessions)} only")
    experiment = Experiment(found, seed)

    def tables() -> None:
        write_design(root, experiment)
        write_stim_info(root, experiment)

    todo: Todo = [("tables", tables)]
    for subject in sorted(found.sessions if subjects is None else subjects):
        todo += _subject(SubjectLayout(root, subject, *version), experiment, form)
    return todo, experiment


def _subject(layout: SubjectLayout, experiment: Experiment, form: Form) -> Iterator[tuple[str, Callable[[], None]]]:
    scale = experiment.scale
    anatomy, betas = Anatomy(scale), Betas(scale, layout.subject, form.signal, experiment.stimuli(layout.subject))

    def volumes() -> None:
        write_volumes(layout, anatomy)
        write_responses(layout, experiment)

    yield f"{layout.name} regions", volumes
    for number in range(1, scale.sessions[layout.subject] + 1):
        session = SyntheticSession(betas, anatomy, number, form.written)
        yield f"{layout.name} session {number}", partial(write_sessions, layout, session, form.stored, form.nifti)


def _scale(scale: Scale | str) -> Scale:
    if isinstance(scale, Scale):
        return scale
    if scale not in SCALES:
        raise ConfigError(f"scale={scale!r}: expected one of {', '.join(SCALES)}, or a Scale")
    return SCALES[scale]
