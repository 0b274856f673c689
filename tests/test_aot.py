"""Programs compiled for TPUs that are not there, and what is read from them; on a tiny model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from blockrank.aot import AotConfig, plan
from blockrank.chips import CHIPS, chip_of
from blockrank.config import build, compose
from blockrank.costs.programs import PromptLengths, block_flops, training_program
from blockrank.costs.report import ProgramCosts, table
from blockrank.costs.topology import Topology
from blockrank.errors import UserError
from blockrank.models.config import DecoderConfig
from blockrank.parallel import MeshConfig

TINY = ["model=tiny", "ranker.row_length=256", "prompt_lengths.prefix=32", "prompt_lengths.suffix=16"]


def config(*overrides: str) -> AotConfig:
    return build(AotConfig, compose("aot", [*TINY, *overrides]))


def test_ranking_compiles_for_a_slice(tmp_path: Path) -> None:
    pytest.importorskip("libtpu", reason="needs the extra `tpu`")
    report = tmp_path / "report.json"
    console = Console(record=True, width=400)
    wanted = config("topology=v6e:2x2", "mesh.doc=4", "depths=[40]", f"report={report}")
    plan(wanted, console)
    (row,) = json.loads(report.read_text())["rows"]
    assert row["error"] is None
    assert row["blocks"] == 2
    assert 1 <= row["flops"] / row["ideal_flops"] < 2
    assert row["collectives"]["all-reduce"] >= row["blocks"]
    assert 0 < row["total_bytes"] < CHIPS["v6e"].memory
    assert row["roofline_seconds"] > 0
    assert "rank N=40" in console.export_text()


def test_ideal_flops_count_weights_and_visible_pairs() -> None:
    sizes = DecoderConfig("llama", 64, 8, 12, 4, 2, 2, (None,))
    weights = 8 * (8 + 8 + 4 + 4) + 3 * 8 * 12
    assert block_flops(sizes, 10, 0) == 2 * weights * 10
    assert block_flops(sizes, 0, 7) == 4 * 8 * 7


def test_prompts_have_the_lengths_asked_for() -> None:
    lengths = PromptLengths(prefix=50, document=75, longest=160, suffix=40)
    for documents in (50, 100, 2000):
        segments = lengths.draw(documents)
        sizes = [len(d) for d in segments.documents]
        assert len(sizes) == documents
        assert max(sizes) <= 160
        assert sum(sizes) / documents == pytest.approx(75, rel=0.02)
    assert (len(segments.prefix), len(segments.suffix), segments.signals) == (50, 40, (38, 39))


def test_totals_and_the_roofline() -> None:
    chip = CHIPS["v6e"]
    row = ProgramCosts("rank N=1", "1 x 2", 3, 4, 1e12, 2e12, 1.0, 100, 20, 10, 30, 5, 9.18e12, 1.64e9)
    assert row.total_bytes == 145
    assert row.seconds(chip) == pytest.approx(0.01)
    sent = replace(row, collectives={"all-reduce": 2}, collective_bytes={"all-reduce": int(chip.link_rate)})
    assert sent.seconds(chip) == pytest.approx(1.01)
    bound_by_memory = replace(row, flops=0.0)
    assert bound_by_memory.seconds(chip) == pytest.approx(0.001)
    text = table([row, replace(row, error="RESOURCE_EXHAUSTED: too large")], chip)
    widths = {line.count("|") for line in text.splitlines()}
    assert len(widths) == 1
    assert "does not fit: RESOURCE_EXHAUSTED" in text


def test_chips_by_kind() -> None:
    assert chip_of("TPU v5 lite") is CHIPS["v5e"]
    assert chip_of("TPU v5p") is CHIPS["v5p"]
    assert chip_of("TPU v6 lite") is CHIPS["v6e"]
    assert chip_of("cpu") is None
    assert all(math.isfinite(chip.flops * chip.memory_rate) for chip in CHIPS.values())


def test_what_cannot_be_planned_is_told() -> None:
    with pytest.raises(UserError, match="chip 'v9' is unknown: choose one of v5e"):
        Topology.of("v9:2x2")
    wanted, mesh = config("trainer.batch_size=3", "trainer.accumulation=1"), _WideMesh(MeshConfig().make())
    with pytest.raises(UserError, match=r"trainer.batch_size / trainer.accumulation"):
        training_program(wanted, mesh)


class _WideMesh:
    """A mesh with two devices along `fsdp`, to be refused before anything is placed on it."""

    def __init__(self, mesh) -> None:
        self.shape = {**mesh.shape, "fsdp": 2}
