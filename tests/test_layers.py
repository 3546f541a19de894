"""Imports go downwards, each outside library has one door, and modules, classes and calls stay small.

Read from the source with ``ast``: nothing is imported, so what is not installed does not matter. Imports inside
functions count; those for type checkers do not.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent

# From top to bottom. A module may import from its own package and from those below.
LAYERS = [
    *("cli", "testing", "integrations", "nsd", "conversion", "webdataset", "loader", "formats", "dataset", "read"),
    *("files", "remote", "base", "errors"),
]

# Who may import what is not numpy or Python's own.
DOORS = {
    "matplotlib": {"cli"},
    "torch": {"loader.pytorch", "cli", "testing", "integrations"},
    "accelerate": {"integrations.accelerate"},
    "dask": {"dataset.lazy"},
    "lightning": {"integrations.lightning"},
    "ray": {"integrations.ray"},
    "lmdb": set(),
    "pyarrow": {"formats.arrow", "formats.folder.tables", "formats.parquet"},
    "tiledb": {"formats.tiledb"},
    "zarr": {"formats.zarr.fallback"},
    "obstore": {"remote.buckets"},
    "prometheus_client": {"loader.hooks"},
    "h5py": {"formats.hdf5", "conversion.hdf5", "cli", "testing"},
}

# Unpickling and starting processes is what a reader of other people's files must not do.
NOBODY_IMPORTS = {
    *("pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "joblib", "marshal", "shelve"),
    *("subprocess", "pty", "runpy", "code", "codeop", "yaml", "imp"),
}
# But reader processes are penstock's own, and what is pickled between them was never a file's.
READER_PROCESSES = {
    *(("loader.wire", "pickle"), ("loader.pickled_stores", "pickle"), ("loader.pickled_stores", "cloudpickle")),
    *(("loader.reader_process", "pickle"), ("loader.processes", "subprocess")),
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
LOADS_LIBRARIES = {"base.torch_threads", "read.codecs"}
# The conformance suite forks, to see that stores stand it.
DECLARED = {("testing.store", "os.fork")}


# Data files are opened in files/ alone: whoever opens one elsewhere loses retries, the check that it is still the same
# file, limits, manifests, caches and remote files. Libraries that take a path get one after Files.compare_whole.
OPENS = {
    *("open", "io.open", "os.open", "io.FileIO", "mmap.mmap", "np.memmap", "np.fromfile", "np.load", "np.loadtxt"),
    *("np.genfromtxt", "gzip.open", "bz2.open", "lzma.open", "tarfile.open", "zipfile.ZipFile", "shutil.copyfile"),
}
OPENS_OF_A_PATH = (".open", ".read_bytes", ".read_text")
MAY_OPEN = {
    # What the system says about this process.
    ("base.machine", "open"),
    ("base.machine", "Path('/proc/meminfo').read_text"),
    ("base.cgroups", "path.read_text"),
    # Memory that is no file.
    ("base.scratch", "mmap.mmap"),
    ("webdataset.run", "mmap.mmap"),
    ("loader.segments", "os.open"),
    # A file object of files/, or bytes in memory.
    ("formats.zip_table", "zipfile.ZipFile"),
    ("formats.zip_table", "archive.open"),
    ("read.npy", "zipfile.ZipFile"),
    ("read.pictures", "images.open"),
    # Libraries that read the file themselves.
    ("formats.hdf5.fallback", "h5py.h5d.open"),
    ("formats.tiledb.library", "library().open"),
    # A format's own function, from the registry; penstock.open itself.
    ("formats.open", "found.open"),
    ("formats.open", "open"),
    # Files that the same program wrote a moment ago.
    ("cli.main", "os.open"),
    ("cli.demo", "open"),
    *((f"conversion.{name}", "open") for name in ("attempt", "encode", "hdf5", "rows", "work")),
    ("conversion.lmdb", "lmdb.open"),
    ("nsd.prepare", "np.load"),
    # Streams in order, without positions.
    ("webdataset.shards", "open"),
}


def name_of(path):
    """``formats.hdf5``; the package itself is the empty name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}
INSIDE = sorted(name for name in MODULES if name)


