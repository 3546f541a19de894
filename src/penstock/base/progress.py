"""Progress: a bar on a terminal (with tqdm) or in a notebook (with ipywidgets too), else a line every few seconds."""

import importlib.util
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

NOTE_EVERY_S = 0.5
LINE_EVERY_S = 2.0
LABEL_WIDTH = len("DataLoader, 2 workers")


class Bar:
    """A bar on a terminal or in a notebook if tqdm is installed, else a line every few seconds."""

    def __init__(self, label: str, total: int, unit: str, note: Callable[[], str] = str) -> None:
        self._label, self._total, self._unit, self._note = label, total, unit, note
        self._done, self._began = 0, time.perf_counter()
        self._bar = self._make_bar()
        self._next_note = self._began + (LINE_EVERY_S if self._bar is None else 0)

    def _make_bar(self) -> Any:
        """A bar of tqdm's, or None where only lines can be shown."""
        if importlib.util.find_spec("tqdm") is None:
            return None
        layout = "{desc} {percentage:3.0f}%|{bar}| {rate_noinv_fmt}{postfix}, {remaining} left"
        options: dict[str, Any] = {"total": self._total, "unit": f" {self._unit}", "bar_format": layout}
        if "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None:
            from tqdm.notebook import tqdm as bar_class
        elif sys.stderr.isatty():
            from tqdm import tqdm as bar_class

            options["ncols"], options["nrows"] = shutil.get_terminal_size()  # tqdm shows nothing if it is unknown
        else:
            return None
        bar = bar_class(**options)
        bar.set_description_str(f"{self._label:<{LABEL_WIDTH}}")
        return bar

    def close(self) -> None:
        """End the bar and move to the next line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def add(self, count: int) -> None:
        """Count ``count`` more as done."""
        self._done += count
        now = time.perf_counter()
        due = now >= self._next_note or self._done == self._total
        if due:
            self._next_note = now + (LINE_EVERY_S if self._bar is None else NOTE_EVERY_S)
        if self._bar is not None:
            if due:
                self._bar.set_postfix_str(self._note(), refresh=False)
            self._bar.update(count)
        elif due:
            self._print(now - self._began)

    def advance_to(self, done: int) -> None:
        """Count everything up to ``done`` as done."""
        self.add(done - self._done)

    def _print(self, seconds: float) -> None:
        rate = self._done / max(seconds, 1e-9)
        left = f"{(self._total - self._done) / rate:.0f} s left" if self._done < self._total else f"{seconds:.1f} s"
        parts = [f"{rate:,.0f} {self._unit}/s", self._note(), left]
        text = ", ".join(part for part in parts if part)
        self.say(f"{self._label}: {self._done / self._total:.0%}, {text}")

    def say(self, line: str) -> None:
        """Print one line."""
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class Progress(Bar):
    """A bar for a command: a Ctrl-C that Python would drop is raised at the next step."""

    def __init__(self, label: str, total: int, unit: str, note: Callable[[], str] = str) -> None:
        super().__init__(label, total, unit, note)
        self._interrupted = False
        self._handler: Any = None

    def __enter__(self) -> "Progress":
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.getsignal(signal.SIGINT)
            if self._handler is signal.default_int_handler:  # otherwise it is ignored, or another handler's
                signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        """Python drops exceptions that are raised in ``__del__``, Ctrl-C too."""
        self._interrupted = True
        while frame is not None:
            if frame.f_code.co_name == "__del__":
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        if self._handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handler)
        self.close()

    def add(self, count: int) -> None:
        """Count ``count`` more as done."""
        if self._interrupted:
            raise KeyboardInterrupt
        super().add(count)
