"""Which tokens can be signals; templates with other signals hold the same prompts."""

from __future__ import annotations

from functools import cache

import pytest

from blockrank.errors import UserError
from blockrank.models.gguf import embedded_model_path
from blockrank.prompts.encode import PromptEncoder, PromptLimits, PromptSegments
from blockrank.prompts.signals import SignalToken, present_signals, same_text, signal_tokens, with_signals
from blockrank.prompts.template import PromptTemplate, prompt_folder
from blockrank.prompts.tokenizer import Tokenizer, load_tokenizer
from blockrank.types import CandidateList, Document, Query

PACKAGED = sorted(path.stem for path in prompt_folder().glob("*.yaml") if "answer" in path.read_text())
LISTS = [
    CandidateList(Query("q", query), (Document("a", "a river"), Document("b", "the sea", "Sea")))
    for query in ("where does it end?", "x", "12 and 3")
]


@cache
def tokenizer() -> Tokenizer:
    try:
        return load_tokenizer(embedded_model_path())
    except UserError as error:
        pytest.skip(str(error))


def encoder(template: PromptTemplate | str, **limits: int) -> PromptEncoder:
    parsed = PromptTemplate.from_yaml(template) if isinstance(template, str) else template
    return PromptEncoder(parsed, tokenizer(), PromptLimits(**limits))


def ids(segments: PromptSegments) -> list[list[int]]:
    return [part.tolist() for part in (segments.prefix, *segments.documents, segments.suffix)]


@pytest.mark.parametrize("name", PACKAGED)
def test_prompts_in_which_all_tokens_are_signals_hold_the_same_ids(name: str) -> None:
    plain = encoder(name)
    template, tokens = signal_tokens(plain)
    every = encoder(template)
    assert same_text(template, plain.template)
    for candidates in LISTS:
        before, after = (e.encode(candidates, answer=[0]) for e in (plain, every))
        assert ids(before) == ids(after)
        assert set(before.signals) <= set(after.signals)
        assert len(after.signals) == len(tokens)
        assert list(after.signals) == sorted(set(after.signals))
        for place, token in zip(after.signals, tokens, strict=True):
            if not token.text.startswith("{"):
                assert tokenizer().decode([int(after.suffix[place])]) == token.text
        now = [tokens.index(token) for token in present_signals(plain, tokens)]
        assert [after.signals[i] for i in now] == list(before.signals)


@pytest.mark.parametrize("name", PACKAGED)
def test_each_token_can_be_the_one_signal(name: str) -> None:
    plain = encoder(name)
    every, tokens = signal_tokens(plain)
    places = encoder(every).encode(LISTS[0], answer=[0]).signals
    whole = plain.encode(LISTS[0], answer=[0])
    for place, token in [*list(zip(places, tokens, strict=True))[::5], (places[-1], tokens[-1])]:
        template = with_signals(plain.template, [token])
        assert PromptTemplate.from_config(template.to_config(), name=template.name) == template
        alone = encoder(template)
        answered, asked = alone.encode(LISTS[0], answer=[0]), alone.encode(LISTS[0])
        assert ids(answered) == ids(whole)
        assert answered.signals == asked.signals == (place,)
        assert asked.suffix.tolist() == whole.suffix[: len(asked.suffix)].tolist()
        assert present_signals(alone, tokens) == (token,)


def test_the_papers_signals_are_found_and_given_back() -> None:
    plain = encoder("paper")
    _, tokens = signal_tokens(plain)
    present = present_signals(plain, tokens)
    assert [token.text for token in present] == [":", " ['"]
    assert with_signals(plain.template, present) == plain.template
    query = next(token for token in tokens if token.text.startswith("{query}"))
    segments = encoder(with_signals(plain.template, [query, present[0]])).encode(LISTS[0])
    assert tokenizer().decode([int(segments.suffix[i]) for i in segments.signals]) == "?:"


def test_signals_by_their_places_in_a_piece() -> None:
    values = PromptTemplate.from_yaml("brief").to_config()
    values["suffix"][-1] = {"text": " is it:", "signal": [0, -1]}
    segments = encoder(PromptTemplate.from_config(values)).encode(LISTS[0])
    assert [tokenizer().decode([int(segments.suffix[i])]) for i in segments.signals[:2]] == [" is", ":"]
    for wrong in ([3], [0, -3], [-4]):
        values["suffix"][-1] = {"text": " is it:", "signal": wrong}
        with pytest.raises(
            UserError, match=r"' is it:' has 3 tokens, and signal=.* names one that is not there, or one"
        ):
            encoder(PromptTemplate.from_config(values))


def test_what_the_limits_leave_no_room_for_is_no_candidate() -> None:
    values = PromptTemplate.from_yaml("brief").to_config()
    values["answer"][0] = {"text": " [' and many words more than there is room for", "signal": []}
    plain = PromptTemplate.from_config(values)
    scaffold = len(encoder(plain).encode(LISTS[1]).suffix)
    _, free = signal_tokens(encoder(plain))
    _, limited = signal_tokens(encoder(plain, suffix_tokens=scaffold + 2))
    assert {t.section for t in free} == {"suffix", "answer"}
    assert {t.section for t in limited} == {"suffix"}


def test_other_words_are_another_text() -> None:
    brief, paper = PromptTemplate.from_yaml("brief"), PromptTemplate.from_yaml("paper")
    assert not same_text(brief, paper)
    assert same_text(brief, with_signals(brief, [SignalToken("answer", 0, -1, "['")]))
    with pytest.raises(UserError, match="no signal token was chosen"):
        with_signals(brief, [])
