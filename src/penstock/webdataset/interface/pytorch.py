"""What ``webdataset.pytorch`` has of torch, imported when it is asked for."""

from typing import Any

_NAMES = {
    "DataLoader": "utils.data.DataLoader",
    "IterableDataset": "utils.data.IterableDataset",
    "TorchTensor": "Tensor",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.loader import pytorch

    found: Any = vars(pytorch)["torch"]
    for part in _NAMES[name].split("."):
        found = getattr(found, part)
    return found
