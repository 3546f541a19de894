"""A loader driven at random, against a plain list."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import penstock as ps


class LoaderMachine(RuleBasedStateMachine):
    """Next, hold, drop, stop, save and resume; whatever happens, batches are those of the plain list."""

    @initialize(
        rows=st.integers(1, 40),
        batch_size=st.integers(1, 9),
        threads=st.integers(1, 3),
        shuffle=st.booleans(),
    )
    def begin(self, rows: int, batch_size: int, threads: int, shuffle: bool) -> None:
        self.rows, self.batch_size, self.threads, self.shuffle = rows, batch_size, threads, shuffle
        values = np.arange(rows)[:, None].repeat(3, 1)
        self.ds = ps.from_arrays(x=values)
        self.loader = self.make()
        self.iterator = None
        self.epoch, self.position = 0, 0
        self.next_epoch, self.next_position = 0, 0
        self.held: list[tuple[np.ndarray, np.ndarray]] = []
        self.saved: tuple[dict[str, object], int, int] | None = None

    def make(self) -> ps.Loader:
        return ps.Loader(
            self.ds, batch_size=self.batch_size, shuffle=self.shuffle, seed=5, memory="1GiB", threads=self.threads,
            output="numpy", columns=("x", "__index__"),
        )  # fmt: skip

    def expected(self) -> np.ndarray:
        order = ps.Shuffled(self.rows, 5) if self.shuffle else ps.InOrder(self.rows)
        return order.rows(self.epoch, self.position, min(self.position + self.batch_size, self.rows))

    @rule()
    def make_an_iterator(self) -> None:
        self.iterator, self.is_begun = iter(self.loader), False

    @rule()
    def make_an_iterator_that_is_not_used(self) -> None:
        iter(self.loader)

    @precondition(lambda self: self.iterator is not None)
    @rule(hold=st.booleans())
    def take_a_batch(self, hold: bool) -> None:
        if not self.is_begun:
            self.is_begun = True
            self.epoch, self.position = self.next_epoch, self.next_position
            self.next_epoch, self.next_position = self.epoch + 1, 0
        want = self.expected()
        if len(want) == 0:
            assert next(self.iterator, None) is None
            self.iterator = None
            return
        values, index = next(self.iterator)
        assert np.array_equal(index, want)
        assert np.array_equal(values, want[:, None].repeat(3, 1))
        self.position += len(want)
        if hold and len(self.held) < 3:
            self.held.append((values, values.copy()))

    @precondition(lambda self: self.held)
    @rule()
    def drop_a_batch(self) -> None:
        self.held.pop(0)

    @precondition(lambda self: self.iterator is not None)
    @rule()
    def stop(self) -> None:
        self.iterator = None

    @rule()
    def save(self) -> None:
        at_end = self.position >= self.rows
        self.saved = (self.loader.state_dict(), self.epoch + at_end, 0 if at_end else self.position)

    @precondition(lambda self: self.saved is not None)
    @rule(fresh=st.booleans())
    def resume(self, fresh: bool) -> None:
        state, self.epoch, self.position = self.saved
        self.next_epoch, self.next_position = self.epoch, self.position
        if fresh:
            self.loader.close()
            self.loader = self.make()
        self.loader.load_state_dict(state)
        self.iterator, self.is_begun = iter(self.loader), False

    @invariant()
    def held_batches_are_untouched(self) -> None:
        for values, copy in getattr(self, "held", []):
            assert np.array_equal(values, copy)

    def teardown(self) -> None:
        if hasattr(self, "loader"):
            self.loader.close()


TestLoaderMachine = LoaderMachine.TestCase
TestLoaderMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
