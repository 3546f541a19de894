"""What is missing, too old, or lacks something is said with the extra that installs it."""

import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.base.requirements import needs
from penstock.errors import ConfigError

INTEGRATIONS = {"lightning": ("lightning", "pytorch_lightning"), "accelerate": ("accelerate",), "ray": ("ray",)}


def import_with(packages: dict[str, str | None], module: str) -> str:
    """The error of importing a module where packages are missing (None), or are of another version."""
    code = f"""
        import sys, types
        for name, version in {packages!r}.items():
            sys.modules[name] = types.ModuleType(name) if version else None
            if version:
                sys.modules[name].__version__ = version
        import penstock
        try:
            import {module}
        except penstock.ConfigError as error:
            print(error)
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True).stdout


@pytest.mark.parametrize("extra", INTEGRATIONS)
def test_a_package_that_is_missing(extra: str) -> None:
    told = import_with(dict.fromkeys(INTEGRATIONS[extra]), f"penstock.integrations.{extra}")
    assert "cannot be imported" in told
    assert f'pip install --upgrade "penstock[{extra}]"' in told


@pytest.mark.parametrize("extra", INTEGRATIONS)
@pytest.mark.parametrize(("version", "told"), [("0.9.1", "0.9.1 is too old"), ("99.0", "cannot be imported")])
def test_a_package_of_another_version(extra: str, version: str, told: str) -> None:
    """An old one, and one that no longer has what is imported from it."""
    found = import_with({INTEGRATIONS[extra][0]: version}, f"penstock.integrations.{extra}")
    assert told in found
    assert f"penstock[{extra}]" in found


@pytest.mark.parametrize("version", [None, "2023.1.0"])
def test_dask(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("dask") if version else None
    if module is not None:
        module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dask", module)
    with pytest.raises(ConfigError, match=r"dask.*2024.5 or later.*penstock\[dask\]"):
        ps.from_arrays(x=np.arange(3)).to_dask()


def test_every_extra_is_declared() -> None:
    import tomllib

    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert declared.keys() >= {*INTEGRATIONS, "dask"}


@pytest.mark.parametrize("version", ["2.2", "2.2.0", "2.10.1", "3", "2.6.0.dev20260101", "2.3rc1+cpu"])
def test_versions_that_will_do(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("anything")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "anything", module)
    with needs("extra", "2.2", "anything"):
        pass
