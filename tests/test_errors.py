"""The tree of errors: what a caller may rely on when catching one, and when one crosses a process boundary."""

import inspect
import pickle

import numpy as np
import pytest

import penstock
from penstock import errors

EXCEPTIONS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]
RAISED = [kind for kind in EXCEPTIONS if not issubclass(kind, Warning)]

TREE = [
    ("DataError", "PenstockError"),
    ("WrongArgument", "ConfigError"),
    ("Corrupt", "DataError"),
    ("Truncated", "DataError"),
    ("Missing", "DataError"),
    ("SchemaMismatch", "DataError"),
    ("Unsafe", "DataError"),
    ("LimitExceeded", "DataError"),
    ("DecodeFailed", "DataError"),
    ("SourceError", "PenstockError"),
    ("Unavailable", "SourceError"),
    ("Changed", "SourceError"),
    ("TransformFailed", "PenstockError"),
    ("WorkerDied", "PenstockError"),
    ("BudgetExceeded", "PenstockError"),
    ("StateMismatch", "PenstockError"),
    ("ConvertFailed", "PenstockError"),
    ("ConfigError", "PenstockError"),
    ("OutOfRange", "ConfigError"),
]


@pytest.mark.parametrize("kind", EXCEPTIONS, ids=lambda kind: kind.__name__)
def test_takes_one_string_and_survives_pickling(kind):
    error = kind("expected 3 rows, got 4: ask for fewer")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert again.args == error.args == ("expected 3 rows, got 4: ask for fewer",)
    assert str(again) == str(error) == "expected 3 rows, got 4: ask for fewer"


def test_a_refused_budget_names_the_smallest():
    ds = penstock.from_arrays(x=np.zeros((64, 3)))
    with pytest.raises(errors.BudgetExceeded) as refused:
        penstock.Loader(ds, batch_size=8, memory=1)
    smallest = pickle.loads(pickle.dumps(refused.value)).smallest_bytes
    assert f"({smallest:,} bytes" in str(refused.value)
    penstock.Loader(ds, batch_size=8, memory=smallest).close()
    with pytest.raises(errors.BudgetExceeded):
        penstock.Loader(ds, batch_size=8, memory=smallest - 1)
    assert errors.BudgetExceeded("rebuilt from its text").smallest_bytes is None


@pytest.mark.case(26)
@pytest.mark.parametrize("kind", EXCEPTIONS, ids=lambda kind: kind.__name__)
def test_survives_being_rebuilt_by_torch_workers(kind):
    # torch.utils.data rebuilds a worker's error as ``type(error)(text)``.
    assert str(kind("first\nsecond")) == "first\nsecond"


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.__name__)
def test_one_except_clause_catches_all(kind):
    assert issubclass(kind, errors.PenstockError)


@pytest.mark.parametrize(("child", "parent"), TREE)
def test_tree_is_as_drawn(child, parent):
    assert getattr(errors, parent) in getattr(errors, child).__bases__


def test_tree_in_the_docstring_is_complete():
    drawn = {child for child, _ in TREE} | {"PenstockError"}
    assert drawn == {kind.__name__ for kind in RAISED}
    for name in drawn:
        assert f" {name} " in errors.__doc__ or errors.__doc__.find(f"\n{name}\n") >= 0, name


def test_habits_of_python_hold():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.OutOfRange, IndexError)
    assert issubclass(errors.WrongArgument, TypeError)
    assert issubclass(errors.OutOfRange, ValueError)
    assert issubclass(errors.KeptBatches, UserWarning)
    assert not issubclass(errors.KeptBatches, errors.PenstockError)
