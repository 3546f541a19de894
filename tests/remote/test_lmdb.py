"""A database on a web server: its pages are walked, and values read, in ranges."""

from pathlib import Path

import numpy as np

import lmdb
import penstock as ps


def test_values_in_ranges(server, tmp_path: Path) -> None:
    path = tmp_path / "a.lmdb"
    with lmdb.open(str(path), map_size=1 << 26, subdir=False) as env, env.begin(write=True) as transaction:
        for number in range(30):
            transaction.put(b"%d" % number, np.full(5000, number, np.float32).tobytes())
    address = server.put("a.lmdb", path.read_bytes())
    ds = ps.open(address, decoders={"data": "float32"})
    assert ds[[7, 0, 29]]["data"][:, -1].tolist() == [7, 0, 29]
    assert server.whole_downloads("a.lmdb") == 0
