"""Columns of numbers, as pandas reads them, and what is said of tables that are none."""

import subprocess
import sys

import numpy as np
import pandas
import pytest

from penstock.errors import Corrupt
from penstock.nsd.text_table import read_columns

TABLE = """,cocoId,cropBox,loss,flagged,rt,day,answer
0,391895,"(0, 0, 0.1, 0.2)",0.25,False,NaN,-3,1
1,522418,"(0.5, 0, ""x"", 0)",1e-3,True,,-40000000,2
2,7,"(0, 1)",-0.5,False,812.25,0,n/a
"""


def test_numbers_are_those_of_pandas(tmp_path):
    path = tmp_path / "table.csv"
    for start, end in (("", "\n"), ("\ufeff", "\r\n"), ("", "\n\n")):
        path.write_bytes((start + TABLE.replace("\n", end)).encode())
        theirs = pandas.read_csv(path, skip_blank_lines=True)
        wanted = ["cocoId", "loss", "flagged", "rt", "day", "answer", "absent"]
        ours = read_columns(str(path), ",", wanted, ["cocoId"])
        assert list(ours) == wanted[:-1]
        for name, values in ours.items():
            np.testing.assert_array_equal(values, theirs[name])
            assert values.dtype == (np.int64 if name in ("cocoId", "day") else np.float64)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\tb\n1\t2\n3\n", r"line 3: ends before column 'b'; fetch it again"),
        ("a\tb\n1\t2\n3\tx y\n", r"line 3: column 'b' has 'x y', expected a number; fetch it again"),
        ("a\n1\n", r"no 'b' in it, but a; fetch it again"),
        ("", r"no 'a' in it, but"),
        (b"a\tb\n\xff\t1\n", r"not a table of text"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, told):
    path = tmp_path / "responses.tsv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Corrupt, match=rf"responses\.tsv: {told}"):
        read_columns(str(path), "\t", ["a", "b"], ["a", "b"])


def test_training_does_without_pandas(roots):
    """Importing it takes more memory than a subject's tables, outside every plan."""
    program = (
        "import sys\nfrom penstock.nsd import NSD\n"
        "ds = NSD(sys.argv[1]).dataset(('voxels', 'coco', 'rt', 'behav'), split='berg/train', zscore='session')\n"
        "with ds.loader(4, shuffle=True, memory='64MiB', output='numpy') as loader:\n    next(iter(loader))\n"
        "assert 'pandas' not in sys.modules\nassert len(ds.trials) == len(ds)\nassert 'pandas' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(roots["voxel-major"])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
