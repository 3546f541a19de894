"""The demo's dataset: a small synthetic NSD, as released and as MindEye's tar shards."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.cli.progress import Progress
from penstock.errors import ConfigError
from penstock.nsd.synthetic import SCALES, Scale, steps, synthesize
from penstock.nsd.synthetic.pictures import write_stimuli
from penstock.nsd.synthetic.shards import FOLDER, write_shards
from penstock.sizes import MiB

# By voxel, a trial costs as many reads as there are voxels: so few that the by-hand loaders come to a few batches.
DEMO = Scale((14, 18, 16), 750, 4, {1: 4}, shared=40, picture=128, region_voxels=600)
DEMO_SCALES = {"demo": DEMO, "tiny": SCALES["tiny"]}
PER_SHARD = 50
WHOLE = "demo.txt"
"""Written last: where it is, everything else is whole."""


@contextmanager
def dataset_folder(chosen: str | None, scale: str) -> Iterator[str]:
    """A folder with the dataset in it: the caller's, or one that goes away afterwards."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as temporary:
        folder = chosen or temporary
        note = os.path.join(folder, WHOLE)
        if not os.path.exists(note):
            _make(folder, scale)
        with open(note) as file:
            found = file.read()
        if found != scale:
            raise ConfigError(f"--folder {folder}: holds a dataset of scale {found}, not {scale}; name another folder")
        yield folder


def _make(folder: str, name: str) -> None:
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise ConfigError(f"--folder {folder}: has files, but no whole demo dataset; name an empty or a new folder")
    scale = DEMO_SCALES[name]
    with Progress("making a synthetic NSD", steps(scale, [1], stimuli=False) + 2, "steps") as progress:
        made = synthesize(folder, scale, subjects=[1], stimuli=False, progress=lambda _: progress.add(1))
        write_stimuli(folder, scale, only=made.stimuli(1))
        progress.add(1)
        write_shards(folder, per_shard=PER_SHARD, wholebrain=True)
        progress.add(1)
    with open(os.path.join(folder, WHOLE), "w") as file:
        file.write(name)


def read_once(folder: str) -> dict[str, int]:
    """Bytes on disk of the release and of the shards. Reads every file, which leaves them all in the page cache."""
    sizes = {"release": 0, "shards": 0}
    for home, _, names in os.walk(folder):
        kind = "shards" if FOLDER in home else "release"
        for name in names:
            with open(os.path.join(home, name), "rb", buffering=0) as file:
                while piece := file.read(MiB):
                    sizes[kind] += len(piece)
    return sizes
