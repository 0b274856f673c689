"""Errors a user can cause and can mend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


class UserError(ValueError):
    """Bad input, told in one sentence that names the file, line, id or config key and what to do about it.

    Entry points print it without a traceback and exit with status 2.
    """


class FieldError(UserError):
    """A value that a settings dataclass refuses. `field` lets a configuration name the whole key."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}={problem}")
        self.field, self.problem = field, problem


def at_least(settings: Any, least: float, *fields: str) -> None:
    """Raises `FieldError` for a field of `settings` that is a number below `least`, NaN or infinite. None passes."""
    _check(settings, fields, f"must be at least {least}", lambda value: value >= least)


def above(settings: Any, bound: float, *fields: str) -> None:
    """Raises `FieldError` for a field of `settings` that is a number up to `bound`, NaN or infinite. None passes."""
    _check(settings, fields, f"must be above {bound}", lambda value: value > bound)


def between(settings: Any, least: float, most: float, *fields: str) -> None:
    """Raises `FieldError` for a field of `settings` that is a number outside [least, most]. None passes."""
    _check(settings, fields, f"must be between {least} and {most}", lambda value: least <= value <= most)


def not_empty(settings: Any, *fields: str) -> None:
    """Raises `FieldError` for a field of `settings` that is an empty sequence. None passes."""
    for field in fields:
        value = getattr(settings, field)
        if value is not None and not len(value):
            raise FieldError(field, "[] is empty: name at least one")


def _check(settings: Any, fields: tuple[str, ...], rule: str, holds: Callable[[float], bool]) -> None:
    for field in fields:
        value = getattr(settings, field)
        if value is not None and not (math.isfinite(value) and holds(value)):
            raise FieldError(field, f"{value!r} {rule}")
