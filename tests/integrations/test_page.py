"""The examples of docs/engines.md run as they stand."""

import re
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("accelerate")
pytest.importorskip("dask")
PAGE = Path(__file__).parent.parent.parent / "docs" / "engines.md"


@pytest.mark.filterwarnings("ignore")
def test_examples_of_the_page():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "example"})
