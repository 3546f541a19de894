"""Imports go downwards, and each outside library has one door.

Read from the source with ``ast``: nothing is imported, so what is not installed does not matter. Imports inside
functions count; those for type checkers do not.
"""

import ast
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent

# From top to bottom. A module may import from its own layer and from those below. A name stands for the module or
# package of that name and for everything inside it. A new module must be placed here.
LAYERS = [
    ["cli", "__main__"],
    ["nsd", "webdataset", "convert", "measure", "hooks", "testing"],
    ["multi", "forecast", "verification"],
    ["trial"],
    ["loader"],
    ["iteration", "request"],
    ["reader", "face"],
    ["schedule"],
    ["pytorch", "stats", "jointplan"],
    ["planning"],
    ["slots"],
    ["inspection"],
    ["opening"],
    ["dataset", "paths"],
    ["formats"],
    ["putoff"],
    ["mapped", "gathered", "normalized"],
    ["combine"],
    ["wrap"],
    ["store"],
    ["together"],
    ["membergather"],
    ["chunkread", "members"],
    ["chunkdecode", "kinds"],
    [
        *("values", "rangeread", "chunkfiles", "index", "ziptable", "pieces"),
        *("tarindex", "tarwalk", "lmdbkeys", "lmdbwalk", "folderindex"),
    ],
    ["savedcolumns"],
    ["fileio", "codecs", "pictures"],
    ["handles"],
    ["remote", "filecache", "packing", "manifest", "steady"],
    ["transport", "signing"],
    ["interleave"],
    [
        *("picture_headers", "memory", "budget", "order", "deal", "extents", "coalesce", "within", "tally"),
        *("tarblocks", "finite"),
    ],
    [
        *("machine", "spec", "sizes", "texts", "braces", "tarheader", "urls", "locks", "stopping", "rivals"),
        *("progress", "owners", "tuning"),
    ],
    ["interrupts", "forks", "workers"],
    ["errors"],
]

# Who may import what is not numpy or Python's own.
DOORS = {
    "matplotlib": {"cli"},
    "torch": {"pytorch", "cli", "testing"},
    "lmdb": set(),
    "pyarrow": {"formats.filetables", "formats.tables"},
    "tiledb": {"formats.tiledb"},
    "zarr": {"formats.zarr_store"},
    "obstore": {"signing"},
    "prometheus_client": {"hooks"},
    "h5py": {"formats.hdf5", "formats.hdf5_layout", "formats.h5py_store", "cli", "testing"},
}

