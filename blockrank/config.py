"""Configuration: where the YAML files are, how an entry point starts, and the strict step from YAML to dataclasses.

A command composes YAML with Hydra, then `build` turns the result into dataclasses. A key no field reads, a field
without a value, or a value of another type is an error that names the key; so no key of any YAML file can go unread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from etils import epath
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from blockrank.errors import FieldError, UserError
from blockrank.paths import as_path, local_path

T = TypeVar("T")
_ABSENT = object()


def config_dir() -> Path:
    """The folder of YAML files: `blockrank/configs` of an installed wheel, `configs/` of a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "model").is_dir():
            return folder
    raise UserError(f"no configs folder beside {package}: the installation is incomplete, reinstall blockrank")


def compose(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The config `configs/<config_name>.yaml` with Hydra `overrides`, without starting a command; one may run."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    check_overrides(overrides)
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
            return hydra.compose(config_name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_composition_problem(error)) from error
    finally:
        GlobalHydra.instance().hydra = running


def choice(group: str, name: str, hint: Any, key: str) -> Any:
    """`configs/<group>/<name>.yaml` as `hint`, a dataclass or a union of them. `key` is for errors.

    Raises `UserError` naming the choices there are, and like `build`.
    """
    known = sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))
    if name not in known:
        raise UserError(f"config key {key}: {name!r} is no choice; {group} is one of {', '.join(known)}")
    plain = OmegaConf.to_container(compose(f"{group}/{name}"), resolve=True)
    assert isinstance(plain, dict)
    return _convert(hint, plain[group], key)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises `UserError` for an override Hydra cannot parse, showing how to quote it (`=`, `#`, commas, spaces)."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for override in overrides:
        try:
            parser.parse_override(override)
        except HydraException as error:
            key, equals, value = override.partition("=")
            if not equals:
                raise UserError(f"cannot parse {override!r}: write an override as key=value") from error
            escaped = value.strip("'\"").replace("\\", "\\\\").replace("'", "\\'")
            raise UserError(
                f"cannot parse the override {override!r}: its value needs quotes, in a shell: \"{key}='{escaped}'\""
            ) from error


def entry(config_name: str, schema: type[T]) -> Callable[[Callable[[T], int | None]], Callable[[], None]]:
    """Makes a command of a function that takes the typed config: `@entry("train", TrainConfig)`.

    The function may return an exit status. A `UserError` is printed as one line and exits with status 2, as do
    overrides and configs that do not compose. Paths stay relative to the folder the command was started in, also where
    `hydra.job.chdir=true`.
    """

    def decorate(run: Callable[[T], int | None]) -> Callable[[], None]:
        @functools.wraps(run)
        def main() -> None:
            sys.exit(_start(config_name, schema, run, sys.argv[1:]))

        return main

    return decorate


def _start(config_name: str, schema: type[T], run: Callable[[T], int | None], arguments: Sequence[str]) -> int:
    import hydra
    from hydra.errors import HydraException

    status: list[int] = []
    start = Path.cwd()

    def task(cfg: DictConfig) -> None:
        os.chdir(start)
        try:
            status.append(run(build(schema, cfg)) or 0)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            status.append(2)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                status.append(1)
                raise
            print(f"error: {error.strerror}: {error.filename or 'make room and run it again'}", file=sys.stderr)
            status.append(2)
        except BaseException:
            status.append(1)
            raise

    try:
        check_overrides([a for a in arguments if "=" in a and not a.startswith("-")])
        with _hydra_raises():
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(task)()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (HydraException, OmegaConfBaseException) as error:
        if status:
            raise
        print(f"error: {_composition_problem(error)}", file=sys.stderr)
        return 2
    except SystemExit as stop:
        if stop.code == 1 and not status:
            return 2
        raise
    return max(status, default=0)


@contextlib.contextmanager
def _hydra_raises() -> Iterator[None]:
    """Has Hydra raise what goes wrong while it composes, where it would print many lines and exit."""
    name = "HYDRA_FULL_ERROR"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def build(cls: type[T], cfg: DictConfig | Mapping[str, Any], key: str = "") -> T:
    """The dataclass `cls` filled from `cfg`, strictly. `key` is the path of `cfg`, for errors.

    Fields may be scalars, `Path` (made absolute from the current folder), `AnyPath` (remote too), `Literal`, tuples,
    lists, dicts with str keys, other dataclasses, or unions; of several dataclasses the one whose `kind: Literal[...]`
    is the mapping's.

    Raises `UserError` naming the key: unknown, missing, of a wrong type, or refused by `__post_init__`.
    """
    if isinstance(cfg, DictConfig):
        try:
            plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise UserError(f"config: {_one_line(error)}") from error
        assert isinstance(plain, dict)
        cfg = typing.cast("dict[str, Any]", plain)
    return _dataclass(cls, cfg, key)


def to_plain(value: Any) -> Any:
    """A dataclass (nested) as JSON-ready dicts, lists and scalars; `build` reads it back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return str(value) if isinstance(value, PurePath) else value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Where two JSON-able mappings differ, leaf by leaf: `ranker.row_length: 192 -> 256; seed: 0 -> 1`."""
    leaves = _differing(old, new, "")
    return "; ".join(f"{key}: {_excerpt(one, other)} -> {_excerpt(other, one)}" for key, one, other in leaves)


