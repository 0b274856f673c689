"""Long titles and texts share a document's budget: neither pushes the other out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_encode import LONG, encoder, listed, texts, tokenizer

from blockrank.prompts.encode import PromptEncoder, PromptLimits
from blockrank.prompts.template import PromptTemplate

BUDGET = 20


def contents(title: str, text: str, budget: int = BUDGET) -> tuple[str, bool]:
    """What stands between the scaffold when title and text may have `budget` tokens, and the flag."""
    coder = encoder(document_tokens=None)
    plain = coder.encode(listed("x")).documents[0]
    scaffold = len(plain) - len(tokenizer("smollm2").encode(" x"))
    segments = encoder(document_tokens=scaffold + budget).encode(listed((title, text)))
    match = re.fullmatch(r"\nID: 1 \| CONTENT:(.*) \| END ID: 1", texts(segments)[0], re.DOTALL)
    assert match is not None
    assert len(segments.documents[0]) <= scaffold + budget
    return match.group(1), segments.truncated[0]


def count(text: str) -> int:
    return len(tokenizer("smollm2").encode(f" {text}"))


def words(number: int) -> str:
    """A text of so many one-token words."""
    text = " ".join(["the"] * number)
    assert not number or count(text) == number
    return text


def test_a_long_title_leaves_the_text_half_of_the_budget() -> None:
    content, cut = contents(words(500), "a " * 500)
    assert cut
    assert content == f" {words(10)}" + " a" * 10


def test_a_title_takes_what_a_short_text_leaves() -> None:
    content, cut = contents(words(500), "a a a")
    assert cut
    assert content == f" {words(17)} a a a"


def test_a_short_title_stays_whole_and_the_text_has_the_rest() -> None:
    content, cut = contents(words(4), "a " * 500)
    assert cut
    assert content == f" {words(4)}" + " a" * 16


def test_a_title_alone_has_the_whole_budget() -> None:
    assert contents(words(500), "") == (f" {words(20)}", True)
    assert contents(words(500), "\u200b") == (f" {words(20)}", True)


def test_what_fits_is_not_cut() -> None:
    assert contents(words(18), "a a") == (f" {words(18)} a a", False)


def test_the_last_token_of_room_is_the_texts() -> None:
    assert contents(words(5), "a a a", budget=1) == (" a", True)


def test_a_template_with_the_text_first_keeps_the_title() -> None:
    pieces = ["{number}", {"text": ":"}, "{text}", " /", " {title}"]
    template = replace(
        PromptTemplate.from_yaml("paper"),
        document=PromptTemplate.from_config(
            {**PromptTemplate.from_yaml("paper").to_config(), "document": pieces}
        ).document,
    )
    segments = PromptEncoder(template, tokenizer("smollm2"), PromptLimits(document_tokens=23)).encode(
        listed((words(3), LONG))
    )
    assert segments.truncated == (True,)
    assert texts(segments)[0].endswith("/ the the the")
    assert "word0 word1" in texts(segments)[0]


@settings(max_examples=30, deadline=None)
@given(title=st.integers(0, 40), text=st.integers(1, 40), budget=st.integers(1, 30))
def test_the_text_is_never_lost_and_nothing_is_cut_without_need(title: int, text: int, budget: int) -> None:
    content, cut = contents(words(title), ("a " * text).strip(), budget)
    kept_title, kept_text = content.count(" the"), content.count(" a")
    assert cut == (title + text > budget)
    assert kept_title + kept_text == min(title + text, budget)
    assert kept_text >= min(text, budget - budget // 2)
    assert kept_title >= min(title, budget // 2)


@pytest.mark.parametrize("template", ["paper", "release", "brief", "paper_query_free"])
def test_every_template_keeps_some_text(template: str) -> None:
    segments = encoder(template, document_tokens=64).encode(listed((LONG, "the end of it")))
    assert "the end of it" in texts(segments)[0]
