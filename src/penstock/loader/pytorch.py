"""The only module that imports torch: tensors, pinned slots, device copies, ranks, and torch's own loader."""

import os
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.multiprocessing.reductions import reduce_tensor

from penstock.base.dtypes import is_half
from penstock.base.sizes import KiB
from penstock.base.spec import Cast
from penstock.dataset.rewrite import Rescale
from penstock.errors import ConfigError
from penstock.loader.segments import CAN_SHARE, find_segment, receive


def rank_and_world(group: Any = None) -> tuple[int, int] | None:
    """This process's place among those that train together; None if torch.distributed was not started."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    return None


def worker_and_workers() -> tuple[int, int] | None:
    """This process's place among the workers of torch's own loader; None outside of them."""
    info = torch.utils.data.get_worker_info()
    return None if info is None else (info.id, info.num_workers)


@cache
def iterable_dataset(kind: type) -> type:
    """A class that is also one of torch's ``IterableDataset``s, which its own loader insists on."""
    if issubclass(kind, torch.utils.data.IterableDataset):
        return kind
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    bases = (kind, torch.utils.data.IterableDataset)
    return types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(same))


def chain_datasets(datasets: list[Any]) -> Any:
    """Torch's ``ChainDataset``."""
    return torch.utils.data.ChainDataset(datasets)


def torch_loader(*args: Any, **options: Any) -> Any:
    """Torch's own ``DataLoader``."""
    return torch.utils.data.DataLoader(*args, **options)


def tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor."""
    if array.dtype.kind == "V":  # bfloat16, which torch does not take from numpy
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def is_tensor(value: Any) -> bool:
    """Whether this is a tensor of torch's."""
    return isinstance(value, torch.Tensor)


def stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape, under a new first axis."""
    return torch.stack(list(values))


def is_plain(values: torch.Tensor) -> bool:
    """Whether a tensor is just numbers in memory."""
    usual = type(values) is torch.Tensor and values.device.type == "cpu" and values.layout == torch.strided
    return usual and not (values.requires_grad or values.is_quantized or values.is_conj() or values.is_neg())


def tensor_over(memory: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes as a tensor, which keeps them for as long as any tensor over them lives."""
    return torch.from_numpy(memory).view(dtype).view(shape)


def write_row(block: torch.Tensor, row: int, values: torch.Tensor) -> None:
    """Copy into a row of a tensor, by this thread alone: torch would wake others for each."""
    try:
        source = values.numpy()
    except (RuntimeError, TypeError):  # what numpy cannot hold
        block[row] = values
        return
    np.copyto(block[row].numpy(), source)


SENT_BY_VALUE = 64 * KiB
"""Copying fewer bytes takes less time than sending a descriptor of them."""


def send_segments() -> bool:
    """From now on, this worker of torch's loader sends tensors in segments as they are; False where it cannot."""
    can = CAN_SHARE and torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    if can:
        ForkingPickler.register(torch.Tensor, _reduced)
    return can


def _reduced(values: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """How a tensor is sent: torch's own way is to put each into fresh shared memory."""
    if not is_plain(values) or not values.numel():
        return reduce_tensor(values)
    if values.nbytes <= SENT_BY_VALUE and values.is_contiguous():
        data = bytearray(values.reshape(-1).view(torch.uint8).numpy())
        return _by_value, (data, values.dtype, tuple(values.shape), values.stride())
    segment = find_segment(values.untyped_storage().data_ptr())
    if segment is None:
        return reduce_tensor(values)
    descriptor = segment.locked_descriptor()
    try:
        sent = DupFd(descriptor)
    finally:
        os.close(descriptor)
    where = len(segment.memory), os.getpid(), segment.number
    return _in_segment, (sent, where, values.dtype, tuple(values.shape), values.stride(), values.storage_offset())


def _by_value(data: bytearray, dtype: torch.dtype, *layout: Any) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).as_strided(*layout)


def _in_segment(sent: Any, where: tuple[int, int, int], dtype: torch.dtype, *layout: Any) -> torch.Tensor:
    """A tensor in a segment of another process."""
    descriptor = sent.detach()
    try:
        memory = receive(descriptor, *where)
    finally:
        os.close(descriptor)
    return torch.from_numpy(memory).view(dtype).as_strided(*layout)


