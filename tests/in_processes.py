"""Reads in processes wherever a test does not say: for ``pytest --processes N``, and for programs that tests start."""

import contextlib
import dataclasses
import time

from penstock.base.sizes import MiB
from penstock.errors import ConfigError
from penstock.loader import placement
from penstock.loader import request as requests
from penstock.loader.placement import place
from penstock.loader.processes import LOOK_EVERY_S, ReaderProcess
from penstock.testing import check_store


def read_in_processes(count: int) -> None:
    """From now on loaders read in processes from the first batch on, as far as their datasets can be sent there.

    ``check_store`` also reads each store in a process. What processes hold is declared too low, so that the small
    budgets of tests have room for them.
    """
    placement.PROCESS_BYTES = MiB
    is_ready = ReaderProcess.is_ready

    def placed(store, paths, threads, processes, limit_bytes):
        if processes == "auto":
            few = min(count, threads) if isinstance(threads, int) else count
            with contextlib.suppress(ConfigError):
                return dataclasses.replace(place(store, paths, threads, few, limit_bytes), is_asked_for=False)
        return place(store, paths, threads, processes, limit_bytes)

    def wait_until_up(process):
        while not (is_ready(process) or process.failure or process._is_closed):
            time.sleep(LOOK_EVERY_S)
        return process.is_up

    requests.place = placed
    ReaderProcess.is_ready = wait_until_up
    check_store.__kwdefaults__["processes"] = 1
