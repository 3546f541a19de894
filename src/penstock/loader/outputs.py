"""The form in which batches reach the caller: numpy arrays, torch tensors, or tensors on a device."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from penstock.base import checks
from penstock.base.spec import Cast
from penstock.dataset.rewrite import defer_normalizing, permute_fields
from penstock.dataset.store import StoreBase
from penstock.errors import ConfigError
from penstock.loader.slots import Pin

if TYPE_CHECKING:
    from penstock.loader.pytorch import DeviceCopies

Arrays = Mapping[str, np.ndarray]
AxesByField = Mapping[str, tuple[int, ...]]
"""Orders of axes that batches are laid out in."""
HandOver = Callable[[], Mapping[str, Any]]
"""Hands over a batch whose delivery was started before."""


class Output(Protocol):
    """Turns slots into what the caller gets."""

    spare_slots: int
    """Slots that stay busy beyond the one in the caller's hands."""
    pin: Pin | None

    def prepare(self, store: StoreBase, casts: Mapping[str, Cast], axes: AxesByField) -> StoreBase:
        """The store to fill slots from: with conversions and contiguous axes, or without where they happen later."""

    def start(self, arrays: Arrays, rows: np.ndarray) -> HandOver:
        """Start to deliver a batch of these rows."""

    def permute(self, values: Any, axes: tuple[int, ...]) -> Any:
        """A view with its axes in another order."""

    def finish(self) -> None:
        """Drop every batch whose delivery was started."""


class NumpyOutput:
    """Arrays over the slots themselves."""

    spare_slots = 0
    pin: Pin | None = None

    def prepare(self, store: StoreBase, casts: Mapping[str, Cast], axes: AxesByField) -> StoreBase:
        return permute_fields(store, casts, axes)

    def start(self, arrays: Arrays, rows: np.ndarray) -> HandOver:
        listed = {name: list(array) if array.dtype.hasobject else array for name, array in arrays.items()}
        return lambda: listed

    def permute(self, values: Any, axes: tuple[int, ...]) -> Any:
        return values.transpose(axes)

    def finish(self) -> None:
        """Deliveries are complete as soon as they start."""


class TorchOutput(NumpyOutput):
    """Tensors over the slots themselves."""

    def __init__(self) -> None:
        from penstock.loader.pytorch import tensors

        self._tensors = tensors

    def start(self, arrays: Arrays, rows: np.ndarray) -> HandOver:
        return partial(self._tensors, arrays)

    def permute(self, values: Any, axes: tuple[int, ...]) -> Any:
        return values.permute(axes)


class DeviceOutput(TorchOutput):
    """Tensors on a device, copied ahead of need, then converted and normalized there."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device = device
        self._copies: DeviceCopies | None = None

    def prepare(self, store: StoreBase, casts: Mapping[str, Cast], axes: AxesByField) -> StoreBase:
        from penstock.loader.pytorch import DeviceCopies, pin

        store, rescales = defer_normalizing(store)
        self._copies = DeviceCopies(self.device, casts, rescales, axes)
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


def make_output(output: Literal["torch", "numpy"], device: Any) -> Output:
    """The requested output. Imports torch if it needs it."""
    checks.one_of("output", output, ("torch", "numpy"))
    if output == "numpy":
        if device is not None:
            raise ConfigError(f'device={device!r} needs output="torch": numpy arrays live on the CPU')
        return NumpyOutput()
    try:
        from penstock.loader.pytorch import find_device
    except ImportError as error:
        raise ConfigError(
            f'output="torch" needs PyTorch: pip install "penstock[torch]", or ask for output="numpy" ({error})'
        ) from None
    found = None if device is None else find_device(device)
    return TorchOutput() if found is None else DeviceOutput(found)