# Unpickling and starting processes is what a reader of other people's files must not do.
NOBODY_IMPORTS = {
    *("pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "joblib", "marshal", "shelve"),
    *("subprocess", "pty", "runpy", "code", "codeop", "yaml", "imp"),
}
NOBODY_CALLS = {
    *("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile"),
    *("os.system", "os.popen", "os.fork", "os.forkpty", "os.startfile", "torch.load"),
}
NEEDS_A_PROMISE = {"np.load", "numpy.load", "np.lib.format.read_array"}
NOBODY_CALLS_ANY_OF = ("os.exec", "os.spawn", "os.posix_spawn")
# Arguments by which other libraries are told to run what they read.
NOBODY_PASSES = {("allow_pickle", "True"), ("weights_only", "False"), ("shell", "True")}
# Libraries of machine code are loaded by name from an installed package alone.
LOADS_LIBRARIES = {"codecs"}
# The conformance suite forks, to see that stores stand it.
DECLARED = {("testing.store", "os.fork")}


def name_of(path):
    """``formats.hdf5``; the package itself is the empty name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}
INSIDE = sorted(name for name in MODULES if name)


def is_for_type_checkers(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def nodes(tree):
    """Everything that can run."""
    for child in ast.iter_child_nodes(tree):
        if is_for_type_checkers(child):
            for other in child.orelse:
                yield other
                yield from nodes(other)
        else:
            yield child
            yield from nodes(child)


def imports(name):
    """Full names of what a module imports: modules, or names in modules."""
    for node in nodes(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                is_package = MODULES[name].name == "__init__.py"
                here = ["penstock", *name.split(".")] if name else ["penstock"]
                up = node.level - is_package
                origin = ".".join([*(here[: len(here) - up]), *filter(None, [node.module])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def own_imports(name):
    """The modules of this package that a module imports; the empty name is the package itself."""
    for full in imports(name):
        if full.split(".")[0] != "penstock":
            continue
        inner = full.removeprefix("penstock").removeprefix(".")
        while inner and inner not in MODULES:
            inner = inner.rpartition(".")[0]
        yield inner


def is_in(name, places):
    return any(name == place or name.startswith(f"{place}.") for place in places)


def layer(name):
    """0 is the lowest. The package itself is as high as the highest thing it imports."""
    if name == "":
        return max(layer(home) for home in penstock._HOMES)  # its names are fetched on first use
    for height, names in enumerate(reversed(LAYERS)):
        if is_in(name, names):
            return height
    raise LookupError(name)


def test_every_module_is_placed_once():
    placed = [each for names in LAYERS for each in names]
    assert len(placed) == len(set(placed))
    missing = [name for name in INSIDE if name.split(".")[0] not in placed]
    assert missing == [], "place new modules in LAYERS"


@pytest.mark.parametrize("name", INSIDE)
def test_imports_go_downwards(name):
    upwards = sorted({inner or "penstock" for inner in own_imports(name) if layer(inner) > layer(name)})
    assert upwards == [], f"{name} is in layer {layer(name)} of {len(LAYERS) - 1}"


def test_no_module_needs_itself():
    """Imports at the top of modules form no ring, within a layer either."""
    needs = {}
    for name, tree in TREES.items():
        body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        whole, TREES[name] = tree, ast.Module(body, [])
        needs[name] = set(own_imports(name)) - {name}
        TREES[name] = whole
    while needs:
        ready = [name for name, wanted in needs.items() if not wanted & needs.keys()]
        assert ready, f"a ring of imports among {sorted(needs)}"
        for name in ready:
            del needs[name]


@pytest.mark.parametrize("library", DOORS)
def test_outside_libraries_have_few_doors(library):
    through = [name for name in INSIDE if any(full.split(".")[0] == library for full in imports(name))]
    others = [
        name for name in through if not any(name == door or name.startswith(f"{door}.") for door in DOORS[library])
    ]
    assert others == []


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "penstock")
def test_nobody_unpickles_or_starts_processes(name):
    assert [full for full in imports(name) if full.split(".")[0] in NOBODY_IMPORTS] == []


def forbidden(name):
    """Calls that would run what is read, or start a process."""
    for node in nodes(TREES[name]):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        passed = {(each.arg, ast.unparse(each.value)) for each in node.keywords}
        if called in NOBODY_CALLS or called.startswith(NOBODY_CALLS_ANY_OF):
            yield f"{called} in line {node.lineno}"
        if called in NEEDS_A_PROMISE and ("allow_pickle", "False") not in passed:
            yield f"{called} without allow_pickle=False in line {node.lineno}"
        if called.endswith("CDLL") and ast.unparse(node.args[0]) != "None" and name not in LOADS_LIBRARIES:
            yield f"{called} in line {node.lineno}"
        yield from (f"{called}({key}={value}) in line {node.lineno}" for key, value in passed & NOBODY_PASSES)


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "penstock")
def test_nobody_runs_what_is_read(name):
    assert [each for each in forbidden(name) if (name, each.split()[0]) not in DECLARED] == []


# The reading of sources above, tried on a source that breaks every rule.


def test_the_checks_see_what_they_look_for(monkeypatch):
    source = """
from typing import TYPE_CHECKING
import os
if TYPE_CHECKING:
    from penstock.loader import Loader
def later():
    import torch.nn
    from penstock import loader
    from .formats import npy
    from .errors import ConfigError
    os.system("x")
    os.execvp("x", ["x"])
    load("x", allow_pickle=True)
    np.load("x")
    np.load("x", allow_pickle=False)
    ctypes.CDLL("x")
    ctypes.CDLL(None)
"""
    monkeypatch.setitem(TREES, "sizes", ast.parse(source))
    assert list(own_imports("sizes")) == ["loader", "formats.npy", "errors"]
    assert "torch.nn" in list(imports("sizes"))
    with pytest.raises(AssertionError, match="loader"):
        test_imports_go_downwards("sizes")
    with pytest.raises(AssertionError, match="sizes"):
        test_outside_libraries_have_few_doors("torch")
    assert [each.split()[0] for each in forbidden("sizes")] == [
        *("os.system", "os.execvp", "load(allow_pickle=True)", "np.load", "ctypes.CDLL")
    ]
    with pytest.raises(AssertionError, match=r"os\.system"):
        test_nobody_runs_what_is_read("sizes")
