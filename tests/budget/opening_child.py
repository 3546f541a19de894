"""Opens a dataset in a process of its own and reads an epoch of it within the smallest budget that is accepted.

python opening_child.py <path> [<nsd size>]

Prints the bytes held at most while it was opened, from before ``open`` to the end of the epoch, and the budget. The
libraries are not loaded before.
"""

import json
import sys

import penstock as ps
from penstock.errors import BudgetExceeded, PenstockError
from penstock.testing.measure import MemoryWatch


def opened(path: str, size: int | None) -> ps.Dataset:
    if size is None:
        return ps.open(path, index_dir=False)
    from penstock.files.files import Files
    from penstock.nsd.layout import SubjectLayout
    from penstock.nsd.stimuli import Pictures, find_pictures

    return find_pictures(SubjectLayout("", 1, "", ""), Pictures(path, size), Files()).pictures


def loader(ds: ps.Dataset, memory: int) -> ps.Loader:
    return ps.Loader(ds, batch_size=1, memory=memory, threads=1, output="numpy")


def smallest(ds: ps.Dataset) -> int:
    try:
        loader(ds, 1)
    except BudgetExceeded as error:
        return int(str(error).split("(")[1].split(" bytes")[0].replace(",", ""))
    raise AssertionError("a budget of one byte was accepted")


def main(path: str, size: int | None) -> None:
    told: dict[str, object] = {}
    with MemoryWatch(0.002) as watch:
        try:
            ds = opened(path, size)
            told["open"] = max(watch.peak_bytes, watch.held_bytes)
            told["limit"] = smallest(ds)
            told["rows"] = sum(1 for _ in loader(ds, smallest(ds)))
        except PenstockError as error:
            told["error"] = type(error).__name__
    print(json.dumps({**told, "peak": watch.peak_bytes}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
