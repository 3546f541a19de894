"""The release in a bucket: its tables and regions are copied here once, its betas and pictures are read where they are.

Tables, regions, masks and noise ceiling are a few megabytes per subject. Their copies are in a folder with the
release's own layout, beside which ``prepare`` puts what it makes of the betas.
"""

import os
from contextlib import suppress
from dataclasses import replace

from penstock.base.sizes import MiB
from penstock.dataset.store import digest
from penstock.errors import ConfigError, Missing
from penstock.files import locks
from penstock.files.atomic import atomic_write
from penstock.files.files import Files
from penstock.nsd.layout import DESIGN, STIM_INFO, SubjectLayout
from penstock.read.saved_chunks import default_folder

PIECE_BYTES = 1 * MiB


def default_mirror(root: str) -> str:
    """Where copies of a bucket's small files are kept: beside the tables of chunks, in the user's cache folder."""
    return os.path.join(os.path.dirname(default_folder()), "nsd", digest(root))


def mirrored(layout: SubjectLayout, folder: str, files: Files) -> SubjectLayout:
    """The subject's small files copied into ``folder``, and the layout that finds them there."""
    if not layout.root.startswith("s3://"):
        raise ConfigError(f"{layout.root}: expected a folder, or a bucket such as s3://natural-scenes-dataset")
    locks.make_folder(folder)
    locks.check_folder(folder, f"cache_dir={folder!r}")
    here = replace(layout, root=folder)
    single = [
        DESIGN,
        STIM_INFO,
        *(_inside(layout, p) for p in (layout.responses, layout.brainmask, layout.noise_ceiling)),
    ]
    listed = [f"{_inside(layout, layout.regions)}/*.nii.gz"]
    listed += [f"{_inside(layout, os.path.dirname(table))}/*.ctab" for table in layout.label_tables("any")]
    for name in single:
        with suppress(Missing):
            _copy(files, address(layout, name), os.path.join(folder, name))
    for pattern in listed:
        with suppress(Missing):
            for url in files.remote.listed(address(layout, pattern)):
                _copy(files, url, os.path.join(folder, url.removeprefix(layout.root).lstrip("/")))
    return here


def sessions(layout: SubjectLayout, files: Files) -> list[str]:
    """Addresses of the sessions' HDF5 files."""
    with suppress(Missing):
        return files.remote.listed(address(layout, f"{_inside(layout, layout.beta_folder)}/betas_session*.hdf5"))
    return []


def address(layout: SubjectLayout, name: str) -> str:
    """The address of a file, given its path in the release."""
    return f"{layout.root.rstrip('/')}/{name.replace(os.sep, '/')}"


def _inside(layout: SubjectLayout, path: str) -> str:
    return os.path.relpath(path, layout.root).replace(os.sep, "/")


def _copy(files: Files, url: str, path: str) -> None:
    """One small file, under its name when it is whole; not again while its size is the same."""
    url = files.remote.admit(url)
    file = files.identify(url)
    if os.path.isfile(path) and os.path.getsize(path) == file.size:
        return
    locks.make_folder(os.path.dirname(path))
    with files.stream(url) as source, atomic_write(path) as copy:
        while piece := source.read(PIECE_BYTES):
            copy.write(piece)
