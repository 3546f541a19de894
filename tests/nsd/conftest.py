"""The tiny synthetic release in each layout, written once; tests that change files make their own."""

import shutil

import pytest

from penstock.nsd import NSD, synthesize

LAYOUTS = {
    "voxel-major": {"stored": "voxel-major"},
    "trial-major": {"stored": "trial-major"},
    "rechunked": {"stored": "rechunked"},
    "nifti": {"stored": None, "nifti": True},
}


@pytest.fixture(scope="session")
def roots(tmp_path_factory):
    """Layout -> the root of a release stored so."""
    folder = tmp_path_factory.mktemp("releases")
    for name, options in LAYOUTS.items():
        synthesize(folder / name, coco=8, **options)
    synthesize(folder / "prepared", coco=8)
    for subject in (1, 2):
        NSD(folder / "prepared", subject).prepare()
        NSD(folder / "prepared", subject).prepare(None)
    return {name: folder / name for name in (*LAYOUTS, "prepared")}


@pytest.fixture
def root(roots, tmp_path):
    """A release as published, to do anything to."""
    shutil.copytree(roots["voxel-major"], tmp_path / "nsd")
    return tmp_path / "nsd"
