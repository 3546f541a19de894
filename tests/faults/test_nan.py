"""Values that are no numbers: delivered as they are, counted by field where that is asked for, or refused."""

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, DataError

ROWS = 20


@pytest.fixture
def ds(tmp_path):
    betas = np.ones((ROWS, 6), np.float32)
    betas[3, 2], betas[11, :3], betas[12, 0] = np.nan, np.inf, -np.inf
    np.save(tmp_path / "betas.npy", betas)
    score = np.ones(ROWS)
    score[11] = np.nan
    return ps.join(betas=ps.open(tmp_path / "betas.npy"), score=score, label=np.arange(ROWS))


def load(ds, **options):
    return ps.Loader(ds, **{"batch_size": 4, "memory": "64MiB", "threads": 2, "output": "numpy", **options})


@pytest.mark.case(13)
@pytest.mark.parametrize("output", ["numpy", "torch"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_counted_by_field(ds, output, shuffle):
    with load(ds, nan="count", output=output, shuffle=shuffle) as loader:
        for _ in range(2):
            bad = sum(int(np.count_nonzero(~np.isfinite(np.asarray(batch["betas"])))) for batch in loader)
            assert bad == 5
            assert loader.stats().not_finite == {"betas": 5, "score": 1}
    assert "NaN or infinite: 5 of 'betas', 1 of 'score'" in str(loader.stats())


@pytest.mark.case(13)
def test_what_was_delivered_is_what_is_counted(ds):
    with load(ds, nan="count") as loader:
        batches = iter(loader)
        next(batches)
        assert loader.stats().not_finite == {"betas": 1}


@pytest.mark.case(13)
def test_not_looked_for_unless_asked(ds):
    with load(ds) as loader:
        assert sum(int(np.isnan(batch["betas"]).sum()) for batch in loader) == 1
        assert loader.stats().not_finite == {}


@pytest.mark.case(13)
def test_an_error_names_the_sample(ds):
    with load(ds, nan="raise") as loader:
        batches = iter(loader)
        with pytest.raises(DataError, match=r"betas\.npy.*'betas' of row 3 has a value that is NaN.*on_error=\"skip\""):
            next(batches)
    with load(ds.select(range(4, ROWS)), nan="raise", columns=("score", "label")) as loader:
        batches = iter(loader)
        assert next(batches)[1].tolist() == [4, 5, 6, 7]
        with pytest.raises(DataError, match="'score' of row 7"):
            next(batches)


@pytest.mark.case(13)
@pytest.mark.parametrize("threads", [1, 3])
def test_left_out_on_request(ds, threads):
    with load(ds, nan="raise", on_error="skip", threads=threads) as loader:
        labels = [label for batch in loader for label in batch["label"].tolist()]
        assert labels == [row for row in range(ROWS) if row not in (3, 11, 12)]
        stats = loader.stats()
    assert [(each.row, "NaN or infinite" in each.why) for each in stats.left_out] == [(3, True), (11, True), (12, True)]
    assert stats.not_finite == {}


@pytest.mark.case(13)
def test_only_the_three_are_known(ds):
    with pytest.raises(ConfigError, match='"pass", "count" or "raise"'):
        load(ds, nan="drop")
