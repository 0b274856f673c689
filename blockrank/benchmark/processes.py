"""Processes that each hold one cell of the benchmark, driven one repetition at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from blockrank.errors import UserError

ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Huge pages for large buffers, and no process that takes a whole accelerator; the caller's own values win."""


class CellProcess:
    """A worker process: `facts` once it is warm, then seconds for each `repeat`, then the peak of its memory.

    Raises `UserError` with the reason when the process ends early or takes longer than `timeout` for an answer.
    """

    def __init__(self, name: str, job: Path, timeout: float):
        self.name, self._timeout = name, timeout
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "blockrank.benchmark.worker", str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**ENVIRONMENT, **os.environ},
        )
        self.facts: dict[str, Any] = {}

    def start(self) -> None:
        """Waits until the program is compiled and has run once."""
        self.facts = self._answer()

    def repeat(self) -> float:
        """Seconds of one more repetition."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write("run\n")
            self._stdin.flush()
        return self._answer()["seconds"]

    def finish(self) -> int:
        """Peak memory in bytes over all repetitions; the process ends."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        peak = self._answer()["peak_bytes"]
        self._process.wait(self._timeout)
        return peak

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        started = time.perf_counter()
        ready, _, _ = select.select([self._process.stdout], [], [], self._timeout)
        if not ready:
            raise UserError(
                f"{self.name}: no answer in {time.perf_counter() - started:.0f} s; raise cell_timeout_s or leave it out"
            )
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"{self.name}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        if status < 0:
            return f"killed by signal {-status}" + (": out of memory?" if status == -9 else "")
        return lines[-1] if lines else f"ended with status {status}"

    def __enter__(self) -> CellProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
