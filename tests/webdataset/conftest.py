"""Small shards, written by Python's own tarfile, so that what is read was not written by what reads it."""

import gc
import io
import tarfile
import warnings

import pytest


@pytest.fixture
def write_tar(tmp_path):
    """Members as (name, bytes) -> the path of a tar."""

    def write(name, members, mode="w", **options):
        path = tmp_path / name
        with tarfile.open(path, mode, **options) as tar:
            for member, content in members:
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return str(path)

    return write


@pytest.fixture
def numbered(write_tar):
    """Shards of numbered samples with a class and a text -> the pattern that names them."""

    def write(counts, name="shard"):
        first = 0
        for shard, count in enumerate(counts):
            members = []
            for number in range(first, first + count):
                members += [(f"{number:06d}.cls", b"%d" % number), (f"{number:06d}.txt", b"text %d" % number)]
            write_tar(f"{name}-{shard:03d}.tar", members)
            first += count
        path = write_tar(f"{name}-end.tar", [])
        return path.replace("-end", f"-{{000..{len(counts) - 1:03d}}}")

    return write


@pytest.fixture(scope="session")
def peer_package():
    """Loaded once. What exists by then is no garbage: collections, which every test with it ends in, pass it over."""
    package = pytest.importorskip("webdataset")
    gc.collect()
    gc.freeze()
    yield package
    gc.unfreeze()


@pytest.fixture
def peer(peer_package):
    """The package whose verbs these are. It leaves files open, which this suite does not report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield peer_package
        gc.collect()
