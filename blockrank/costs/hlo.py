"""What one device of a compiled program does: FLOPs of matrix products, bytes moved, collectives; loops counted fully.

XLA's own `cost_analysis` counts the body of a while loop once. A scanned decoder is one loop, so here every computation
is counted as often as it runs, from the text of the optimised program: known trip counts, else the constant that the
loop's condition compares with. Bytes are those of the device's main memory: a TPU's compiler keeps many arrays in VMEM
and writes a memory space, `S(1)`, into their layouts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from blockrank.costs.hlo_text import Computation, Instruction, called, parse, trip_count

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota"}
FREE |= {"after-all", "partition-id", "replica-id", "add-dependency", "optimization-barrier"}
SLICES = {"dynamic-slice", "slice", "gather"}


@dataclass
class Costs:
    """Of one device and one run. `collectives`: how many of each kind, and the larger of their operands and results."""

    flops: float = 0.0
    bytes: float = 0.0
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, other: Costs, times: int = 1) -> None:
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        for mine, theirs in ((self.collectives, other.collectives), (self.collective_bytes, other.collective_bytes)):
            for kind, count in theirs.items():
                mine[kind] += times * count


class Program:
    """The optimised HLO of one device, as `compiled.as_text()` prints it."""

    def __init__(self, text: str) -> None:
        self.computations, self.entry = parse(text)
        self._known: dict[tuple[str, bool], Costs] = {}

    @cached_property
    def costs(self) -> Costs:
        """Of the whole program."""
        return self.costs_of(self.entry)

    def loops(self) -> Iterator[tuple[Instruction, int]]:
        """Every while loop with its trip count."""
        for computation in self.computations.values():
            for instruction in computation.values():
                if instruction.opcode == "while":
                    yield instruction, trip_count(self.computations, instruction)

    def costs_of(self, name: str, *, fused: bool = False) -> Costs:
        """Of one computation, with all that it calls. A fused one touches memory at its borders only."""
        if (name, fused) not in self._known:
            total = Costs()
            for instruction in self.computations[name].values():
                total.add(self._of(instruction, self.computations[name], fused))
            self._known[name, fused] = total
        return self._known[name, fused]

    def _of(self, op: Instruction, scope: Computation, fused: bool) -> Costs:
        own = Costs()
        if op.opcode == "while":
            count = trip_count(self.computations, op)
            own.add(self.costs_of(called(op, "body")), count)
            own.add(self.costs_of(called(op, "condition")), count)
        elif op.opcode == "conditional":
            branches = re.findall(r"%?([\w.\-]+)", op.attributes.split("branch_computations={")[-1].split("}")[0])
            branches = [b for b in branches if b in self.computations] or [
                called(op, "true_computation"),
                called(op, "false_computation"),
            ]
            own.add(max((self.costs_of(b) for b in branches), key=lambda c: (c.flops, c.bytes)))
        elif op.opcode == "fusion":
            inner = self.costs_of(called(op, "calls"), fused=True)
            own.add(_scattered(inner) if called(op, "calls").startswith("all-reduce-scatter") else inner)
            own.bytes = 0.0 if fused else self._fusion_bytes(op)
        elif op.opcode == "call":
            own.add(self.costs_of(called(op, "to_apply"), fused=fused))
        elif op.opcode == "async-start" or (op.opcode.endswith("-start") and op.attribute("calls")):
            own.add(self.costs_of(called(op, "calls")))
        else:
            own.flops = _flops(op, scope)
            own.bytes = 0.0 if fused else _moved(op, scope)
            kind = op.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                own.collectives[kind] = 1
                own.collective_bytes[kind] = int(max(sum(x.bytes for x in _operands(op, scope)), _result_bytes(op)))
        return own

    def _fusion_bytes(self, op: Instruction) -> float:
        """Operands and results of a fusion; of an operand only sliced, or updated in place, the part touched."""
        inner = self.computations[called(op, "calls")]
        read = sum(self._read(inner, p) for p in inner.values() if p.opcode == "parameter")
        return read + sum(_written(i, inner) for i in inner.values() if i.root)

    def _read(self, scope: Computation, parameter: Instruction) -> float:
        """How many bytes of its parameter a fused computation reads, fusions inside it included."""
        total, most = 0.0, parameter.moved
        for use, name in _through_views(parameter, scope) if most else ():
            first = use.operands[0] == name
            if use.opcode == "fusion":
                inner = self.computations[called(use, "calls")]
                numbers = [str(i) for i, operand in enumerate(use.operands) if operand == name]
                total += sum(
                    self._read(inner, p) for p in inner.values() if p.opcode == "parameter" and p.argument in numbers
                )
            elif use.opcode in SLICES and first:
                total += use.bytes
            elif not (use.opcode == "dynamic-update-slice" and first):
                total += most
        return min(total, most)


def _scattered(costs: Costs) -> Costs:
    """A TPU's reduce-scatter is written as an all-reduce fused with the slices that are kept."""
    kinds = [
        Counter({"reduce-scatter" if kind == "all-reduce" else kind: count for kind, count in counts.items()})
        for counts in (costs.collectives, costs.collective_bytes)
    ]
    return Costs(costs.flops, costs.bytes, *kinds)


