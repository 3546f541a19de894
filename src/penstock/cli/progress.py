"""How far a command has come, and Ctrl-C that is never lost on the way."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from penstock.progress import LABEL_WIDTH, Bar


class Progress(Bar):
    """A bar on a terminal, where tqdm is installed; otherwise a line now and then. All on stderr."""

    def __init__(self, label: str, total: int, unit: str, note: Callable[[], str] = str) -> None:
        super().__init__(label, total, unit, note)
        self._interrupted = False
        self._handler: Any = None

    def __enter__(self) -> "Progress":
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.getsignal(signal.SIGINT)
            if self._handler is signal.default_int_handler:  # or else it is ignored, or somebody else's
                signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        """Python drops what is raised while an object dies, Ctrl-C too: then it is raised at the next step."""
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
        """So many more are done."""
        if self._interrupted:
            raise KeyboardInterrupt
        super().add(count)


__all__ = ["LABEL_WIDTH", "Progress"]
