"""Errors a user can cause and can mend."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input, told in one sentence that names the file, line, id or config key and what to do about it.

    Entry points print it without a traceback and exit with status 2.
    """
