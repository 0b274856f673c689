"""Accelerator chips by their makers' published figures."""

from __future__ import annotations

from dataclasses import dataclass

from blockrank.errors import UserError


@dataclass(frozen=True)
class Chip:
    """`flops` of dense bfloat16 products per second, `memory` in bytes, bytes per second to memory and between chips.

    `kind` is how JAX's `device_kind` begins.
    """

    kind: str
    flops: float
    memory: float
    memory_rate: float
    link_rate: float


CHIPS = {
    "v5e": Chip("TPU v5 lite", 197e12, 16e9, 819e9, 200e9),
    "v5p": Chip("TPU v5", 459e12, 95e9, 2765e9, 600e9),
    "v6e": Chip("TPU v6 lite", 918e12, 32e9, 1640e9, 448e9),
    "h100": Chip("NVIDIA H100", 989e12, 80e9, 3350e9, 450e9),
    "h200": Chip("NVIDIA H200", 989e12, 141e9, 4800e9, 450e9),
}
"""TPUs: cloud.google.com/tpu/docs, all links of a chip together; GPUs: NVIDIA's data sheets, NVLink one way."""


def chip_named(name: str) -> Chip:
    if name not in CHIPS:
        raise UserError(f"chip {name!r} is unknown: choose one of {', '.join(CHIPS)}")
    return CHIPS[name]


def chip_of(device_kind: str) -> Chip | None:
    """The chip JAX calls so, if it is one of these; the longest name that fits counts."""
    found = [chip for chip in CHIPS.values() if device_kind.startswith(chip.kind)]
    return max(found, key=lambda chip: len(chip.kind), default=None)
