"""Our dataclasses behave as Python's own do."""

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import penstock
from penstock.base import dataclass as ours

BOTH = pytest.mark.parametrize("dataclass", [ours.dataclass, dataclasses.dataclass], ids=["ours", "Python's"])


def make(dataclass: Any, **options: Any) -> Any:
    @dataclass(**options)
    class Point:
        x: int
        y: list[int] = field(default_factory=list, compare=False)
        z: str = field(default="z", repr=False)
        kind: ClassVar[str] = "point"

        def __post_init__(self) -> None:
            object.__setattr__(self, "x", abs(self.x))

    return Point


@BOTH
@pytest.mark.parametrize("frozen", [False, True])
def test_values(dataclass: Any, frozen: bool) -> None:
    Point = make(dataclass, frozen=frozen)  # noqa: N806
    point = Point(-3, [1], z="a")
    assert (point.x, point.y, point.z, Point.kind) == (3, [1], "a", "point")
    assert repr(point) == f"{Point.__qualname__}(x=3, y=[1])"
    assert point == Point(3, [2], z="a") != Point(3, [1])
    assert point != (3, [1], "a")
    assert replace(point, x=4) == Point(4, z="a")
    assert [each.name for each in fields(point)] == ["x", "y", "z"]
    assert copy.deepcopy(point) == point
    assert Point.__match_args__ == ("x", "y", "z")
    with pytest.raises(TypeError, match="x"):
        Point()


@BOTH
def test_frozen(dataclass: Any) -> None:
    Point = make(dataclass, frozen=True)  # noqa: N806
    point = Point(1)
    assert hash(point) == hash(Point(1, [5])) != hash(Point(2))
    with pytest.raises(FrozenInstanceError, match="x"):
        point.x = 2
    with pytest.raises(FrozenInstanceError, match="new"):
        point.new = 2
    with pytest.raises(FrozenInstanceError, match="x"):
        del point.x

    class Counted(Point):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(7)
            self.calls = 0

    counted = Counted()
    counted.calls += 1
    assert (counted.x, counted.calls) == (7, 1)
    with pytest.raises(FrozenInstanceError, match="x"):
        counted.x = 2


@BOTH
def test_what_can_change_has_no_hash(dataclass: Any) -> None:
    point = make(dataclass)(1)
    point.x = point.new = 2
    assert (point.x, point.new) == (2, 2)
    with pytest.raises(TypeError, match="unhashable"):
        hash(point)


@BOTH
def test_own_methods_and_identity_stay(dataclass: Any) -> None:
    @dataclass(frozen=True)
    class Named:
        name: str

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Named) and self.name.lower() == other.name.lower()

        def __hash__(self) -> int:
            return 5

        def __repr__(self) -> str:
            return self.name

    assert Named("A") == Named("a")
    assert (hash(Named("A")), repr(Named("A"))) == (5, "A")
    same = make(dataclass, frozen=True, eq=False, repr=False)
    assert same(1) != same(1)
    assert hash(same(1)) is not None
    assert repr(same(1)).startswith("<")


@BOTH
def test_keywords_slots_and_inheritance(dataclass: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Base:
        a: int = 1

    @dataclass(frozen=True)
    class Derived(Base):
        b: int = 2

    assert (Derived(5).b, Derived(5, a=3).a) == (5, 3)
    assert Derived(5) != Base()
    with pytest.raises(TypeError):
        Base(1)

    @dataclass(slots=True)
    class Small:
        a: int = 1

    assert not hasattr(Small(), "__dict__")


@ours.dataclass(frozen=True)
class Sent:
    a: int


def test_pickles() -> None:
    assert pickle.loads(pickle.dumps(Sent(3))) == Sent(3)


def test_all_modules_use_ours() -> None:
    others = [
        path.name
        for path in Path(penstock.__file__).parent.rglob("*.py")
        if "from dataclasses import dataclass" in path.read_text() and path.name != "dataclass.py"
    ]
    assert others == []