def _differing(old: Any, new: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """(key, old, new) of each leaf that differs, values as JSON."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted(old.keys() | new.keys()):
            yield from _differing(old.get(name, _ABSENT), new.get(name, _ABSENT), _join(key, name))
    elif old is _ABSENT or new is _ABSENT or old != new:
        yield key, _shown(old), _shown(new)


def _shown(value: Any) -> str:
    return "(absent)" if value is _ABSENT else json.dumps(value, default=str)


def _excerpt(text: str, other: str, limit: int = 80) -> str:
    """`text`, or of a long one what begins shortly before it departs from `other`."""
    if len(text) <= limit:
        return text
    common = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(0, common - limit // 4)
    return ("..." if start else "") + text[start : start + limit] + ("..." if start + limit < len(text) else "")


def _dataclass(cls: type[T], value: Any, key: str) -> T:
    if not isinstance(value, Mapping):
        raise UserError(f"config key {key or '(root)'}: expected keys of {cls.__name__}, got {value!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    unknown = [str(name) for name in value if name not in fields]
    if unknown:
        where = ", ".join(_join(key, name) for name in unknown)
        raise UserError(f"unknown config key {where}; known here: {', '.join(fields)}")
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _convert(hints[name], value[name], _join(key, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"missing config key {_join(key, name)}")
    try:
        return cls(**arguments)
    except FieldError as error:
        raise UserError(f"config key {_join(key, error.field)}: {error.problem}") from error
    except UserError as error:
        if not key or f"{key}." in str(error):
            raise
        raise UserError(f"config key {key}: {error}") from error
    except ValueError as error:
        raise UserError(f"config key {key or '(root)'}: {error}") from error


def _convert(hint: Any, value: Any, key: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _union(args, value, key)
    if origin is Literal:
        if any(value == option and type(value) is type(option) for option in args):
            return value
        raise UserError(f"config key {key}: {value!r} is none of {', '.join(map(str, args))}")
    if dataclasses.is_dataclass(hint):
        return _dataclass(typing.cast("type[Any]", hint), value, key)
    if origin in (list, tuple, Sequence):
        return _sequence(hint, origin, args, value, key)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise UserError(f"config key {key}: expected a mapping, got {value!r}")
        return {str(k): _convert(args[1], v, _join(key, str(k))) for k, v in value.items()}
    return _scalar(hint, value, key)


def _union(options: tuple[Any, ...], value: Any, key: str) -> Any:
    if value is None and type(None) in options:
        return None
    options = tuple(o for o in options if o is not type(None))
    if len(options) == 1:
        return _convert(options[0], value, key)
    classes = [o for o in options if dataclasses.is_dataclass(o)]
    if classes and isinstance(value, Mapping):
        kinds = {kind: c for c in classes for kind in get_args(typing.get_type_hints(c).get("kind"))}
        if not kinds and len(classes) == 1:
            return _convert(classes[0], value, key)
        kind = value.get("kind")
        if not isinstance(kind, str) or kind not in kinds:
            raise UserError(f"config key {_join(key, 'kind')}: {kind!r} is none of {', '.join(kinds)}")
        return _convert(kinds[kind], value, key)
    problems = []
    for option in options:
        try:
            return _convert(option, value, key)
        except UserError as error:
            problems.append(str(error))
    raise UserError(problems[-1])


def _sequence(hint: Any, origin: Any, args: tuple[Any, ...], value: Any, key: str) -> Any:
    if not isinstance(value, list | tuple):
        raise UserError(f"config key {key}: expected a list, got {value!r}")
    if origin is not tuple or (len(args) == 2 and args[1] is Ellipsis):
        items = [_convert(args[0], v, f"{key}[{i}]") for i, v in enumerate(value)]
        return items if origin is list else tuple(items)
    if len(args) != len(value):
        raise UserError(f"config key {key}: expected {len(args)} values ({hint}), got {len(value)}")
    return tuple(_convert(a, v, f"{key}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))


def _scalar(hint: Any, value: Any, key: str) -> Any:
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (bool, str) and isinstance(value, hint):
        return value
    if hint in (Path, epath.Path) and isinstance(value, str | PurePath):
        if not str(value):
            raise UserError(f"config key {key}: an empty path")
        try:
            return local_path(str(value)) if hint is Path else as_path(str(value))
        except UserError as error:
            raise UserError(f"config key {key}: {error}") from error
    name, quoted = getattr(hint, "__name__", str(hint)), ""
    if hint is str and isinstance(value, int | float):
        quoted = f"; if it is a name or id, quote it, in a shell as \"'{value}'\""
    raise UserError(f"config key {key}: expected {name}, got {value!r} ({type(value).__name__}){quoted}")


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _composition_problem(error: Exception) -> str:
    """What Hydra could not compose, in a line; with the choices there are for a group."""
    file, options = getattr(error, "missing_cfg_file", None), getattr(error, "options", None)
    if isinstance(file, str) and options:
        group, _, name = file.rpartition("/")
        return f"{group}={name}: no such choice; {group} is one of {', '.join(sorted(options))}"
    return _one_line(error)


def _one_line(error: Exception) -> str:
    """The first informative line of an error, with its cause's when Hydra wraps another."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = str(error.__cause__).splitlines()[0].strip() if error.__cause__ and str(error.__cause__) else ""
    text = " ".join(lines[:2])
    return f"{text}: {cause}" if cause and cause not in text else text
