"""The Natural Scenes Dataset: trials, voxels and pictures of a subject, ready to train on.

It is built on penstock's core; nothing in the core knows NSD. ``docs/nsd.md`` shows how it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.nsd.dataset import NSDDataset
    from penstock.nsd.mindeye import get_dataloaders, mindeye2
    from penstock.nsd.regions import Voxels
    from penstock.nsd.stimuli import Pictures, text
    from penstock.nsd.subject import NSD, subjects
    from penstock.nsd.synthetic import synthesize

__all__ = ["NSD", "NSDDataset", "Pictures", "Voxels", "get_dataloaders", "mindeye2", "subjects", "synthesize", "text"]

_HOME_OF = {
    "NSD": "subject",
    "NSDDataset": "dataset",
    "Pictures": "stimuli",
    "Voxels": "regions",
    "get_dataloaders": "mindeye",
    "mindeye2": "mindeye",
    "subjects": "subject",
    "synthesize": "synthetic",
    "text": "stimuli",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'penstock.nsd' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"penstock.nsd.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
