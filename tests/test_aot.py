"""Programs compiled for TPUs that are not there, and what is read from them; on a tiny model."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from blockrank.aot import AotConfig, plan
from blockrank.chips import CHIPS, chip_of
from blockrank.config import build, compose
from blockrank.costs.encoding import encoder_flops, encoding_programs, summary
from blockrank.costs.flops import block_weights
from blockrank.costs.programs import PromptLengths, block_flops, training_program
from blockrank.costs.report import ProgramCosts, growth, measure, table
from blockrank.costs.topology import Topology
from blockrank.errors import UserError
from blockrank.models.config import DecoderConfig
from blockrank.models.hf_encoder import parse_config
from blockrank.parallel import MeshConfig

TINY = ["model=tiny", "ranker.row_length=256", "prompt_lengths.prefix=32", "prompt_lengths.suffix=16"]


def config(*overrides: str) -> AotConfig:
    return build(AotConfig, compose("aot", [*TINY, *overrides]))


def test_ranking_compiles_for_a_slice(tmp_path: Path) -> None:
    pytest.importorskip("libtpu", reason="needs the extra `tpu`")
    report = tmp_path / "report.json"
    console = Console(record=True, width=400)
    sizes = ["model.config.hidden_size=256", "model.config.intermediate_size=1024", "model.config.head_dim=16"]
    plan(config("topology=v6e:2x2", "mesh.doc=4", "depths=[40]", f"report={report}", *sizes), console)
    (row,) = json.loads(report.read_text())["rows"]
    assert row["error"] is None
    assert row["blocks"] == 2
    assert 1 <= row["flops"] / row["ideal_flops"] < 1.2
    assert row["collectives"]["all-reduce"] >= row["blocks"]
    assert 0 < row["total_bytes"] < CHIPS["v6e"].memory
    assert row["roofline_seconds"] > 0
    assert "rank N=40" in console.export_text()
    text = (tmp_path / "report.0.hlo.txt").read_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3, "prefix, rows and suffix by kernels"


def test_a_training_step_gathers_a_layer_in_bfloat16_and_scatters_its_gradients() -> None:
    """Weights are sent forward and backward, two bytes each; a looked-up embedding in float32; nothing else of size."""
    pytest.importorskip("libtpu", reason="needs the extra `tpu`")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512}
    few = ["lists.num_candidates=4", "limits.document_tokens=64", "limits.prefix_tokens=32", "limits.suffix_tokens=32"]
    wanted = config(
        *("topology=v6e:2x2", "mesh.fsdp=4", "trainer.batch_size=8", "loss.remat=full", "model.dtype=bfloat16"),
        *(f"model.config.{key}={value}" for key, value in sizes.items()),
        *("model.config.tie_word_embeddings=false", *few),
    )
    costs = measure(training_program(wanted, wanted.mesh.make(Topology.of(wanted.topology).devices)))
    blocks = 4 * block_weights(wanted.model.decoder_config())
    embedded = 256 * 512
    assert costs.collectives is not None
    assert costs.collective_bytes is not None
    assert set(costs.collectives) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert costs.collective_bytes["all-gather"] == pytest.approx(2 * 2 * blocks + (2 + 4) * embedded, rel=0.05)
    assert costs.collective_bytes["reduce-scatter"] == pytest.approx(2 * blocks + 4 * embedded, rel=0.15)
    assert costs.collective_bytes["all-reduce"] < 4.5 * embedded  # and norms and factored moments


def ideal(*overrides: str) -> float:
    wanted = config("topology=v6e:1x1", "trainer.batch_size=8", "lists.num_candidates=4", *overrides)
    return training_program(wanted, MeshConfig().make(jax.devices()[:1])).ideal_flops


def test_a_training_step_needs_no_more_than_it_trains() -> None:
    """By hand: a forward pass over lists of 160 + 4 x 160 + 160 tokens, and what of the backward pass is asked for."""
    sizes = config().model.decoder_config()
    heads, kv_heads = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    tokens, documents, signals, labels = 8 * 960, 8 * 640, 8 * 2, 8 * 8
    pairs = 8 * (6 * 160 * 161 // 2 + 160 * 640 + 160 * 800)
    block = 2 * block_weights(sizes) * tokens
    key, query = 2 * sizes.hidden_size * kv_heads * documents, 2 * sizes.hidden_size * heads * signals
    score = 2 * heads * 2 * documents
    whole = 3 * (4 * (block + 4 * heads * pairs) + key + query + score)
    head = 3 * 2 * sizes.hidden_size * sizes.vocab_size * labels
    assert ideal() == whole + head
    cut = 3 * (2 * (block + 4 * heads * pairs) + key + query + score)
    assert ideal("loss.ntp_weight=0") == cut

    dense = pairs + 8 * (640 * 641 // 2 - 4 * 160 * 161 // 2)
    assert ideal("ranker.visibility=dense") == whole + head + 3 * 4 * 4 * heads * (dense - pairs)

    qkv, out, mlp = 32 * (32 + 2 * 16), 32 * 32, 3 * 32 * 64
    assert qkv + out + mlp == block_weights(sizes)
    frozen = 2 * tokens * (qkv + 2 * (out + mlp) + 2 * (qkv + out + mlp))  # nothing before the first block's qkv learns
    to_qkv, to_out = 2 * (3 * 32 + 32 + 2 * 16), 2 * (32 + 32)
    adapters = 2 * tokens * (2 * to_qkv + 3 * to_out + 3 * (to_qkv + to_out))
    expected = frozen + adapters + 3 * 2 * 4 * heads * pairs + 2 * (key + query) + 3 * score
    assert ideal("loss.ntp_weight=0", "optimizer.lora={rank: 2, alpha: 4}") == expected


def test_encoding_compiles_for_a_slice_and_extrapolates() -> None:
    pytest.importorskip("libtpu", reason="needs the extra `tpu`")
    console = Console(record=True, width=400)
    sizes = [f"corpus.config.{key}={value}" for key, value in (("dim", 32), ("hidden_dim", 64), ("n_heads", 2))]
    few = ["corpus.longest=24", "corpus.tokens=16", "corpus.shard_size=500", "corpus.batch_tokens=4096"]
    plan(config("topology=v6e:2x2", "programs=[encode]", *sizes, *few, "corpus.config.n_layers=1"), console)
    text = console.export_text()
    assert "encode 168 x 24" in text
    (rate,) = re.findall(r"([\d,]+) passages/s of 16 tokens on average on 4 chips; 8,841,823 passages", text)
    assert int(rate.replace(",", "")) > 0


def test_batches_of_a_corpus_hold_every_passage() -> None:
    """FLOPs of real tokens add up to those of all passages, and no batch has fewer in its padded shape."""
    corpus = config("corpus.shard_size=3000").corpus
    batches = encoding_programs(corpus, jax.devices())
    sizes = parse_config(corpus.config)
    needed = sum(each.count * each.planned.ideal_flops for each in batches)
    assert needed == pytest.approx(encoder_flops(sizes, corpus.lengths()))
    assert all(each.planned.ideal_flops <= each.planned.layout_flops for each in batches)
    weights = 768 * (4 * 768 + 2 * 3072)
    assert encoder_flops(sizes, np.array([10, 20])) == 6 * (2 * weights * 30 + 4 * 768 * (100 + 400))
    row = replace(ROW, flops=0.0, bytes=1.64e9)
    text = summary(corpus, [row] * len(batches), batches, CHIPS["v6e"])
    count = sum(each.count for each in batches)
    assert f"{3000 / count * 1000:,.0f} passages/s" in text


ROW = ProgramCosts("rank N=1", "1 x 2", 3, 4, 1e12, 2e12, 1.0)


def test_growth_leaves_out_what_does_not_grow() -> None:
    rows = [replace(ROW, documents=n, flops=5e9 + n * 1e9, fixed_flops=5e9) for n in (50, 100, 150, 400)]
    assert growth(rows).splitlines()[2:] == ["| 50 to 100 | 1.909 | 2.000 |"]
    assert growth(rows[2:]) == ""
    assert growth([replace(row, error="RESOURCE_EXHAUSTED") for row in rows]) == ""


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
    held = {"argument_bytes": 100, "output_bytes": 20, "alias_bytes": 10, "temporary_bytes": 30, "code_bytes": 5}
    row = replace(ROW, **held, flops=9.18e12, bytes=1.64e9)
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


@pytest.mark.parametrize(("name", "devices"), [("v6e:1x1", 1), ("v6e:1x2", 2), ("v6e:2x4", 8), ("v5p:2x2x2", 8)])
def test_slices_of_any_size(name: str, devices: int) -> None:
    pytest.importorskip("libtpu", reason="needs the extra `tpu`")
    assert len(Topology.of(name).devices) == devices


@pytest.mark.parametrize("name", ["v6e", "v6e:two", "v6e:3x3"])
def test_slices_that_do_not_exist_are_refused(name: str) -> None:
    pytest.importorskip("libtpu", reason="needs the extra `tpu`")
    with pytest.raises(UserError, match=f"topology='{name}'"):
        Topology.of(name)


def test_what_cannot_be_planned_is_told() -> None:
    with pytest.raises(UserError, match="chip 'v9' is unknown: choose one of v5e"):
        Topology.of("v9:2x2")
    wanted, mesh = config("trainer.batch_size=3", "trainer.accumulation=1"), _WideMesh(MeshConfig().make())
    with pytest.raises(UserError, match=r"trainer.batch_size=3 in trainer.accumulation=1 micro-batches"):
        training_program(wanted, mesh)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("programs=[]", r"programs: \[\] is empty"),
        ("depths=[]", r"depths: \[\] is empty"),
        ("depths=[10,0]", r"depths: \[10, 0\] must be at least 1"),
        ("prompt_lengths.prefix=0", r"prompt_lengths\.prefix: 0 must be at least 1"),
        ("prompt_lengths.suffix=1", r"prompt_lengths\.suffix: 1 must be at least 2"),
        ("prompt_lengths.document=200", r"prompt_lengths\.longest: 160 must be at least 200"),
        ("corpus.tokens=300", r"corpus\.longest: 256 must be at least 300"),
    ],
)
def test_settings_that_make_no_sense_are_told(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(override)


def test_passages_longer_than_the_encoder_reads_are_refused() -> None:
    with pytest.raises(UserError, match=r"corpus\.longest=600: the encoder has 512 positions"):
        encoding_programs(config("corpus.longest=600").corpus, jax.devices())


class _WideMesh:
    """A mesh with two devices along `fsdp`, to be refused before anything is placed on it."""

    def __init__(self, mesh) -> None:
        self.shape = {**mesh.shape, "fsdp": 2}
