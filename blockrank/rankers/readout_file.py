"""A readout that was found for a model, as a YAML file: its score layer, and its template with the signals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from blockrank.config import build, to_plain
from blockrank.errors import UserError
from blockrank.prompts.signals import same_text
from blockrank.prompts.template import PromptTemplate


@dataclass(frozen=True)
class FoundReadout:
    """`prompt`: a template as `PromptTemplate.to_config` writes it. `found`: on what and how well, for people."""

    score_layer: int
    prompt: dict[str, Any]
    found: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(path: str | Path) -> FoundReadout:
        """Raises `UserError` that names the file for one that is missing or no readout."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"readout={path}: no such file; `python -m blockrank.analyze` writes readout.yaml")
        try:
            values = yaml.safe_load(path.read_text("utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
        if not isinstance(values, Mapping):
            raise UserError(f"{path}: a readout is a mapping with the keys score_layer and prompt")
        found = build(FoundReadout, values, str(path))
        PromptTemplate.from_config(found.prompt, f"{path}: prompt")
        return found

    def to_yaml(self) -> str:
        return yaml.safe_dump(to_plain(self), allow_unicode=True, sort_keys=False, width=2**16)

    @property
    def template(self) -> PromptTemplate:
        return PromptTemplate.from_config(self.prompt, "readout")

    @property
    def signals(self) -> list[Any]:
        """The pieces that hold signals, as the template's YAML has them."""
        pieces = (*self.template.suffix, *self.template.answer)
        return [piece.to_config() for piece in pieces if piece.signal]

    def of(self, template: PromptTemplate) -> PromptTemplate:
        """`template` with this readout's signals.

        Raises `UserError` for a template of other words: signals found in one prompt say nothing of another.
        """
        if not same_text(self.template, template):
            raise UserError(
                f"the readout was found for a prompt of other words than {template.name!r}: give the prompt it was "
                "found for, or find a readout for this one"
            )
        return self.template
