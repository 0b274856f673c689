"""What a compiled program costs one device, and how that compares with the chip and with the least it could cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockrank.chips import Chip
from blockrank.costs.hlo import Program
from blockrank.costs.programs import Planned

HEADINGS = {
    "program": "program",
    "rows": "rows",
    "tokens": "tokens",
    "arguments": "arguments GB",
    "temporaries": "temporaries GB",
    "total": "total GB",
    "free": "free",
    "flops": "HLO TFLOP",
    "ratio": "HLO / ideal",
    "padded": "HLO / padded",
    "bytes": "GB moved",
    "collectives": "collectives: count, MB",
    "milliseconds": "roofline ms",
    "compile": "compile s",
}


@dataclass(frozen=True)
class ProgramCosts:
    """Of one device and one run: bytes held, floating-point operations of matrix products, bytes moved and sent.

    `error` is the compiler's when the program does not fit; the numbers are then 0.
    """

    program: str
    rows: str
    tokens: int
    blocks: int
    ideal_flops: float
    layout_flops: float
    compile_seconds: float
    documents: int = 0
    fixed_flops: float = 0.0
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    collectives: Mapping[str, int] | None = None
    collective_bytes: Mapping[str, int] | None = None
    error: str | None = None

    @property
    def total_bytes(self) -> int:
        """Memory the program needs at once, arguments that its results replace counted once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes + self.code_bytes

    def seconds(self, chip: Chip) -> float:
        """The roofline: the longer of computing and moving, and then sending, nothing overlapped with it."""
        sent = sum((self.collective_bytes or {}).values())
        return max(self.flops / chip.flops, self.bytes / chip.memory_rate) + sent / chip.link_rate


def measure(planned: Planned, text: Path | None = None) -> ProgramCosts:
    """Compiles a program and reads its costs; with `text`, keeps the optimised program there."""
    shape = planned.shape
    start = time.perf_counter()
    common: dict[str, Any] = {
        "program": planned.name,
        "rows": f"{shape.rows} x {shape.row_length}",
        "tokens": shape.tokens,
        "blocks": planned.blocks,
        "ideal_flops": planned.ideal_flops,
        "layout_flops": planned.layout_flops,
        "documents": planned.documents,
        "fixed_flops": planned.fixed_flops,
    }
    try:
        compiled = planned.compile()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return ProgramCosts(**common, compile_seconds=time.perf_counter() - start, error=str(error).splitlines()[0])
    seconds = time.perf_counter() - start
    if text is not None:
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(compiled.as_text())
    return ProgramCosts(**common, compile_seconds=seconds, **memory_costs(compiled), **work_costs(compiled))


def memory_costs(compiled: Any) -> dict[str, int]:
    """The fields of `ProgramCosts` that say what memory a compiled program takes."""
    memory = compiled.memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }


def work_costs(compiled: Any) -> dict[str, Any]:
    """The fields of `ProgramCosts` that say what a compiled program computes, moves and sends."""
    costs = Program(compiled.as_text()).costs
    return {
        "flops": costs.flops,
        "bytes": costs.bytes,
        "collectives": dict(costs.collectives),
        "collective_bytes": dict(costs.collective_bytes),
    }


def table(rows: Sequence[ProgramCosts], chip: Chip) -> str:
    """A Markdown table, one line per program."""
    lines = ["| " + " | ".join(HEADINGS.values()) + " |", "| --- | --- |" + " ---: |" * (len(HEADINGS) - 2)]
    return "\n".join([*lines, *(_line(row, chip) for row in rows)])


def growth(rows: Sequence[ProgramCosts]) -> str:
    """A Markdown table of how FLOPs grow where documents double: all of them, and without `fixed_flops`.

    Empty where no depth is twice another.
    """
    known = {row.documents: row for row in rows if row.documents and row.error is None}
    lines = []
    for documents, row in sorted(known.items()):
        if (double := known.get(2 * documents)) is not None:
            ratios = double.flops / row.flops, (double.flops - double.fixed_flops) / (row.flops - row.fixed_flops)
            lines.append(f"| {documents} to {2 * documents} | {ratios[0]:.3f} | {ratios[1]:.3f} |")
    head = ["| documents doubled | all FLOP | the documents' |", "| --- | ---: | ---: |"]
    return "\n".join([*head, *lines]) if lines else ""


def as_json(row: ProgramCosts, chip: Chip) -> dict[str, Any]:
    """Every figure of a program, JSON-ready."""
    return {**asdict(row), "total_bytes": row.total_bytes, "roofline_seconds": row.seconds(chip)}


def _line(row: ProgramCosts, chip: Chip) -> str:
    if row.error is not None:
        cells = [row.program, row.rows, f"{row.tokens:,}", f"does not fit: {row.error}"]
        return "| " + " | ".join([*cells, *[""] * (len(HEADINGS) - len(cells))]) + " |"
    sent = row.collective_bytes or {}
    kinds = (f"{count} {kind}, {sent[kind] / 1e6:.2f}" for kind, count in sorted((row.collectives or {}).items()))
    cells = [
        row.program,
        row.rows,
        f"{row.tokens:,}",
        f"{row.argument_bytes / 1e9:.2f}",
        f"{row.temporary_bytes / 1e9:.2f}",
        f"{row.total_bytes / 1e9:.2f}",
        f"{1 - row.total_bytes / chip.memory:.0%}",
        f"{row.flops / 1e12:.3f}",
        f"{row.flops / row.ideal_flops:.3f}",
        f"{row.flops / row.layout_flops:.3f}",
        f"{row.bytes / 1e9:.1f}",
        "; ".join(kinds) or "none",
        f"{1e3 * row.seconds(chip):.1f}",
        f"{row.compile_seconds:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"
