"""A check that a loader stays within its memory budget."""

import sys
from collections.abc import Callable
from typing import Any

from penstock.base.sizes import format_size
from penstock.loader.loader import Loader
from penstock.loader.multi import MultiLoader
from penstock.testing.measure import Measurement, measure


def check_budget(
    make_loader: Callable[[], Loader | MultiLoader], *, epochs: int = 2, step: Callable[[Any], Any] | None = None
) -> Measurement:
    """Check that a loader never holds more than it was given.

    ``make_loader`` opens the data and makes the loader; memory is counted from before it, every 5 ms, for the whole
    process tree. Import what the loader needs beforehand (torch, h5py): libraries are not its own.
    """
    measured = measure(make_loader, epochs=epochs, step=step)
    limit = measured.stats.budget_bytes
    assert sys.platform != "linux" or measured.peak_bytes > 0, "nothing was measured"
    assert measured.peak_bytes <= limit, (
        f"the budget of {format_size(limit)} was exceeded by {format_size(measured.peak_bytes - limit)}: "
        f"peak {format_size(measured.peak_bytes)}"
    )
    return measured
