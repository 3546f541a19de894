"""Positions: how far an epoch has come. Saved as JSON, and checked against the data and the order when loaded.

A position is an epoch and, for each dataset, how many of its samples all ranks together have delivered. Everything
else follows from that and the arguments.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.base.checks import shown
from penstock.base.dataclass import dataclass
from penstock.errors import StateMismatch
from penstock.loader.plan_text import ALONE

VERSION = 1

DATASETS = "of"
"""The entry that a state of several datasets has, and one of a single dataset has not."""


@dataclass
class Position:
    """How far a loader has come."""

    epoch: int
    samples: Mapping[str, int]
    """By dataset. Replaced as a whole, never changed."""
    begun: bool = False
    """Whether an iteration began here, so that the next one belongs to the next epoch."""

    def next_epoch(self) -> "Position":
        return Position(self.epoch + 1, dict.fromkeys(self.samples, 0))


def save(position: Position, identity: Mapping[str, Any]) -> dict[str, Any]:
    """A position as JSON, with what it will be compared with."""
    samples = dict(position.samples) if DATASETS in identity else position.samples[ALONE]
    return {"version": VERSION, "epoch": position.epoch, "samples": samples, **identity}


def load(state: Mapping[str, Any], identity: Mapping[str, Any], lengths: Mapping[str, int]) -> Position:
    """The position in a saved state, if it belongs to the same data and order."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if type(version) is not int or version != VERSION:
        raise StateMismatch(
            f"not a state this version can read: expected a dict with version {VERSION}, got {shown(state)}"
        )
    several = DATASETS in identity
    if several != (DATASETS in state):
        kinds = ("a Loader of one dataset", "a MultiLoader of several datasets")
        raise StateMismatch(f"the state was saved by {kinds[not several]}, and this is {kinds[several]}")
    expected = {"version", "epoch", "samples", *identity}
    for name in sorted(expected ^ state.keys(), key=shown):
        raise StateMismatch(f"the state {'lacks' if name in expected else 'has an unknown'} entry {shown(name)}")
    for difference in _differences(state, identity):
        window = ". Where window= is not given, memory= may decide it" if "window_blocks" in difference else ""
        raise StateMismatch(
            f"the state was saved for other data or another order: {difference}{window}. Open the same files with the "
            f"same fields, seed, shuffle{', mode, samples' if several else ''} and window, or begin anew without the "
            f"state"
        )
    samples = state["samples"] if several else {ALONE: state["samples"]}
    if not _is_position(state["epoch"], samples, lengths):
        longest = lengths if several else f"{lengths[ALONE]:,}"
        raise StateMismatch(
            f"the state's position is impossible: epoch {shown(state['epoch'])}, samples {shown(state['samples'])} of "
            f"{longest}"
        )
    return Position(state["epoch"], {name: samples[name] for name in lengths})


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Describes what was saved and is different here, one dataset after another."""
    for name, value in here.items():
        if name == DATASETS:
            yield from _differing_datasets(saved[name], value)
        elif _differ(saved[name], value):
            yield f"{name} was {shown(saved[name])}, here it is {value!r}"


def _differing_datasets(saved: Any, here: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if not isinstance(saved, Mapping) or saved.keys() != here.keys():
        yield f"its datasets were {shown(list(saved) if isinstance(saved, Mapping) else saved)}, here are {list(here)}"
        return
    for name, ours in here.items():
        theirs = saved[name] if isinstance(saved[name], Mapping) else {}
        for entry in sorted(theirs.keys() | ours.keys(), key=shown):
            was, now = (shown(each[entry]) if entry in each else "absent" for each in (theirs, ours))
            if entry not in theirs or entry not in ours or _differ(theirs[entry], ours[entry]):
                yield f"{entry} of dataset {name!r} was {was}, here it is {now}"


def _differ(one: Any, other: Any) -> bool:
    return type(one) is not type(other) or one != other


def _is_position(epoch: Any, samples: Any, lengths: Mapping[str, int]) -> bool:
    """Whether epochs of these lengths have this position, and positions up to it can be counted in 63 bits."""
    if not isinstance(samples, Mapping) or samples.keys() != lengths.keys() or type(epoch) is not int or epoch < 0:
        return False
    return all(
        type(samples[name]) is int and 0 <= samples[name] <= length and (epoch + 1) * length < 2**63
        for name, length in lengths.items()
    )