def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The same memory as tensors, which keep it lent for as long as they or views of them live; objects as lists."""
    return {name: list(array) if array.dtype.hasobject else tensor(array) for name, array in arrays.items()}


def find_device(name: Any) -> torch.device | None:
    """The device to copy to; None for the CPU, where nothing is copied."""
    try:
        if isinstance(name, bool):  # torch takes True for cuda:1
            raise TypeError("expected a device, or its name")
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={name!r}: {str(error).splitlines()[0]}") from None
    if device.type == "cpu":
        return None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: this torch finds no CUDA device; use device=None for CPU tensors")
    return device


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """``numpy.float32 -> torch.float32``."""
    return tensor(np.empty(0, dtype)).dtype


class DeviceCopies:
    """Batches on their way to a device, each slot held until its copy is done.

    On CUDA the copies run on a stream of their own, from pinned memory, beside the training step; conversions run on
    the device after the copy, so that the bus carries the data as stored. A slot must not be filled again before the
    event behind its copy: reusing it when the tensor died corrupted every batch of a trial.
    """

    IN_FLIGHT = 2

    def __init__(
        self,
        device: torch.device,
        casts: Mapping[str, Cast],
        rescales: Mapping[str, Rescale],
        axes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.device = device
        self._casts, self._axes = dict(casts), dict(axes)
        self._rescales = {name: _DeviceRescale(rescale, device) for name, rescale in rescales.items()}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in_flight: deque[tuple[torch.cuda.Event, Mapping[str, np.ndarray]]] = deque()

    def start(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray) -> Callable[[], dict[str, Any]]:
        """Begin to copy a batch; the returned function hands the tensors over, in order with the caller's stream."""
        if self._stream is None:
            moved = {name: self._move(name, array, rows) for name, array in arrays.items()}
            return lambda: moved
        self._release()
        with torch.cuda.stream(self._stream):
            moved = {name: self._move(name, array, rows) for name, array in arrays.items()}
            done = torch.cuda.Event()
            done.record(self._stream)
        self._in_flight.append((done, arrays))

        def hand_over() -> dict[str, Any]:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            for values in moved.values():
                if is_tensor(values):
                    values.record_stream(current)
            return moved

        return hand_over

    def finish(self) -> None:
        """Wait for every copy, so that no slot is read from any more."""
        while self._in_flight:
            self._in_flight.popleft()[0].synchronize()

    def _release(self) -> None:
        while self._in_flight and (len(self._in_flight) >= self.IN_FLIGHT or self._in_flight[0][0].query()):
            self._in_flight.popleft()[0].synchronize()

    def _move(self, name: str, array: np.ndarray, rows: np.ndarray) -> Any:
        if array.dtype.hasobject:
            return list(array)
        values = tensor(array).to(self.device, non_blocking=self._stream is not None)
        if name in self._rescales:
            values = self._rescales[name](values, rows)
        if name in self._casts:
            values = _converted(values, self._casts[name])
        if name in self._axes:
            values = values.permute(0, *(axis + 1 for axis in self._axes[name])).contiguous()
        return values


def _converted(values: torch.Tensor, cast: Cast) -> torch.Tensor:
    """The same operations as on the way into a slot: half precision is computed in single, and rounded once."""
    dtype = torch_dtype(cast.dtype)
    values = values.to(torch.float32 if cast.changes_values and is_half(cast.dtype) else dtype)
    if cast.divisor != 1:
        values = values.div_(cast.divisor)
    if cast.scale != 1:
        values = values.mul_(cast.scale)
    if cast.offset != 0:
        values = values.add_(cast.offset)
    return values.to(dtype)


class _DeviceRescale:
    """A deferred normalization, with its tables on the device; the same operations in the same order as on the CPU."""

    def __init__(self, rescale: Rescale, device: torch.device) -> None:
        self.groups, self.dtype = rescale.groups, torch_dtype(rescale.dtype)
        self.mean, self.factor = (torch.from_numpy(table).to(device) for table in (rescale.mean, rescale.factor))

    def __call__(self, values: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        groups = torch.from_numpy(self.groups(rows).astype(np.int64)).to(self.mean.device)
        by_row = values.to(torch.float32).reshape(*groups.shape, -1)
        return by_row.sub_(self.mean[groups]).mul_(self.factor[groups]).reshape(values.shape).to(self.dtype)


def pin(block: np.ndarray) -> Callable[[], None]:
    """Lock a block of memory in place for device copies; returns what unlocks it.

    The block stays ours: torch's own pinned allocator rounds up to a power of two, which no budget foresees.
    """
    runtime: Any = torch.cuda.cudart()
    address = block.ctypes.data
    failed = int(runtime.cudaHostRegister(address, block.nbytes, 0))
    if failed:
        raise ConfigError(
            f"pinning {block.nbytes:,} bytes failed (CUDA error {failed}): the system's limit of locked memory may be "
            f"lower; use device=None and copy batches yourself, or a smaller memory="
        )
    return lambda: runtime.cudaHostUnregister(address)
