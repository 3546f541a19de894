"""A folder of pictures with things in it that are none: loops, pipes, links to nowhere, files that may not be read."""

import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock.errors import ConfigError, Unavailable, Unsafe

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links, pipes and modes as POSIX has them")


@pytest.fixture
def photos():
    """Not below the folder of this test run, which nobody else may enter."""
    root = Path(tempfile.mkdtemp(prefix="penstock-photos-"))
    root.chmod(0o755)
    for number in range(6):
        folder = root / ("ant" if number < 3 else "bee")
        folder.mkdir(exist_ok=True)
        Image.fromarray(np.full((5, 7, 3), number, np.uint8)).save(folder / f"{number}.png")
    yield root
    shutil.rmtree(root)


def seen(ds):
    return sorted(int(picture[0, 0, 0]) for picture in ds[:]["image"])


@pytest.mark.case(14)
def test_a_ring_of_links_is_not_walked(photos):
    (photos / "ant" / "again").symlink_to(photos, target_is_directory=True)
    (photos / "ring.png").symlink_to(photos / "ring.png")
    began = time.monotonic()
    with pytest.raises(Unsafe, match=r"ring\.png: a link to a file that is not there"):
        ps.open(photos)
    ds = ps.open(photos, on_error="skip")
    assert time.monotonic() - began < 5
    assert seen(ds) == list(range(6)), "each file once"
    assert "again: a link to a folder" in "".join(map(str, ds.left_out))
    assert len(ds.left_out) == 2


@pytest.mark.case(14)
def test_pipes_sockets_and_devices_are_not_opened(photos):
    os.mkfifo(photos / "ant" / "pipe.png")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(photos / "bee" / "s.png"))
        with pytest.raises(Unsafe, match=r"pipe\.png: a pipe, socket or device"):
            ps.open(photos)
        ds = ps.open(photos, on_error="skip")
        assert seen(ds) == list(range(6))
        assert [str(each).partition(":")[0][-8:] for each in ds.left_out] == ["pipe.png", "ee/s.png"]
    with pytest.raises(ConfigError, match=r"pipe\.png: expected a file or a folder"):
        ps.open(photos / "ant" / "pipe.png")


@pytest.mark.case(14)
def test_a_link_to_nowhere(photos):
    (photos / "bee" / "gone.png").symlink_to(photos / "bee" / "none.png")
    with pytest.raises(Unsafe, match=r"gone\.png: a link to a file that is not there.*on_error=\"skip\""):
        ps.open(photos)
    skipping = ps.open(photos, on_error="skip")
    assert seen(skipping) == list(range(6))
    assert len(skipping.left_out) == 1


AS_NOBODY = """
import os, sys, penstock
os.chdir("/")
os.chmod(sys.argv[2], 0o755)
penstock.open(sys.argv[1], index_dir=False)[0]  # imports what it needs, perhaps from where nobody may look
os.chmod(sys.argv[2], int(sys.argv[3]))
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    penstock.open(sys.argv[1], index_dir=False)
    print("opened")
except penstock.errors.PenstockError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.case(14)
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_may_not_be_read_is_told_when_the_folder_is_opened(photos, apart, what):
    """Root may read everything, so a child that is nobody looks."""
    target = photos / "bee" / "4.png" if what == "file" else photos / "bee"
    assert "opened" in apart(AS_NOBODY, photos, target, 0o755).out
    try:
        outcome = apart(AS_NOBODY, photos, target, 0)
    finally:
        target.chmod(0o755)
    assert outcome.out.startswith("Unavailable"), outcome
    assert ("4.png" if what == "file" else "bee") in outcome.out
    assert "ermission denied" in outcome.out


@pytest.mark.case(14)
def test_a_folder_of_traps_alone(photos):
    for path in [*photos.rglob("*.png")]:
        path.unlink()
    os.mkfifo(photos / "ant" / "pipe.png")
    with pytest.raises((ConfigError, Unavailable)):
        ps.open(photos)
