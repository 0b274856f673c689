"""What SIGTERM (preemption) and Ctrl-C do to a command that continues when it is run again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Stopped(BaseException):
    """Raised by a signal where there is nothing to save. Not an `Exception`, so that no handler of errors takes it."""


class StopSignals:
    """While entered, the first SIGTERM or SIGINT raises `Stopped`; within `noted` it only sets `requested`.

    Later SIGTERMs are ignored, a second SIGINT is a `KeyboardInterrupt`. Handlers are put back at the end; outside the
    main thread, which alone may have any, nothing is done.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._noting = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.requested is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.requested = number
        if not self._noting:
            raise Stopped

    @contextmanager
    def noted(self, noting: bool = True) -> Iterator[None]:
        """Within, the first signal only sets `requested` (and raises again within `noted(False)` inside of that)."""
        before, self._noting = self._noting, noting
        try:
            yield
        finally:
            self._noting = before
