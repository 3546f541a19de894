"""Shows the version of the package in the title of the site."""

import re
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    source = Path(config["docs_dir"]).parent / "src" / "penstock" / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"$', source.read_text(), re.MULTILINE)
    assert found is not None
    config["extra"]["penstock_version"] = found[1]
    config["repo_name"] = f"penstock {found[1]}"
    return config
