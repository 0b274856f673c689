"""The text of an optimised program as computations of instructions, and how often its loops run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)( \(.*\) -> .*)? \{$")
_INSTRUCTION = re.compile(r"^(ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")


@dataclass(frozen=True)
class Shape:
    """One array of a result: element type, dimensions, and whether it lies in main memory."""

    dtype: str
    dimensions: tuple[int, ...]
    in_main_memory: bool = True

    @property
    def bytes(self) -> float:
        return BYTES.get(self.dtype, 1) * math.prod(self.dimensions)

    @property
    def moved(self) -> float:
        """Bytes between main memory and the chip when it is read or written."""
        return self.bytes if self.in_main_memory else 0.0


@dataclass(frozen=True)
class Instruction:
    """`name = shapes opcode(operands), attributes`; a tuple has several shapes."""

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    argument: str
    root: bool

    @property
    def bytes(self) -> float:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def moved(self) -> float:
        return sum(shape.moved for shape in self.shapes)

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"\b{name}=%?([^\s,]+)", self.attributes)
        return None if found is None else found.group(1)

    def numbers(self, name: str) -> list[int]:
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return [] if found is None or not found.group(1) else [int(n) for n in found.group(1).split(",")]


Computation = dict[str, Instruction]


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Every computation by its name, and the name of the one that runs first."""
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        head = _COMPUTATION.match(line)
        if head is not None:
            current = computations.setdefault(head.group(2), {})
            entry = head.group(2) if head.group(1) else entry
        elif current is not None and (instruction := _parse(line.strip())) is not None:
            current[instruction.name] = instruction
    return computations, entry


def trip_count(computations: Mapping[str, Computation], loop: Instruction) -> int:
    """How often a while loop's body runs. Raises `ValueError` where the program does not tell."""
    known = re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', loop.attributes)
    if known is not None:
        return int(known.group(1))
    counted = _counter(computations, loop)
    if counted is None:
        raise ValueError(f"while loop {loop.name}: no trip count in the program")
    start, stop, step = counted
    return max(0, -(-(stop - start) // step))


def _counter(computations: Mapping[str, Computation], loop: Instruction) -> tuple[int, int, int] | None:
    """Where a loop's counter starts, the number it stays below, and its step: an unrolled loop's is above 1."""
    condition = computations[called(loop, "condition")]
    limits = [op for op in condition.values() if op.opcode == "constant" and op.shapes[0].dtype in ("s32", "u32")]
    counters = [op for op in condition.values() if op.opcode == "get-tuple-element"]
    compared = [op for op in condition.values() if op.opcode == "compare"]
    if len(limits) != 1 or len(counters) != 1 or [op.attribute("direction") for op in compared] != ["LT"]:
        return None
    index = int(counters[0].attribute("index") or 0)
    body = computations[called(loop, "body")]
    before = next(scope for scope in computations.values() if scope.get(loop.name) is loop)
    first, then = (_element(scope, name, index) for scope, name in ((before, loop.operands[0]), (body, _root(body))))
    start, step = _sum(before, first), _sum(body, then)
    if start is None or start[1] is not None or step is None or step[1] != index or step[0] < 1:
        return None
    return start[0], int(limits[0].argument), step[0]


def _root(scope: Computation) -> str:
    return next(op.name for op in scope.values() if op.root)


def _element(scope: Computation, name: str, index: int) -> str:
    """The name of a tuple's element, or of the tuple where nothing is known of it."""
    while name in scope and scope[name].opcode in ("copy", "opt-barrier", "optimization-barrier"):
        name = scope[name].operands[0]
    return scope[name].operands[index] if name in scope and scope[name].opcode == "tuple" else name


def _sum(scope: Computation, name: str) -> tuple[int, int | None] | None:
    """A scalar as the sum of constants and one element of the computation's parameter: (sum, element), else None."""
    op = scope.get(name)
    if op is None:
        return None
    if op.opcode == "constant" and op.argument.lstrip("-").isdigit():
        return int(op.argument), None
    if op.opcode == "get-tuple-element":
        return 0, int(op.attribute("index") or 0)
    if op.opcode in ("copy", "bitcast", "convert"):
        return _sum(scope, op.operands[0])
    if op.opcode != "add":
        return None
    left, right = (_sum(scope, operand) for operand in op.operands)
    if left is None or right is None or None not in (left[1], right[1]):
        return None
    return left[0] + right[0], left[1] if right[1] is None else right[1]


def called(op: Instruction, attribute: str) -> str:
    name = op.attribute(attribute)
    assert name is not None, f"{op.opcode} {op.name} names no {attribute}"
    return name


def _parse(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    root, name, rest = bool(match.group(1)), match.group(2), match.group(3)
    end = _close(rest, 0) if rest.startswith("(") else rest.index(" ")
    shapes = tuple(
        Shape(dtype, tuple(int(n) for n in sizes.split(",") if n), "S(" not in layout)
        for dtype, sizes, layout in _SHAPE.findall(rest[:end])
    )
    call = rest[end:].lstrip()
    start = call.index("(")
    stop = _close(call, start)
    inside = call[start + 1 : stop - 1]
    names = re.sub(r"\[[^\]]*\]|\{[^}]*\}|\([^)]*\)", "", inside).split(",")
    operands = tuple(name.split()[-1].lstrip("%") for name in names if name.strip())
    return Instruction(name, shapes, call[:start], operands, call[stop:], inside, root)


def _close(text: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    raise ValueError(f"unbalanced brackets in {text[:80]!r}")
