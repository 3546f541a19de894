"""Another number of ranks after a restart: nothing is lost, nothing comes twice."""

import json
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")
ROWS = 46
CHILD = """
    import json, os, sys
    from pathlib import Path
    import numpy as np
    import torch.distributed as dist
    import penstock as ps

    folder, stop_after = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ds = ps.from_arrays(row=np.arange(46))
    loader = ps.Loader(ds, batch_size=4, shuffle=True, seed=5, memory="64MiB", threads=1)
    state = folder / "state.json"
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    rows, steps = [], 0
    while loader.epoch < 2 and (not stop_after or steps < stop_after):
        for batch in loader:
            rows.append(batch["row"].tolist())
            steps += 1
            if steps == stop_after:
                break
    dist.barrier()
    if rank == 0:
        state.write_text(json.dumps(loader.state_dict()))
    (folder / f"{world}-{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)
"""


@pytest.mark.slow
def test_four_ranks_then_two_then_three(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))
    rows = []
    for world, stop_after in ((4, 1), (2, 1), (3, 0)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        ran = subprocess.run([*command, script, tmp_path, str(stop_after)], capture_output=True, text=True, timeout=200)
        assert ran.returncode == 0, ran.stderr[-3000:]
        ranks = [json.loads((tmp_path / f"{world}-{rank}.json").read_text()) for rank in range(world)]
        assert len({len(batches) for batches in ranks}) == 1
        rows += [row for batches in ranks for batch in batches for row in batch]
    assert sorted(rows) == sorted([*range(ROWS)] * 2)
