"""python -m benchmarks.remote [--latency-ms 30]: shards on a web server that waits before each answer.

One shuffled epoch of (3, 15724) float16 voxels and a number, batch 32, over loopback; each way in a process of its own,
the server in another. Beside penstock: obstore's own ``get_ranges``, ten at a time, a batch after another; and the
``webdataset`` package's order, all of each shard from beginning to end.
"""

import argparse
import http.server
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results

SAMPLES, SHARDS, BATCH = 960, 4, 32


class Slow(http.server.SimpleHTTPRequestHandler):
    """Files of this folder, ranges included, each answer ``latency_s`` late."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    latency_s = 0.0

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        time.sleep(self.latency_s)
        data = _content(self.translate_path(self.path))
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin, end = (int(found[1]), int(found[2] or len(data) - 1) + 1) if found else (0, len(data))
        end = min(end, len(data))
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Tue, 14 Nov 2023 22:13:20 GMT")
        self.end_headers()
        self.wfile.write(data[begin:end])


@cache
def _content(path: str) -> memoryview:
    return memoryview(Path(path).read_bytes())


def serve(folder: str, latency_s: float) -> None:
    """Run by a process of its own: print the address, and serve until it is ended."""
    handler = type("Here", (Slow,), {"latency_s": latency_s})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: handler(*a, directory=folder))  # type: ignore[arg-type]
    print(server.server_port, flush=True)
    server.serve_forever()


def make(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for row in range(SAMPLES // SHARDS):
                for name, array in (("v.npy", rng.normal(size=(3, 15_724)).astype("f2")), ("n.npy", np.array([row]))):
                    held = io.BytesIO()
                    np.save(held, array)
                    about = tarfile.TarInfo(f"{shard}{row:05}.{name}")
                    about.size = held.tell()
                    held.seek(0)
                    tar.addfile(about, held)


def penstock(url: str, index: str, threads: Any = "auto", **options: Any) -> tuple[float, float]:
    """Seconds to the first batch, and samples per second from then on."""
    import penstock as ps

    ds = ps.open(f"{url}/{{0..{SHARDS - 1}}}.tar", index_dir=index, **options)
    loader = ps.Loader(ds, batch_size=BATCH, shuffle=True, memory="256MiB", threads=threads, output="numpy")
    return _timed(len(batch["n.npy"]) for batch in loader)


def obstore(url: str, index: str) -> tuple[float, float]:
    from obstore.store import HTTPStore

    import penstock as ps

    ds = ps.open(f"{url}/{{0..{SHARDS - 1}}}.tar", index_dir=index)
    arrays = [store._arrays["v.npy"] for store in ds.store.stores]  # type: ignore[attr-defined]
    store = HTTPStore.from_url(url, client_options={"allow_http": True})
    rows = np.random.default_rng(0).permutation(SAMPLES)

    def batches() -> Any:
        for begin in range(0, SAMPLES, BATCH):
            for shard, array in enumerate(arrays):
                mine = rows[begin : begin + BATCH] // (SAMPLES // SHARDS) == shard
                of = rows[begin : begin + BATCH][mine] % (SAMPLES // SHARDS)
                starts, lengths = array.offsets[of].tolist(), array.lengths[of].tolist()
                if starts:
                    store.get_ranges(f"{shard}.tar", starts=starts, lengths=lengths, coalesce=0)
            yield BATCH

    return _timed(batches())


def in_order(url: str, index: str, **options: Any) -> tuple[float, float]:
    from penstock.webdataset import WebDataset

    stream = WebDataset(f"{url}/{{0..{SHARDS - 1}}}.tar", shardshuffle=SHARDS, **options).shuffle(100)
    return _timed(len(batch["n.npy"]) for batch in stream.decode().batched(BATCH))


def _timed(batches: Any) -> tuple[float, float]:
    began = time.perf_counter()
    batches = iter(batches)
    next(batches)
    first, samples = time.perf_counter() - began, 0
    for size in batches:
        samples += size
    return first, samples / (time.perf_counter() - began - first)


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "obstore get_ranges, one field": ("obstore", {}),
    "penstock, 2 threads": ("penstock", {"threads": 2}),
    "penstock, 16 threads (default)": ("penstock", {}),
    "penstock, 64 threads": ("penstock", {"threads": 64}),
    "penstock, cache_dir, first epoch": ("penstock", {"cache_dir": True}),
    "penstock, cache_dir, second epoch": ("penstock", {"cache_dir": True}),
    "penstock.webdataset, streaming": ("in_order", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=__doc__)
    parser.add_argument("--latency-ms", type=float, default=30)
    latency_s = parser.parse_args().latency_ms / 1000
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "data").mkdir()
        make(root / "data")
        server = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "serve", str(root / "data"), str(latency_s)], stdout=subprocess.PIPE
        )
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            penstock(url, str(root / "index"))
            rows = []
            for label, (function, options) in WAYS.items():
                given = {name: str(root / "cache") if value is True else value for name, value in options.items()}
                job = json.dumps({"url": url, "index": str(root / "index"), **given})
                ran = subprocess.run(
                    [sys.executable, "-m", __spec__.name, function, job], capture_output=True, text=True, check=True
                )
                first, rate = json.loads(ran.stdout)
                rows.append({"label": label, "first_batch_s": first, "rates": [rate]})
            results.write("remote", f"python -m benchmarks.remote --latency-ms {1000 * latency_s:g}", rows)
            print(results.table(results.read("remote")))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], float(sys.argv[3]))
    elif sys.argv[1:2] and sys.argv[1] in {function for function, _ in WAYS.values()}:
        print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
    else:
        main()