def _through_views(op: Instruction, scope: Computation) -> list[tuple[Instruction, str]]:
    """The users of a value, looking through other views of it, each with the name it knows the value by.

    A view is a bitcast, or a fusion whose result lies where its operand does (a TPU's way to read int8 in other tiles).
    """
    found = []
    for use in scope.values():
        if op.name in use.operands:
            view = use.opcode == "bitcast" or "output_to_operand_aliasing" in use.attributes
            found += _through_views(use, scope) if view else [(use, op.name)]
    return found


def _written(root: Instruction, scope: Computation) -> float:
    if root.opcode == "dynamic-update-slice":
        return scope[root.operands[1]].bytes if root.moved else 0.0
    if root.opcode == "tuple":
        return sum(_written(scope[name], scope) for name in root.operands)
    if root.opcode == "bitcast" and root.operands[0] in scope:
        return _written(scope[root.operands[0]], scope)
    return root.moved


def _moved(op: Instruction, scope: Computation) -> float:
    """Bytes an unfused instruction reads and writes."""
    if op.opcode in FREE or op.opcode.endswith("-done"):
        return 0.0
    operands = _operands(op, scope)
    if op.opcode.removesuffix("-start") in SLICES and operands:
        part = op.shapes[len(operands) if op.opcode.endswith("-start") else 0]
        return part.moved + (part.bytes if operands[0].moved else 0.0)
    if op.opcode == "dynamic-update-slice":
        part = operands[1]
        return part.moved + (part.bytes if op.moved else 0.0)
    if op.opcode == "copy-start":
        return operands[0].moved + op.shapes[0].moved
    result = max((s.moved for s in op.shapes), default=0.0) if op.opcode.endswith("-start") else op.moved
    return sum(x.moved for x in operands) + result


def _operands(op: Instruction, scope: Computation) -> list[Instruction]:
    return [scope[name] for name in op.operands if name in scope]


def _result_bytes(op: Instruction) -> float:
    """Of an asynchronous start, whose result repeats its operands, the largest part."""
    return max((s.bytes for s in op.shapes), default=0.0) if op.opcode.endswith("-start") else op.bytes


def _flops(op: Instruction, scope: Computation) -> float:
    """Two per multiply-add of a matrix product or convolution; what a kernel says of itself; 0 for all else."""
    if op.opcode == "dot":
        left = scope[op.operands[0]].shapes[0].dimensions
        return 2.0 * math.prod(op.shapes[0].dimensions) * math.prod(left[i] for i in op.numbers("lhs_contracting_dims"))
    if op.opcode == "convolution":
        return 2.0 * _convolution_products(op, scope)
    if op.opcode == "custom-call":
        told = re.search(r'"flops":\s*"?(\d+)', op.attributes)
        return float(told.group(1)) if told else 0.0
    return 0.0


def _convolution_products(op: Instruction, scope: Computation) -> float:
    """Multiply-adds of a convolution, products with padding left out. TPUs write every matrix product as one."""
    labels = op.attribute("dim_labels")
    assert labels is not None
    inputs, kernel, output = re.split(r"_|->", labels)
    left, right = (scope[name].shapes[0].dimensions for name in op.operands[:2])
    result = op.shapes[0].dimensions
    window = re.search(r"window=\{([^}]*)\}", op.attributes)
    fields = dict(part.split("=") for part in window.group(1).split()) if window else {}
    products = 1.0
    for axis in sorted(c for c in inputs if c.isdigit()):
        i = int(axis)

        def setting(name: str, default: str, i: int = i) -> str:
            return fields[name].split("x")[i] if name in fields else default

        size, count = left[inputs.index(axis)], result[output.index(axis)]
        taps = int(setting("size", "1"))
        low = int(setting("pad", "0_0").split("_")[0])
        stride, spread = int(setting("stride", "1")), int(setting("rhs_dilate", "1"))
        dilation = int(setting("lhs_dilate", "1"))
        places = np.arange(count)[:, None] * stride - low + np.arange(taps)[None, :] * spread
        inside = (places % dilation == 0) & (places >= 0) & (places // dilation < size)
        products *= int(inside.sum())
    features = right[kernel.index("i")] * right[kernel.index("o")]
    groups = int(op.attribute("batch_group_count") or 1)
    return products * features * left[inputs.index("b")] / groups
