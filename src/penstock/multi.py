"""Several datasets of different shapes, fed by one loader: one budget, one team of threads, one position.

Each dataset keeps an order, a deal and slots of its own; what is shared is the memory they are planned within, the
threads that read them, and the say over whose batch is wanted when. A position is an epoch and how many samples of each
dataset were delivered, so it is checked and resumed as a plain loader's is.
"""

import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from penstock.dataset import Dataset
from penstock.errors import ConfigError, KeptBatches, StateMismatch
from penstock.interleave import Interleaved
from penstock.iteration import Iteration
from penstock.jointplan import JointPlan, make_joint_plan
from penstock.loader import SLOTS_BACK_WITHIN_S, Loader
from penstock.order import Order, check_seed, generator, repeated
from penstock.reader import Team
from penstock.request import memory_limit, order_of
from penstock.sizes import format_size
from penstock.stats import Meter, Report, Stats, together

STATE_VERSION = 1

# Members plan nothing by themselves: this is more than they could want.
UNLIMITED = 2**62

Mode = Literal["together", "alternate"]
Samples = Literal["all", "shortest", "longest"]


class MultiLoader:
    """Batches of several datasets, whose fields may differ in shape, in memory bounded by one number of bytes.

    datasets:    what to load, by name
    mode:        "together": each step is a dict with a batch of every dataset, by name;
                 "alternate": each step is a pair, a dataset's name and a batch of it, the datasets spread evenly over
                 the epoch
    batch_size:  samples a batch, on each rank; a dict where datasets differ
    samples:     what an epoch is. "all": every sample of every dataset exactly once; in "together", datasets that have
                 ended are absent from the last steps. "shortest" and "longest": as many steps of each dataset as the
                 one that takes fewest or most. A dict: so many samples of each. Where that is not all of a dataset
                 once, it goes on where the last epoch ended, pass after pass, each in a new order: every sample comes
                 once before any comes twice
    shuffle:     within each dataset, as in ``Loader``, and in "alternate" the sequence of datasets too
    seed:        decides all orders, together with the epoch; no two datasets are shuffled alike
    memory:      the most that may be held for all datasets together
    options:     as in ``Loader``: threads (of all together), columns, window, on_error, max_errors (of each dataset),
                 nan, drop_last, tail, rank, world_size, device, output
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        *,
        mode: Mode,
        batch_size: int | Mapping[str, int],
        samples: Samples | Mapping[str, int] = "all",
        shuffle: bool = False,
        seed: int = 0,
        memory: int | str | None = None,
        window: int | str | None = None,
        **options: Any,
    ) -> None:
        if mode not in ("together", "alternate"):
            raise ConfigError(f'mode={mode!r}: expected "together" or "alternate"')
        if not isinstance(shuffle, bool):
            raise ConfigError(f"shuffle={shuffle!r}: expected True or False; each dataset has an order of its own")
        check_seed(seed)
        self.mode = mode
        sizes = _batch_sizes(_checked(datasets), batch_size)
        orders = {name: order_of(ds, shuffle, _seed_of(seed, name), window) for name, ds in datasets.items()}
        orders = _for_epochs(orders, sizes, samples)
        self._members = {
            name: _member(name, ds, batch_size=sizes[name], shuffle=orders[name], **options)
            for name, ds in datasets.items()
        }
        self._held_before = next(iter(self._members.values())).held_before
        limit, note = memory_limit(memory)
        requests = {name: member.request for name, member in self._members.items()}
        threads = max(request.threads for request in requests.values())
        self.plan: JointPlan = make_joint_plan(
            {name: replace(r, threads=threads, limit_bytes=limit, limit_note=note) for name, r in requests.items()}
        )
        """What the loader will use, decided before anything is read."""
        for name, member in self._members.items():
            member.plan = self.plan.plans[name]
            member.told_kept = True  # told here, for all together
        self._times = {
            name: Interleaved(name, len(orders[name]), member.deal.step_samples, seed if shuffle else None)
            for name, member in self._members.items()
        }
        self._lengths = {name: len(order) for name, order in orders.items()}
        self._identity = {"mode": mode, "seed": seed, "of": {name: m.identity for name, m in self._members.items()}}
        self._epoch, self._begun = 0, False
        self._samples = dict.fromkeys(datasets, 0)
        self._steps: weakref.ref[_Steps] = lambda: None  # type: ignore[assignment]
        self._team: Team | None = None
        self._meter = Meter(self._held_before)
        self._told_kept = False

    def __len__(self) -> int:
        """Steps in a whole epoch, the same on every rank."""
        steps = [len(member) for member in self._members.values()]
        return max(steps) if self.mode == "together" else sum(steps)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on from a loaded position. An iteration still under way ends."""
        self._end_steps("a newer iteration of this loader began; a loader feeds one loop at a time")
        if self._team is not None:
            self._team.wait(SLOTS_BACK_WITHIN_S)
        if self._begun:
            self._epoch, self._samples = self._epoch + 1, dict.fromkeys(self._samples, 0)
        self._begun = True
        self._team = team = Team(self.plan.threads)
        iterations = {
            name: member.begin(self._epoch, self._samples[name], team, self._wanted_at(name))
            for name, member in self._members.items()
        }
        self._meter = Meter(self._held_before)
        steps = _Steps(self, iterations)
        self._steps = weakref.ref(steps)
        team.start()
        return steps

    def state_dict(self) -> dict[str, Any]:
        """The position after the latest step delivered, as JSON."""
        epoch, samples = self._epoch, self._samples
        if all(samples[name] >= length for name, length in self._lengths.items()):
            epoch, samples = epoch + 1, dict.fromkeys(samples, 0)
        return {"version": STATE_VERSION, "epoch": epoch, "samples": dict(samples), **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position at the next ``iter``; batch size, budget, threads and ranks may differ."""
        epoch, samples = _checked_state(state, self._identity, self._lengths)
        self._end_steps("load_state_dict moved the loader while this iteration was under way; begin a new one")
        self._epoch, self._samples, self._begun = epoch, samples, False

    def report(self) -> Report:
        """What the current or latest epoch left out, filled in, or could not check, of all datasets together."""
        return self.stats().report

    def stats(self) -> Stats:
        """Rate, waits, memory and bottleneck of the current or latest epoch, of all datasets together."""
        return replace(
            together({name: member.stats() for name, member in self._members.items()}, self._meter),
            threads=self.plan.threads,
            short_of_slots=self.plan.short_of_slots,
            planned_bytes=self.plan.planned_bytes,
            budget_bytes=self.plan.limit_bytes,
        )

    def close(self) -> None:
        """End the iteration under way, its threads and files, and let go of the memory that is not lent."""
        self._end_steps("the loader was closed")
        for member in self._members.values():
            member.close()

    def __enter__(self) -> "MultiLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def time(self, name: str, position: int) -> float:
        """When the batch of a dataset that begins at a position comes, among those of all; called by the iteration."""
        return self._times[name].time(self._epoch, position)

    def delivered(self, positions: Mapping[str, int], samples: int, waited: float) -> None:
        """Take note of how far the epoch has come; called by the iteration."""
        self._samples = dict(positions)
        self._meter.count(samples, 0, waited)
        added_bytes = sum(member.added_bytes for member in self._members.values())
        if self.plan.planned_bytes + added_bytes > self.plan.limit_bytes and not self._told_kept:
            self._told_kept = True
            warnings.warn(
                f"batches of {format_size(added_bytes)} are being kept beyond those planned for. Their memory is "
                f"yours, and goes beyond memory={format_size(self.plan.limit_bytes)}; keep copies of what you need, or "
                f"fewer",
                KeptBatches,
                stacklevel=4,
            )

    def _wanted_at(self, name: str) -> Callable[[int], float]:
        if self.mode == "together":
            return float
        return partial(_time_of_step, self._times[name], self._epoch, self._samples[name])

    def _end_steps(self, why: str) -> None:
        steps = self._steps()
        if steps is not None:
            steps.end(why)


class _Steps:
    """One epoch, step by step. Its end, however it comes, ends the threads and closes the files."""

    def __init__(self, loader: MultiLoader, iterations: Mapping[str, Iteration]) -> None:
        self._loader, self._iterations = loader, iterations
        self._alone = next(iter(iterations.values())).alone
        self._why_ended = ""
        self._over = False

    def __iter__(self) -> "_Steps":
        return self

    def __next__(self) -> Any:
        if self._why_ended:
            raise StateMismatch(self._why_ended)
        try:
            while True:
                step = self._step()
                if step or not self._alone:  # or else nothing of it could be read, and no other rank waits for us
                    break
        except BaseException:
            self._end_all()
            raise
        return step if self._loader.mode == "together" else next(iter(step.items()))

    def end(self, why: str) -> None:
        """End now; whoever asks for another step is told why."""
        if not self._over:
            self._why_ended = why
            self._end_all()

    def _step(self) -> dict[str, Any]:
        """The batches of one step, by name, without those of which nothing could be read."""
        began = time.perf_counter()
        going = [name for name, iteration in self._iterations.items() if iteration.steps_left]
        if self._over or not going:
            raise StopIteration
        if self._loader.mode == "alternate":
            going = [min(going, key=lambda name: self._loader.time(name, self._iterations[name].position))]
        delivered = {name: self._delivered(name) for name in going}
        positions = {name: iteration.position for name, iteration in self._iterations.items()}
        self._loader.delivered(
            positions, sum(samples for _, samples in delivered.values()), time.perf_counter() - began
        )
        return {name: batch for name, (batch, samples) in delivered.items() if samples or not self._alone}

    def _delivered(self, name: str) -> tuple[Any, int]:
        try:
            return self._iterations[name].deliver()
        except Exception as error:
            error.add_note(f"of dataset {name!r}")
            raise

    def _end_all(self) -> None:
        self._over = True
        for iteration in self._iterations.values():
            iteration.end("the loader of several datasets ended")


def _time_of_step(times: Interleaved, epoch: int, start: int, step: int) -> float:
    return times.time(epoch, start + step * times.step_samples)


def _member(name: str, ds: Dataset, **options: Any) -> Loader:
    try:
        return Loader(ds, memory=UNLIMITED, **options)
    except ConfigError as error:
        raise type(error)(f"datasets[{name!r}]: {error}") from None


def _seed_of(seed: int, name: str) -> int:
    """A dataset's own seed: with one for all, datasets of one length would be shuffled alike."""
    return int(generator(seed, 0, "dataset", name).integers(2**53))


def _checked(datasets: Mapping[str, Dataset]) -> Mapping[str, Dataset]:
    if not isinstance(datasets, Mapping) or not datasets:
        raise ConfigError(f"datasets: expected a dict of at least one dataset, by name; got {str(datasets)[:200]!r}")
    for name, ds in datasets.items():
        if not isinstance(name, str) or not isinstance(ds, Dataset):
            raise ConfigError(
                f"datasets[{name!r}]: expected texts as names, and datasets as penstock.open gives them; got "
                f"{type(ds).__name__}"
            )
        if len(ds) == 0:
            raise ConfigError(f"datasets[{name!r}]: no samples; check what was selected, or leave it out")
    return datasets


def _batch_sizes(datasets: Mapping[str, Dataset], batch_size: int | Mapping[str, int]) -> dict[str, int]:
    if not isinstance(batch_size, Mapping):
        batch_size = dict.fromkeys(datasets, batch_size)
    return _named("batch_size", datasets, batch_size)


def _named(argument: str, datasets: Mapping[str, Any], given: Mapping[str, int]) -> dict[str, int]:
    """One positive number a dataset."""
    for name in datasets:
        number = given.get(name)
        if not isinstance(number, int) or number < 1:
            raise ConfigError(f"{argument}: expected a whole number, at least 1, for {name!r}; got {number!r}")
    for name in given:
        if name not in datasets:
            raise ConfigError(f"{argument}: no dataset {name!r}: there are {', '.join(map(repr, datasets))}")
    return {name: given[name] for name in datasets}


def _for_epochs(
    orders: Mapping[str, Order], sizes: Mapping[str, int], samples: Samples | Mapping[str, int]
) -> dict[str, Order]:
    """The orders, of as many samples an epoch as were asked for."""
    if samples == "all":
        return dict(orders)
    if isinstance(samples, Mapping):
        wanted = _named("samples", orders, samples)
    elif samples in ("shortest", "longest"):
        steps = [Fraction(len(order), sizes[name]) for name, order in orders.items()]
        each = min(steps) if samples == "shortest" else max(steps)
        # Of batches, not of steps: on any number of ranks, an epoch has the same samples.
        wanted = {name: -(-(each * sizes[name]) // 1) for name in orders}
    else:
        raise ConfigError(f'samples={samples!r}: expected "all", "shortest", "longest", or a dict of numbers by name')
    return {
        name: order if wanted[name] == len(order) else repeated(order, int(wanted[name]))
        for name, order in orders.items()
    }


def _checked_state(
    state: Mapping[str, Any], identity: Mapping[str, Any], lengths: Mapping[str, int]
) -> tuple[int, dict[str, int]]:
    version = state.get("version") if isinstance(state, Mapping) else None
    if type(version) is not int or version != STATE_VERSION or "of" not in state:
        raise StateMismatch(
            f"not a state of several datasets that this version can read: expected a dict with version "
            f"{STATE_VERSION} and the datasets' names, got {str(state)[:200]}"
        )
    for name in sorted({"version", "epoch", "samples", *identity} ^ state.keys()):
        raise StateMismatch(f"the state has an unknown entry, or lacks one: {name!r}")
    for name in ("mode", "seed"):
        if type(state[name]) is not type(identity[name]) or state[name] != identity[name]:
            raise StateMismatch(f"the state was saved with {name}={state[name]!r}, here it is {identity[name]!r}")
    if not isinstance(state["of"], Mapping) or state["of"].keys() != identity["of"].keys():
        raise StateMismatch(
            f"the state was saved for datasets {str(state['of'])[:200]}, here are {', '.join(identity['of'])}"
        )
    for name, ours in identity["of"].items():
        theirs = state["of"][name]
        if theirs != ours:
            theirs = theirs if isinstance(theirs, Mapping) else {}
            differ = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
            raise StateMismatch(
                f"the state was saved for other data or another order of {name!r}: {', '.join(differ)} differ. Open "
                f"the same files with the same fields, seed, shuffle and samples, or begin anew without the state"
            )
    epoch, samples = state["epoch"], state["samples"]
    sound = type(epoch) is int and epoch >= 0 and isinstance(samples, Mapping) and samples.keys() == lengths.keys()
    if not sound or not all(type(n) is int and 0 <= n <= lengths[name] for name, n in samples.items()):
        raise StateMismatch(f"the state's position is impossible: epoch {epoch!r}, samples {samples!r} of {lengths}")
    return epoch, {name: samples[name] for name in lengths}
