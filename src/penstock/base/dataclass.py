"""``dataclasses.dataclass``, defined three times as quickly: penstock has 150 of them, and importing it must be quick.

Python compiles up to six methods for each. Here it compiles ``__init__``, and the others are shared.
"""

import dataclasses
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Any


def _values(record: Any) -> tuple[Any, ...]:
    return tuple([getattr(record, name) for name, field in record.__dataclass_fields__.items() if field.compare])


def _repr(self: Any) -> str:
    shown = [f"{each.name}={getattr(self, each.name)!r}" for each in dataclasses.fields(self) if each.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: Any) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _set_once(self: Any, name: str, value: Any) -> None:
    is_field, is_subclass = name in self.__dataclass_fields__, "__dataclass_fields__" not in vars(type(self))
    if name in self.__dict__ if is_field else not is_subclass:  # a subclass may have attributes of its own
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _keep(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _define(cls: Any, options: dict[str, Any]) -> type:
    if options.keys() & {"slots", "order"}:
        return dataclasses.dataclass(cls, **options)
    is_frozen, own = options.pop("frozen", False), vars(cls)
    if options.pop("repr", True) and "__repr__" not in own:
        cls.__repr__ = _repr
    if options.pop("eq", True) and "__eq__" not in own:
        cls.__eq__ = _eq
        if "__hash__" not in own:
            cls.__hash__ = _hash if is_frozen else None
    if is_frozen:
        cls.__setattr__, cls.__delattr__ = _set_once, _keep
    return dataclasses.dataclass(cls, repr=False, eq=False, **options)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, **options):
        """As ``dataclasses.dataclass``."""
        return (lambda cls: _define(cls, dict(options))) if cls is None else _define(cls, options)
