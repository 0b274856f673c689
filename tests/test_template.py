"""Prompt templates: what the YAML may say, what it may not, and that it survives a checkpoint folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from blockrank.errors import UserError
from blockrank.prompts.template import Piece, PromptTemplate, prompt_folder

LISTWISE = ("rank_zephyr", "rank_vicuna", "first", "instruct")
PACKAGED = sorted(path.stem for path in prompt_folder().glob("*.yaml"))


def small(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "prefix": [{"special": "<bos>"}, "Query: {query}"],
        "document": ["\nID: {number} | {title} {text}"],
        "suffix": ["\nAnswer", {"text": ":", "signal": True}],
        "answer": [" ", {"text": "{number}", "separator": ", "}, {"special": "<eos>"}],
    }
    return {**values, **changes}


def test_packaged_templates_are_the_named_ones() -> None:
    assert {"paper", "paper_query_free", "release", *LISTWISE} <= set(PACKAGED)


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_templates_are_read(name: str) -> None:
    template = PromptTemplate.from_yaml(name)
    assert template.name == name
    assert sum(piece.signal for piece in template.suffix + template.answer) == (1 if name in LISTWISE else 2)


def test_presets_differ_as_documented() -> None:
    paper, release = PromptTemplate.from_yaml("paper"), PromptTemplate.from_yaml("release")
    assert (paper.numbering, paper.first_number, paper.chat) == ("content", 1, False)
    assert (release.numbering, release.first_number, release.chat) == ("position", 0, True)
    query_free = PromptTemplate.from_yaml("paper_query_free")
    assert "query" not in [piece.text for piece in query_free.prefix if piece.kind == "slot"]
    assert query_free.document == paper.document
    assert query_free.suffix == paper.suffix


def test_pieces_are_cut_at_slots_and_white_space_goes_with_the_slot() -> None:
    template = PromptTemplate.from_config(small())
    assert template.document == (
        Piece("literal", "\nID:"),
        Piece("slot", "number", " "),
        Piece("literal", " |"),
        Piece("slot", "title", " "),
        Piece("slot", "text", " "),
    )
    assert template.suffix == (Piece("literal", "\nAnswer"), Piece("literal", ":", signal=True))
    assert template.answer[1] == Piece("slot", "number", separator=", ")


def test_signals_may_be_any_tokens_of_a_piece(tmp_path: Path) -> None:
    suffix = [{"text": "\nAnswer now", "signal": [-2, 0]}, {"text": " {query}", "signal": True}, "?"]
    template = PromptTemplate.from_config(
        small(suffix=[*suffix, {"text": ":", "signal": []}, {"text": "x", "signal": [-1]}])
    )
    assert template.suffix == (
        Piece("literal", "\nAnswer now", signal=(-2, 0)),
        Piece("slot", "query", " ", signal=True),
        Piece("literal", "?"),
        Piece("literal", ":", signal=()),
        Piece("literal", "x", signal=True),
    )
    assert PromptTemplate.from_yaml(template.save(tmp_path)) == template


def test_doubled_braces_are_literal() -> None:
    template = PromptTemplate.from_config(small(document=["{{x}} {number} {text}"]))
    assert template.document[0] == Piece("literal", "{x}")


@pytest.mark.parametrize("name", PACKAGED)
def test_a_saved_template_comes_back_equal(name: str, tmp_path: Path) -> None:
    template = PromptTemplate.from_yaml(name)
    again = PromptTemplate.from_yaml(template.save(tmp_path))
    assert again == template
    assert again.fingerprint == template.fingerprint


def test_letters_run_out_after_z() -> None:
    template = PromptTemplate.from_config(small(identifiers="letter", first_number=3))
    assert [template.identifier(number) for number in (3, 4, 28)] == ["A", "B", "Z"]
    with pytest.raises(UserError, match="letters A to Z, which are too few for 27"):
        template.identifier(29)


def test_fingerprint_follows_content_not_name_or_layout() -> None:
    template = PromptTemplate.from_config(small(), name="a")
    split = PromptTemplate.from_config(small(document=["\nID", ": {number}", " | {title}", " {text}"]), name="b")
    assert template.fingerprint == split.fingerprint
    changes: list[dict[str, Any]] = [{"first_number": 0}, {"numbering": "position"}]
    changes += [{"identifiers": "letter"}, {"system": "Rank."}]
    for change in changes:
        assert replace(template, **change).fingerprint != template.fingerprint
    assert len(template.fingerprint) == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"document": ["{number} {body}"]}, r"document\[0\]: unknown slot \{body\}"),
        ({"document": ["{number} {text!r}"]}, r"document\[0\]: unknown slot"),
        ({"document": ["{number} {text"]}, r"document\[0\]: .*brace"),
        ({"document": ["{number}"]}, r"document has no \{text\}"),
        ({"document": ["{text}"]}, r"document has no \{number\}"),
        ({"answer": ["yes"]}, r"answer has no \{number\}"),
        ({"answer": ["{number} {number}"]}, "more than one"),
        ({"prefix": ["Query: {query}"]}, "special: <bos>"),
        ({"prefix": [{"special": "<bos>"}, {"special": "<bos>"}, "{query}"]}, "special: <bos>"),
        ({"prefix": [{"special": "<bos>"}, "no query"]}, r"neither prefix nor suffix has \{query\}"),
        ({"prefix": [{"special": "<eos>"}, "{query}"]}, r"prefix\[0\]: special '<eos>' cannot stand in prefix"),
        ({"suffix": ["Answer:"]}, "signal: true"),
        ({"suffix": [{"text": "{query}?", "signal": True}]}, r"suffix\[0\]: a signal piece is literal"),
        (
            {"suffix": [{"text": "{query}", "signal": [-2]}]},
            r"suffix\[0\]: \{query\} is a signal by its last token only",
        ),
        ({"suffix": [{"text": ":", "signal": [-1, -1]}]}, r"suffix\[0\]: signal=\[-1, -1\] is not"),
        ({"suffix": [{"text": ":", "signal": [True]}]}, r"suffix\[0\]: signal=\[True\] is not"),
        ({"suffix": [{"text": ":", "signal": []}]}, "no piece of suffix or answer has `signal: true`"),
        ({"answer": [{"text": "{number}", "signal": True}]}, "answer has a signal after"),
        ({"suffix": [{"text": ":", "signal": "yes"}]}, r"suffix\[0\]: signal='yes'"),
        ({"suffix": [{"text": ":", "sgnal": True}]}, r"suffix\[0\]: unknown key 'sgnal'"),
        ({"suffix": [7]}, r"suffix\[0\]: a piece is"),
        ({"suffix": [""]}, r"suffix\[0\]: text must be"),
        ({"suffix": None}, "suffix is missing"),
        ({"suffix": "Answer:"}, "suffix is missing or not a list"),
        ({"document": [{"text": "{number} {text}", "separator": ","}]}, r"document\[0\]: separator"),
        ({"document": [{"text": "ID:", "signal": True}, "{number} {text}"]}, "document has a signal"),
        ({"answer": ["{number}", {"text": "]", "signal": True}]}, "signal after"),
        ({"numbering": "random"}, "numbering='random' is not one of"),
        ({"first_number": "1"}, "first_number='1'"),
        ({"first_number": True}, "first_number=True"),
        ({"chat": 1}, "chat=1"),
        ({"chat": True}, "special: <turn>"),
        ({"identifiers": "roman"}, "identifiers='roman' is not one of"),
        ({"system": 3}, "system=3 is not a text"),
        ({"document": [{"text": " T:", "with": "query"}, "{number} {text}"]}, r"document\[0\]: `with: title`"),
        ({"document": [{"text": "{title}", "with": "title"}, "{number} {text}"]}, r"document\[0\]: `with: title`"),
        ({"suffix": [{"text": "T", "with": "title"}, {"text": ":", "signal": True}]}, r"suffix\[0\]: `with: title`"),
    ],
)
def test_a_wrong_template_is_one_clear_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(small(**changes)), "utf-8")
    with pytest.raises(UserError, match=message) as caught:
        PromptTemplate.from_yaml(path)
    assert str(path) in str(caught.value)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"papr.yaml: no such prompt template; the package has .*'paper'"):
        PromptTemplate.from_yaml("papr")
    broken = tmp_path / "broken.yaml"
    broken.write_text("prefix: [", "utf-8")
    with pytest.raises(UserError, match=r"broken.yaml: not YAML"):
        PromptTemplate.from_yaml(broken)
    broken.write_text("- a list", "utf-8")
    with pytest.raises(UserError, match="a template is a mapping"):
        PromptTemplate.from_yaml(broken)
