"""The embedded collection: docstrings of the installed Python, NumPy and JAX; real text that needs no download.

A document is the body of a docstring, cut short; the query is its first sentence. To find the body that goes
with "Return the arc tangent" among its neighbours takes reading; shared words alone (BM25) find it in a third of cases.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import logging
import pkgutil
import platform
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from blockrank.data.collection import check_split
from blockrank.data.documents import Documents, InMemoryDocuments
from blockrank.data.files import atomic_write, cache_dir, cache_lock, digest, hash64, read_jsonl
from blockrank.types import Document, Qrels, Query

log = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")

_HELD_OUT_PERCENT = {"test": 10, "validation": 10}
_MAX_ANSWERS = 3
_MIN_SUMMARY_WORDS, _MAX_SUMMARY_WORDS, _MIN_BODY_WORDS = 4, 30, 10
_PACKAGES = ("numpy", "jax")
_LIBRARY_MODULES = (
    *("numpy", "numpy.char", "numpy.fft", "numpy.lib", "numpy.linalg", "numpy.ma", "numpy.polynomial"),
    *("numpy.polynomial.chebyshev", "numpy.polynomial.hermite", "numpy.polynomial.legendre"),
    *("numpy.polynomial.polynomial", "numpy.random", "numpy.testing"),
    *("jax", "jax.ad_checkpoint", "jax.debug", "jax.dtypes", "jax.image", "jax.lax", "jax.nn", "jax.nn.initializers"),
    *("jax.numpy", "jax.numpy.fft", "jax.numpy.linalg", "jax.ops", "jax.profiler", "jax.random", "jax.scipy"),
    *("jax.scipy.linalg", "jax.scipy.special", "jax.scipy.stats", "jax.sharding", "jax.tree", "jax.tree_util"),
)
_UNSAFE_TO_IMPORT = frozenset(
    {"antigravity", "this", "idlelib", "test", "tkinter", "turtle", "turtledemo", "lib2to3", "pip", "ensurepip"}
    | {"distutils", "curses", "readline", "rlcompleter", "sitecustomize", "usercustomize"}
)
_POINTERS = re.compile(r"(Refer to [\w.]+ for( full)? documentation|(JAX|LAX-backend) implementation of [\w.]+)\.?")


class Entry(NamedTuple):
    """A documented object: its qualified name, the first sentence of its docstring, and the rest, as plain prose."""

    name: str
    summary: str
    body: str


class PydocsCollection:
    """Splits `train`, `validation` and `test` (80, 10, 10 percent, by a hash of the query's text).

    Documents with one and the same summary are all positives of its query; summaries of more than three are too general
    and give none. A document's id is the object's qualified name; `titles` makes it the title too, as a page of
    documentation has it. `max_words` cuts documents.
    """

    name = "pydocs"
    ignore_self = False
    splits = SPLITS

    def __init__(self, max_words: int = 60, *, titles: bool = False) -> None:
        self._max_words, self._titles = max_words, titles

    @property
    def documents(self) -> Documents:
        return self._documents

    def queries(self, split: str) -> dict[str, Query]:
        check_split(split, self.splits, self.name)
        return {query.id: query for query, _ in self._judged[split]}

    def qrels(self, split: str) -> Qrels:
        check_split(split, self.splits, self.name)
        return {query.id: dict.fromkeys(answers, 1) for query, answers in self._judged[split]}

    @cached_property
    def _entries(self) -> list[Entry]:
        """Entries cut to size, those whose cut text repeats another's left out."""
        seen: set[str] = set()
        kept = []
        for entry in load_entries():
            body = " ".join(entry.body.split()[: self._max_words])
            key = body.casefold()
            if key not in seen:
                seen.add(key)
                kept.append(entry._replace(body=body))
        return kept

    @cached_property
    def _documents(self) -> Documents:
        return InMemoryDocuments(
            Document(entry.name, entry.body, entry.name if self._titles else "") for entry in self._entries
        )

    @cached_property
    def _judged(self) -> dict[str, list[tuple[Query, list[str]]]]:
        answers: dict[str, list[str]] = defaultdict(list)
        texts: dict[str, str] = {}
        for entry in self._entries:
            key = entry.summary.casefold()
            answers[key].append(entry.name)
            texts.setdefault(key, entry.summary)
        judged: dict[str, list[tuple[Query, list[str]]]] = {split: [] for split in SPLITS}
        for key, names in answers.items():
            if len(names) <= _MAX_ANSWERS:
                judged[_split_of(key)].append((Query(f"what-is-{names[0]}", texts[key]), names))
        return judged


def load_entries() -> list[Entry]:
    """All entries, sorted by name: from the cache, or gathered (some seconds) and put there.

    The cache is per version of Python, NumPy, JAX and of this file, since these decide the text.
    """
    versions = [f"python-{platform.python_version()}", *(f"{name}-{metadata.version(name)}" for name in _PACKAGES)]
    source = Path(__file__).read_text(encoding="utf-8")
    path = cache_dir() / "pydocs" / f"{'_'.join(versions)}_{sys.platform}_{digest(source)}.jsonl"
    with cache_lock(str(path)):
        if not path.exists():
            _write_entries(path, gather())
    return [Entry(fields["name"], fields["summary"], fields["body"]) for _, fields in read_jsonl(path)]


def gather() -> list[Entry]:
    """Entries from the docstrings of public classes, functions and methods, sorted by name; equal bodies once."""
    found: dict[str, Entry] = {}
    with _quiet():
        for name in [*_standard_modules(), *_LIBRARY_MODULES]:
            module = _import(name)
            if module is not None:
                for qualified, text in _docstrings(module):
                    entry = parse_docstring(qualified, text)
                    if entry is not None:
                        found.setdefault(qualified, entry)
    bodies: set[str] = set()
    entries = []
    for name in sorted(found):
        body = found[name].body.casefold()
        if body not in bodies:
            bodies.add(body)
            entries.append(found[name])
    return entries


def parse_docstring(name: str, text: str) -> Entry | None:
    """Summary and body of a docstring as running text; None when they make no query or no document.

    Left out: a signature in front, section titles and their rules, examples (`>>>`), directives, reST roles, and
    phrases that only name another function ("Refer to numpy.sum for full documentation").
    """
    paragraphs = [p for p in re.split(r"\n[ \t]*\n", inspect.cleandoc(text)) if p.strip()]
    if paragraphs and re.match(r"[\w.]+\(.*\)( ->.*)?$", paragraphs[0].strip(), flags=re.DOTALL):
        paragraphs = paragraphs[1:]
    if not paragraphs:
        return None
    summary, *rest = re.split(r"(?<=[.!?])\s+", _prose(paragraphs[0]), maxsplit=1)
    body = " ".join(filter(None, [*rest, *map(_prose, paragraphs[1:])]))
    body = " ".join(_POINTERS.sub("", body).split())
    if not _MIN_SUMMARY_WORDS <= len(summary.split()) <= _MAX_SUMMARY_WORDS or len(body.split()) < _MIN_BODY_WORDS:
        return None
    return Entry(name, summary, body)


def _prose(paragraph: str) -> str:
    lines = [line.strip() for line in paragraph.splitlines()]
    if any(line.startswith((">>>", ".. ")) for line in lines):
        return ""
    rules = {i for i, line in enumerate(lines) if re.fullmatch(r"[-=~*^]{3,}", line)}
    kept = [line for i, line in enumerate(lines) if i not in rules and i + 1 not in rules]
    text = re.sub(r":[\w:]+:`~?([^`<]+?)(?:\s*<[^>]*>)?`", r"\1", " ".join(kept))
    return " ".join(text.replace("`", "").split())


def _standard_modules() -> Iterator[str]:
    """Public modules of the standard library, one level of packages down, sorted."""
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in _UNSAFE_TO_IMPORT:
            continue
        yield name
        for info in sorted(pkgutil.iter_modules(getattr(_import(name), "__path__", [])), key=lambda info: info.name):
            if not info.name.startswith("_") and info.name not in _UNSAFE_TO_IMPORT:
                yield f"{name}.{info.name}"


def _import(name: str) -> ModuleType | None:
    """The module, or None where this platform does not have it or its import fails."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        log.debug("pydocs: %s cannot be imported: %r", name, error)
        return None


def _docstrings(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(qualified name, docstring) of what the module itself makes public, and of the public methods of its classes."""
    package = module.__name__.partition(".")[0]
    in_library = package in _PACKAGES
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        home = getattr(value, "__module__", None) or module.__name__
        own = home == module.__name__ or (in_library and home.partition(".")[0] == package)
        if not own or not callable(value):
            continue
        qualified = f"{module.__name__}.{name}"
        if isinstance(doc := _doc(value), str):
            yield qualified, doc
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for member, attribute in sorted(vars(value).items()):
                if not member.startswith("_") and isinstance(doc := _doc(attribute), str):
                    yield f"{qualified}.{member}", doc


def _doc(value: Any) -> Any:
    """The value's own docstring; data (its class's docstring) has none."""
    if isinstance(value, property | staticmethod | classmethod) or callable(value):
        try:
            doc = value.__doc__
        except Exception:
            return None
        return None if not inspect.isclass(value) and doc == type(value).__doc__ else doc
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides what modules print and warn while they are imported."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def _split_of(key: str) -> str:
    bucket = hash64(key) % 100
    for split, percent in _HELD_OUT_PERCENT.items():
        if bucket < percent:
            return split
        bucket -= percent
    return "train"


def _write_entries(path: Path, entries: list[Entry]) -> None:
    with atomic_write(path) as file:
        for entry in entries:
            file.write(json.dumps(entry._asdict(), ensure_ascii=True).encode() + b"\n")
