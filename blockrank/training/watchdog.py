"""Tells of a run that stands still: where each of its threads is."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax

log = logging.getLogger(__name__)

EXIT_STATUS = 70
"""Of a process that its watchdog ended (EX_SOFTWARE of sysexits.h)."""


class Watchdog:
    """Writes all threads' stacks to stderr and to a file in `folder` whenever `beat` was not called for `seconds`.

    `seconds` 0 is off. With `exit`, the process ends then, at once, with `EXIT_STATUS`: whatever keeps a step from
    finishing would keep an orderly end from finishing too. The newest committed checkpoint stands.
    """

    def __init__(self, seconds: float, folder: str | Path, *, exit: bool = False):
        self.file = Path(folder) / f"stalled_process_{jax.process_index()}.txt"
        self._seconds, self._exit = seconds, exit
        self._last, self._closed = time.monotonic(), threading.Event()
        if seconds:
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Something was finished."""
        self._last = time.monotonic()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(max(self._last + self._seconds - time.monotonic(), 0.01)):
            idle = time.monotonic() - self._last
            if idle < self._seconds:
                continue
            self._tell(idle)
            if self._exit:
                os._exit(EXIT_STATUS)
            self.beat()

    def _tell(self, idle: float) -> None:
        text = _stacks()
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        head = f"{now}: no training step finished for {idle:.0f} s (trainer.watchdog_s={self._seconds:g}); all threads:"
        print(head, text, sep="\n", file=sys.stderr, flush=True)
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{head}\n{text}\n")
        except OSError as error:
            log.warning("the stacks are not in %s: %s", self.file, error)


def _stacks() -> str:
    """Of all threads; on a full disk they go to stderr alone."""
    try:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read()
    except OSError as error:
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        return f"(above, on stderr: {error})"
