"""Long documents made to fit: which tokens of title and text stay, or how they are dealt to several segments."""

from __future__ import annotations

from collections.abc import Sequence

from blockrank.prompts.template import Piece


def truncate(runs: dict[int, list[int]], slots: Sequence[Piece], budget: int) -> dict[int, list[int]]:
    """The first tokens of title and text: the title has half of the budget, or more where the text needs less."""
    text = sum(len(run) for index, run in runs.items() if slots[index].text == "text")
    title = min(sum(map(len, runs.values())) - text, max(budget // 2, budget - text))
    room = {"title": title, "text": budget - title}
    kept = {}
    for index, run in runs.items():
        kind = slots[index].text
        kept[index] = run[: room[kind]]
        room[kind] -= len(kept[index])
    return kept


def split(runs: dict[int, list[int]], slots: Sequence[Piece], budget: int) -> list[dict[int, list[int]]]:
    """Cut the text into parts; the title goes before each where it leaves half the budget, else before the first."""
    title = next((index for index, piece in enumerate(slots) if piece.text == "title"), None)
    repeated = runs[title] if title is not None and 2 * len(runs[title]) <= budget else []
    stream = [(index, token) for index, run in runs.items() for token in run if not (repeated and index == title)]
    parts = []
    for start in range(0, len(stream), budget - len(repeated)):
        part: dict[int, list[int]] = {index: list(repeated) if repeated and index == title else [] for index in runs}
        for index, token in stream[start : start + budget - len(repeated)]:
            part[index].append(token)
        parts.append(part)
    return parts
