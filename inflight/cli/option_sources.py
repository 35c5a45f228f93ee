"""Options from flags, `INFLIGHT_*` environment variables and a config file, in this order of precedence."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from inflight.cli.vllm_arguments import SIMILAR, UNSET, parse_list
from inflight.cli.vllm_environment import SERVICE_LINK, translate_environment
from inflight.errors import ConfigError, shown
from inflight.option import Option, read_yaml
from inflight.vllm_rules import CompatRules, as_text, join_reasons

PREFIX = "INFLIGHT_"
OTHER_VARIABLES = ("CONFIG", "CACHE", "NATIVE", "BENCH_API_KEY")  # our variables that are not options

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}
_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    tuple: "a list of strings",
    dict: "a mapping",
}


def gather(
    options: Mapping[str, Option],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: str | None = None,
    compat_rules: CompatRules | None = None,
) -> dict[str, Any]:
    """Return the values of options from all sources, by name.

    `flags` has only flags that were used. The file may be named by INFLIGHT_CONFIG, and may use vLLM's option names.
    """
    file = file or environment.get(f"{PREFIX}CONFIG")
    from_vllm: dict[str, Any] = {}
    for arguments, _ in translate_environment(environment) if compat_rules is not None else ():
        from_vllm |= from_arguments(options, arguments)
    compat_rules = compat_rules or CompatRules()
    from_file = read_file(options, Path(file), compat_rules) if file else {}
    return {**from_file, **from_vllm, **read_environment(options, environment, compat_rules), **flags}


# ---- flags ----


def argument(option: Option) -> Any:
    """Return a positional argument for an option."""
    return typer.Argument(help=option.help, show_default=option.default_text)


def with_flags(
    options: Iterable[Option], panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each option; it gets the used ones as keyword arguments.

    `panel` overrides the help panel of the options.
    """
    known = {option.name: option for option in options}
    flags = {option.name: _flag(option, panel or option.panel) for option in known.values()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        command_parameters = [
            item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD
        ]
        parameters = [*command_parameters, *flags.values()]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            flag_values = {name: values.pop(name) for name in flags}
            used = {
                name: _parse(known[name].flag, value, dict)
                if known[name].value_type is dict
                else known[name].chosen(value)
                for name, value in flag_values.items()
                if value is not None and value != []
            }
            command(**values, **{n: tuple(v) if isinstance(v, list) else v for n, v in used.items()})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        return run

    return decorate


def _flag(option: Option, panel: str) -> inspect.Parameter:
    """Return a flag's parameter. Its default is None, so that variables and the file can set the option."""
    names = f"{option.flag}/--no-{option.flag[2:]}" if option.value_type is bool else option.flag
    flags = (names, option.short) if option.short else (names,)
    shown = typer.Option(
        *flags, help=option.help, rich_help_panel=panel, show_default=option.default_text or False
    )
    parsed: dict[type, Any] = {tuple: list[str], dict: str}
    annotation = parsed.get(option.value_type, option.value_type)
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[annotation | None, shown],
    )


def from_arguments(options: Mapping[str, Option], arguments: list[str]) -> dict[str, Any]:
    """Return the option that a flag and its value set."""
    if not arguments:
        return {}
    flag, *values = arguments
    name = flag.removeprefix("--").replace("-", "_")
    if not values:
        return {name.removeprefix("no_"): not name.startswith("no_")}
    value_type = options[name].value_type
    return {
        name: tuple(values)
        if value_type is tuple
        else options[name].chosen(_parse(flag, values[0], value_type))
    }


# ---- variables ----


def read_environment(
    options: Mapping[str, Option], environment: Mapping[str, str], compat_rules: CompatRules
) -> dict[str, Any]:
    """Return the options set by environment variables. Unknown variables with our prefix are ignored."""
    values = {}
    for name, option in options.items():
        variable = f"{PREFIX}{name.upper()}"
        text = environment.get(variable)
        rule = compat_rules.find(name)
        if text is not None and rule is not None:
            _, text = rule.arguments(option.flag, text) or ("", UNSET)
        if text is not None and (text != UNSET or option.value_type is tuple):
            values[name] = option.chosen(_parse(variable, text, option.value_type))
    return values


def unused_variables(options: Mapping[str, Option], environment: Mapping[str, str]) -> list[str]:
    """Return warnings about variables that look like options but have no effect."""
    known = {f"{PREFIX}{name.upper()}": option for name, option in options.items()}
    names = [*known, *(f"{PREFIX}{name}" for name in OTHER_VARIABLES)]
    warnings = [warning for _, warning in translate_environment(environment) if warning]
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        if name not in names and not SERVICE_LINK.fullmatch(name):
            similar = get_close_matches(name, names, n=1, cutoff=SIMILAR)
            hint = f": did you mean {similar[0]}?" if similar else ""
            warnings.append(f"{name} is set, but has no effect{hint}")
        elif name in known and known[name].value_type is tuple and not environment[name].strip(" ,"):
            warnings.append(f"{name} is empty and has no effect")
    return warnings


def _parse(name: str, text: str, value_type: type) -> Any:
    """Parse the value of a variable, or a mapping given as JSON."""
    if value_type is dict:
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if isinstance(value, dict | None):
            return value
        raise ConfigError(f"{name} is {shown(text)}: it must be a JSON object")
    if value_type is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(f"{name} is {text!r}: it must be true or false")
    if value_type is tuple:
        return tuple(parse_list(text) or (item.strip() for item in text.split(",") if item.strip()))
    if value_type in (int, float):
        try:
            return value_type(text)
        except ValueError:
            raise ConfigError(f"{name} is {text!r}: it must be {_NAMES[value_type]}") from None
    return text


# ---- files ----


def read_file(options: Mapping[str, Option], path: Path, compat_rules: CompatRules) -> dict[str, Any]:
    """Return the options in a YAML (or JSON) file, whose keys are named like the flags."""
    content = read_yaml(path, "the configuration file")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}: it must map options to values")
    values: dict[str, Any] = {}
    reasons: list[str] = []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        rule = compat_rules.find(flag := f"--{name.replace('_', '-')}")
        if rule is not None and (name not in options or isinstance(value, str | int)):
            try:
                values |= from_arguments(options, rule.arguments(flag, as_text(value)))
            except ConfigError as error:
                reasons.append(str(error))
        elif name not in options:
            reasons.append(f"{path}: unknown option {key!r}: allowed are {', '.join(options)}")
        else:
            values[name] = _typed(f"{key} in {path}", value, options[name])
    if reasons:
        raise ConfigError(join_reasons(reasons))
    return values


def _typed(name: str, value: Any, option: Option) -> Any:
    """Return a value from a file if it has the option's type, or raise ConfigError."""
    value_type = option.value_type
    value = option.chosen(value)
    if value is None and option.optional:
        return None
    if value_type is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return tuple(items)
    elif value_type is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, value_type) and (value_type is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{name} is {value!r}: it must be {_NAMES.get(value_type, 'a string')}")
