"""One cell of the benchmark in a process of its own: `python -m blockrank.benchmark.worker job.json`.

Answers on stdout, one JSON object a line: first what it has built, then for every line on stdin the seconds of one more
repetition, and at the end of stdin the peak of its memory. Everything else it prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from blockrank.benchmark.settings import BenchConfig, System
from blockrank.config import build
from blockrank.errors import UserError


def serve(job: dict[str, Any], commands: TextIO, answers: TextIO) -> None:
    """Builds the job's program, runs it once to warm up, then once per line of `commands`."""
    import jax

    from blockrank.benchmark.memory import peak_bytes, reset_peak
    from blockrank.benchmark.programs import matmul_program, system_program
    from blockrank.benchmark.prompts import load_prompt

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    config = build(BenchConfig, job["config"])
    if job["system"] is None:
        program = matmul_program(config, job["tokens"])
    else:
        program = system_program(config, build(System, job["system"]), load_prompt(Path(job["prompt"])))
    reset_peak()
    warm_up, result = _timed(program.run)
    device = jax.devices()[0]
    answer(
        **program.facts,
        warm_up_seconds=warm_up,
        peak_bytes=peak_bytes(),
        platform=device.platform,
        device=device.device_kind,
        result=result.ravel().tolist(),
    )
    for _ in commands:
        answer(seconds=_timed(program.run)[0])
    answer(peak_bytes=peak_bytes())


def _timed(run: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    try:
        serve(job, sys.stdin, answers)
    except UserError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        answers.flush()
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
