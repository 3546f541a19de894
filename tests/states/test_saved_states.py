"""States that earlier versions saved still load: fingerprints are the same to the letter, and so is what comes next."""

import json
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SAVED = json.loads((HERE / "saved.json").read_text())


@pytest.fixture(scope="module")
def catalog():
    sys.path.insert(0, str(HERE))  # tests are imported by path, their siblings are not
    try:
        import catalog
    finally:
        sys.path.remove(str(HERE))
    return catalog


@pytest.fixture(scope="module")
def found(catalog, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved") / "data"
    shutil.unpack_archive(HERE / "data.zip", root)
    return {**catalog.datasets(root), **catalog.nsd_datasets(root)}


@pytest.mark.parametrize("name", SAVED["fingerprints"])
def test_fingerprint_is_the_saved_one(found, name):
    assert found[name].fingerprint == SAVED["fingerprints"][name]


@pytest.mark.parametrize("name", SAVED["states"])
def test_saved_position_goes_on_where_it_was(catalog, found, name):
    saved, options = SAVED["states"][name], catalog.ORDERS[name.rpartition(", ")[0]]
    assert catalog.rest(found["hdf5 chunks of rows"], saved["state"], **options) == saved["rest"]


@pytest.mark.parametrize("mode", SAVED["multi"])
def test_saved_position_of_several_datasets_loads(catalog, found, mode):
    with catalog.multi_loader(found, mode) as loader:
        loader.load_state_dict(SAVED["multi"][mode])
        assert loader.state_dict() == SAVED["multi"][mode]
        assert len(list(loader)) == len(loader) - 1
