"""How large modules, classes and calls of constructors may be; read from the source with ``ast``."""

import ast
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}

MOST_LINES, MOST_METHODS, MOST_POSITIONAL = 400, 20, 5

# The user's view of a store: each method is a verb of the public interface.
MAY_BE_LARGE = {"Dataset"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def long_modules():
    return [f"{name}: {len(text.splitlines())}" for name, text in SOURCES.items() if text.count("\n") > MOST_LINES]


def classes():
    for name, tree in TREES.items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def large_classes():
    """By the public methods that a class itself defines; overloads of one method count once."""
    for name, node in classes():
        methods = {each.name for each in node.body if isinstance(each, Function) and not each.name.startswith("_")}
        if len(methods) > MOST_METHODS and node.name not in MAY_BE_LARGE:
            yield f"{name}: {node.name} has {len(methods)} public methods"


def long_calls():
    """Calls of our own classes, also by a subclass's ``super().__init__``, ``cls`` and ``type(self)``."""
    ours = {node.name for _, node in classes()}
    for name, tree in TREES.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            makes = called.split(".")[-1] in ours or called in ("cls", "type(self)", "super().__init__")
            if makes and len(call.args) > MOST_POSITIONAL:
                yield f"{name}:{call.lineno}: {called} gets {len(call.args)} arguments by position"


def test_no_module_is_long():
    assert long_modules() == []


def test_no_class_has_many_public_methods():
    assert list(large_classes()) == []


def test_constructors_get_few_arguments_by_position():
    assert list(long_calls()) == []


def test_the_checks_see_what_they_look_for(monkeypatch):
    methods = "\n".join(f"    def method{number}(self): ..." for number in range(21))
    source = f"class Large:\n{methods}\n\nLarge(1, 2, 3, 4, 5, 6)\nLarge(1, 2, 3, 4, 5, last=6)\n" + "\n" * 400
    monkeypatch.setitem(SOURCES, "large.py", source)
    monkeypatch.setitem(TREES, "large.py", ast.parse(source))
    for check in (test_no_module_is_long, test_no_class_has_many_public_methods):
        with pytest.raises(AssertionError, match=r"large\.py: "):
            check()
    with pytest.raises(AssertionError, match=r"large\.py:24: Large gets 6"):
        test_constructors_get_few_arguments_by_position()
