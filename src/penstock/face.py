"""In what form batches reach the caller: numpy arrays, torch tensors, or tensors on a device."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from penstock.errors import ConfigError
from penstock.putoff import put_off
from penstock.slots import Pin
from penstock.spec import Cast
from penstock.store import Store
from penstock.wrap import cast_fields

if TYPE_CHECKING:
    from penstock.pytorch import DeviceCopies

Arrays = Mapping[str, np.ndarray]
HandOver = Callable[[], Mapping[str, Any]]
"""Gives the caller a batch whose delivery was begun before."""


class Face(Protocol):
    """How slots become what the caller sees."""

    spare_slots: int
    """Slots that stay busy beyond the one in the caller's hands."""
    pin: Pin | None

    def prepare(self, store: Store, casts: Mapping[str, Cast]) -> Store:
        """The store to read slots from: converted already, or not where that happens later."""

    def start(self, arrays: Arrays, rows: np.ndarray) -> HandOver:
        """Begin to deliver a batch of these rows."""

    def permute(self, values: Any, axes: tuple[int, ...]) -> Any:
        """A view with its axes in another order."""

    def rank_and_world(self) -> tuple[int, int]: ...

    def finish(self) -> None:
        """Let go of every batch whose delivery was begun."""


class NumpyFace:
    """Arrays over the slots themselves."""

    spare_slots = 0
    pin: Pin | None = None

    def prepare(self, store: Store, casts: Mapping[str, Cast]) -> Store:
        return cast_fields(store, casts)

    def start(self, arrays: Arrays, rows: np.ndarray) -> HandOver:
        listed = {name: list(array) if array.dtype.hasobject else array for name, array in arrays.items()}
        return lambda: listed

    def permute(self, values: Any, axes: tuple[int, ...]) -> Any:
        return values.transpose(axes)

    def rank_and_world(self) -> tuple[int, int]:
        return 0, 1

    def finish(self) -> None:
        """Nothing is under way."""


class TorchFace(NumpyFace):
    """Tensors over the slots themselves."""

    def __init__(self) -> None:
        from penstock.pytorch import tensors

        self._tensors = tensors

    def start(self, arrays: Arrays, rows: np.ndarray) -> HandOver:
        return partial(self._tensors, arrays)

    def permute(self, values: Any, axes: tuple[int, ...]) -> Any:
        return values.permute(axes)

    def rank_and_world(self) -> tuple[int, int]:
        from penstock.pytorch import rank_and_world

        return rank_and_world()


class DeviceFace(TorchFace):
    """Tensors on a device, copied ahead of need, then converted and normalized there."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device = device
        self._copies: DeviceCopies | None = None

    def prepare(self, store: Store, casts: Mapping[str, Cast]) -> Store:
        from penstock.pytorch import DeviceCopies, pin

        store, rescales = put_off(store)
        self._copies = DeviceCopies(self.device, casts, rescales)
        self.spare_slots = DeviceCopies.IN_FLIGHT
        if self.device.type == "cuda":
            self.pin = pin
        return store

    def start(self, arrays: Arrays, rows: np.ndarray) -> HandOver:
        assert self._copies is not None
        return self._copies.start(arrays, rows)

    def finish(self) -> None:
        if self._copies is not None:
            self._copies.finish()


def make_face(output: Literal["torch", "numpy"], device: Any) -> Face:
    """The face asked for. Imports torch, whose own memory is no loader's, where that is needed."""
    if output not in ("torch", "numpy"):
        raise ConfigError(f'output={output!r}: expected "torch" or "numpy"')
    if output == "numpy":
        if device is not None:
            raise ConfigError(f'device={device!r} needs output="torch": numpy arrays live on the CPU')
        return NumpyFace()
    try:
        from penstock.pytorch import find_device
    except ImportError as error:
        raise ConfigError(
            f'output="torch" needs PyTorch: pip install "penstock[torch]", or ask for output="numpy" ({error})'
        ) from None
    found = None if device is None else find_device(device)
    return TorchFace() if found is None else DeviceFace(found)
