"""The tokenizer's own chat template, cut into the literal text around the user's and the assistant's words."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from blockrank.errors import UserError
from blockrank.prompts.tokenizer import Tokenizer

_USER, _ASSISTANT = "BLOCKRANKUSERWORDS", "BLOCKRANKASSISTANTWORDS"
SYSTEM_END = "\n\n"
"""What separates a system's words from the user's where no turn of their own does."""


@dataclass(frozen=True)
class ChatFrame:
    """Text before the user's words, between them and the assistant's, and after the assistant's."""

    head: str
    turn: str
    tail: str


def chat_frame(tokenizer: Tokenizer, system: str = "") -> ChatFrame:
    """Render the chat template once around stand-in words; real words never pass through it.

    `system`: the words of the system's turn, which begin the user's where the chat template knows no such turn.
    Raises UserError when the tokenizer has no chat template, or one that does not show both words once, in order.
    """
    if not tokenizer.chat_template:
        raise UserError("chat=true, but the tokenizer has no chat template; set chat=false")
    if system:
        try:
            frame = _render(tokenizer.chat_template, tokenizer, [{"role": "system", "content": system}])
        except UserError:
            frame = None
        if frame is not None and system in frame.head:
            return frame
    frame = _render(tokenizer.chat_template, tokenizer, [])
    return replace(frame, head=frame.head + system + SYSTEM_END) if system else frame


def _render(template: str, tokenizer: Tokenizer, before: list[dict[str, str]]) -> ChatFrame:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda pattern: datetime.now().strftime(pattern))
    messages = [*before, {"role": "user", "content": _USER}, {"role": "assistant", "content": _ASSISTANT}]
    names: dict[str, Any] = {
        "bos_token": tokenizer.token(tokenizer.bos_id) or "",
        "eos_token": tokenizer.token(tokenizer.eos_id) or "",
    }
    try:
        text = environment.from_string(template).render(messages=messages, add_generation_prompt=False, **names)
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"the tokenizer's chat template does not render: {error}") from error
    if text.count(_USER) != 1 or text.count(_ASSISTANT) != 1 or text.index(_USER) > text.index(_ASSISTANT):
        raise UserError("the tokenizer's chat template does not show each speaker's words once; set chat=false")
    head, rest = text.split(_USER)
    turn, tail = rest.split(_ASSISTANT)
    return ChatFrame(head, turn, tail)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