def is_for_type_checkers(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def nodes(tree):
    """Everything that can run, in the order of the source."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        found.append(node)
        for child in reversed(list(ast.iter_child_nodes(node))):
            left += reversed(child.orelse) if is_for_type_checkers(child) else [child]
    return found[1:]


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


def layer(name):
    """0 is the lowest. The package itself is as high as the highest thing it imports."""
    if name == "":
        return max(layer(home) for home in penstock._HOMES)  # its names are fetched on first use
    top = "cli" if name == "__main__" else name.split(".")[0]
    return LAYERS[::-1].index(top)


def test_the_tree_is_the_list_of_layers():
    beside = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    assert {path.name.removesuffix(".py") for path in ROOT.iterdir() if path.name not in beside} == set(LAYERS)


def test_imports_go_downwards():
    upwards = [
        f"{name} imports {inner or 'penstock'}"
        for name in INSIDE
        for inner in sorted(set(own_imports(name)))
        if layer(inner) > layer(name)
    ]
    assert not upwards, "\n".join(upwards)


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


def test_nobody_unpickles_or_starts_processes():
    found = [(name, full) for name in MODULES for full in imports(name) if full.split(".")[0] in NOBODY_IMPORTS]
    found = [(name, full) for name, full in found if (name, full.split(".")[0]) not in READER_PROCESSES]
    assert not found, "\n".join(f"{name} imports {full}" for name, full in found)


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


def test_nobody_runs_what_is_read():
    found = [
        f"{name}: {call}" for name in MODULES for call in forbidden(name) if (name, call.split()[0]) not in DECLARED
    ]
    assert not found, "\n".join(found)


def opened(name):
    """Calls that open a file to read it."""
    own = {alias.asname or alias.name for node in ast.walk(TREES[name]) if isinstance(node, ast.ImportFrom)
           for alias in node.names if (node.module or "").startswith("penstock")}  # fmt: skip
    for node in nodes(TREES[name]):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in own or called.startswith(("self.", "penstock.")):
            continue
        if called in OPENS or called.endswith(OPENS_OF_A_PATH) or "open if" in called:
            modes = (*node.args[1:2], *(each.value for each in node.keywords if each.arg == "mode"))
            writes = any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes)
            if not writes:
                yield called


def test_only_files_opens_data_files():
    found = [
        f"{name}: {called}"
        for name in INSIDE
        if not name.startswith("files")
        for called in opened(name)
        if (name, called) not in MAY_OPEN
    ]
    assert not found, "\n".join(found)


# Sizes.

MOST_LINES, MOST_METHODS, MOST_POSITIONAL = 400, 20, 5
# The user's view of a store: each method is a verb of the public interface.
MAY_BE_LARGE = {"Dataset"}


def lines(name):
    return len(MODULES[name].read_text().splitlines())


def classes(names):
    return [(name, node) for name in names for node in nodes(TREES[name]) if isinstance(node, ast.ClassDef)]


def large_classes(names):
    """By the public methods that a class itself defines."""
    for name, node in classes(names):
        methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"}
        if len(methods) > MOST_METHODS and node.name not in MAY_BE_LARGE:
            yield f"{name}: {node.name} has {len(methods)} public methods"


def long_calls(names):
    """Calls of our own classes, also by a subclass, with many arguments by position."""
    ours = {node.name for _, node in classes(MODULES)} | {"cls", "type(self)", "super().__init__"}
    for name in names:
        for call in (node for node in nodes(TREES[name]) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            if {called, called.split(".")[-1]} & ours and len(call.args) > MOST_POSITIONAL:
                yield f"{name}:{call.lineno}: {called} gets {len(call.args)} arguments by position"


def test_no_module_is_long():
    assert [f"{name}: {lines(name)}" for name in MODULES if lines(name) > MOST_LINES] == []


def test_no_class_has_many_public_methods():
    assert list(large_classes(MODULES)) == []


def test_constructors_get_few_arguments_by_position():
    assert list(long_calls(MODULES)) == []


# The reading of sources above, tried on a source that breaks every rule.


def test_the_checks_see_what_they_look_for(monkeypatch):
    source = """
from typing import TYPE_CHECKING
import os, subprocess
if TYPE_CHECKING:
    from penstock.loader.loader import Loader
def later():
    import torch.nn
    from penstock.loader import loader
    from ..formats import npy
    from ..errors import ConfigError
    os.system("x")
    os.execvp("x", ["x"])
    load("x", allow_pickle=True)
    np.load("x")
    np.load("x", allow_pickle=False)
    ctypes.CDLL("x")
    ctypes.CDLL(None)
    open("x")
    open("x", "rb")
    open("x", "wb")
    open(path, mode="r+b")
    np.memmap("x")
    Path("x").read_bytes()
    zipfile.ZipFile(path)
"""
    monkeypatch.setitem(TREES, "base.sizes", ast.parse(source))
    assert list(own_imports("base.sizes")) == ["loader.loader", "formats.npy", "errors"]
    assert "torch.nn" in list(imports("base.sizes"))
    with pytest.raises(AssertionError, match=r"base\.sizes imports loader"):
        test_imports_go_downwards()
    with pytest.raises(AssertionError, match=r"base\.sizes"):
        test_outside_libraries_have_few_doors("torch")
    assert [each.split()[0] for each in forbidden("base.sizes")] == [
        *("os.system", "os.execvp", "load(allow_pickle=True)", "np.load", "ctypes.CDLL")
    ]
    assert list(opened("base.sizes")) == [
        *("np.load", "np.load", "open", "open", "np.memmap", "Path('x').read_bytes", "zipfile.ZipFile")
    ]
    with pytest.raises(AssertionError, match=r"base\.sizes: np\.load"):
        test_only_files_opens_data_files()
    with pytest.raises(AssertionError, match=r"base\.sizes: os\.system"):
        test_nobody_runs_what_is_read()
    with pytest.raises(AssertionError, match=r"base\.sizes imports subprocess"):
        test_nobody_unpickles_or_starts_processes()


def test_sizes_are_seen(monkeypatch):
    methods = "\n".join(f"    def method{number}(self): ..." for number in range(21))
    source = f"class Large:\n{methods}\n\nLarge(1, 2, 3, 4, 5, 6)\nLarge(1, 2, 3, 4, 5, last=6)\n"
    monkeypatch.setitem(TREES, "base.sizes", ast.parse(source))
    assert list(large_classes(["base.sizes"])) == ["base.sizes: Large has 21 public methods"]
    assert list(long_calls(["base.sizes"])) == ["base.sizes:24: Large gets 6 arguments by position"]
