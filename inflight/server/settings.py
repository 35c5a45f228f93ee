"""Options from four places: flags before `INFLIGHT_*` variables before a file before the defaults."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from inflight.errors import ConfigError
from inflight.server.options import FIELDS, ServeOptions

PREFIX = "INFLIGHT_"
TYPES: dict[str, Any] = get_type_hints(ServeOptions)

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


def resolve(
    flags: Mapping[str, Any], environment: Mapping[str, str], config_file: str | None = None
) -> ServeOptions:
    """The options, checked. `flags` holds only what was given."""
    file = config_file or environment.get(f"{PREFIX}CONFIG")
    values = {**(read_config(Path(file)) if file else {}), **_from_environment(environment), **flags}
    options = ServeOptions(**values)
    _check(options)
    return options


def read_config(path: Path) -> dict[str, Any]:
    """Options from a YAML file (JSON is YAML too), by the names of the flags."""
    found = read_yaml(path, "the configuration file")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}: it must map options to values")
    values = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in FIELDS:
            raise ConfigError(f"{path}: unknown option {key!r}: allowed are {', '.join(FIELDS)}")
        values[name] = _typed(f"{key} in {path}", value, TYPES[name])
    return values


def read_yaml(path: Path, what: str) -> Any:
    import yaml  # only those who have such a file need it

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        where = f" (line {place.line + 1})" if place is not None else ""
        raise ConfigError(f"{what} {str(path)!r} is not YAML{where}") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Variables of our options. Others of our prefix may be meant for someone else."""
    values = {}
    for name in FIELDS:
        text = environment.get(f"{PREFIX}{name.upper()}")
        if text is not None:
            values[name] = _parse(f"{PREFIX}{name.upper()}", text, TYPES[name])
    return values


def _parse(name: str, text: str, kind: Any) -> Any:
    """The value that a variable spells."""
    base = _base(kind)
    if base is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(f"{name} is {text!r}: it must be true or false")
    if base is tuple:
        return tuple(item.strip() for item in text.split(",") if item.strip())
    if base in (int, float):
        try:
            return base(text)
        except ValueError:
            raise ConfigError(f"{name} is {text!r}: it must be {_article(base)}") from None
    return text


def _typed(name: str, value: Any, kind: Any) -> Any:
    """A value out of a file, if it is of the option's type."""
    base = _base(kind)
    if value is None and base is not kind:
        return None
    if base is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return tuple(items)
    elif base is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, base) and (base is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{name} is {value!r}: it must be {_article(base)}")


def _base(kind: Any) -> Any:
    """int of `int | None`, tuple of `tuple[str, ...]`."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(item for item in get_args(kind) if item is not type(None))
    return get_origin(kind) or kind


def _article(kind: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", tuple: "a list of strings"}
    return names.get(kind, "a string")


_AT_LEAST = {
    "max_queue": 1,
    "max_body_size": 1024,
    "max_header_size": 1024,
    "max_prompt_tokens": 1,
    "max_answers": 1,
    "max_output_tokens": 1,
    "max_logprobs": 0,
    "max_stop_strings": 0,
    "max_stop_length": 1,
    "max_connections": 1,
    "request_history": 0,
    "max_restarts": 0,
    "shutdown_timeout": 0,
}
_CHOICES = {
    "metrics_compat": ("none", "vllm"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
    "ssl_cert_reqs": (0, 1, 2),
}


def _check(options: ServeOptions) -> None:
    """What can be wrong before anything is loaded."""
    for name, low in _AT_LEAST.items():
        value = getattr(options, name)
        if value is not None and not low <= value < math.inf:
            raise ConfigError(f"{name} is {value!r}: it must be at least {low}")
    for name in ("read_timeout", "first_token_timeout", "request_timeout"):
        if not 0 < getattr(options, name) < math.inf:
            raise ConfigError(
                f"{name} is {getattr(options, name)!r}: it must be a positive number of seconds"
            )
    for name, allowed in _CHOICES.items():
        if getattr(options, name) not in allowed:
            shown = ", ".join(map(str, allowed))
            raise ConfigError(f"{name} is {getattr(options, name)!r}: allowed are {shown}")
    if not 0 <= options.port < 65536:
        raise ConfigError(f"port is {options.port}: it must be from 0 to 65535")
    if (options.ssl_keyfile is None) != (options.ssl_certfile is None):
        raise ConfigError("ssl_keyfile and ssl_certfile go together: one of them is missing")
    _check_tls(options)
    if "*" in options.allowed_origins and options.allow_credentials:
        raise ConfigError("allowed_origins has '*': with allow_credentials each origin must be named")
    if not all(key.strip() for key in options.api_key):
        raise ConfigError("an api_key is empty")


def _check_tls(options: ServeOptions) -> None:
    """Whether the files can be read and belong together."""
    files = [file for file in (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs) if file]
    if not files:
        return
    import ssl  # takes a while, which most do not need

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if options.ssl_certfile is not None:
            # A key with a password is nothing that a server could ask for.
            context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=lambda: "")
        if options.ssl_ca_certs is not None:
            context.load_verify_locations(options.ssl_ca_certs)
    except OSError as error:  # ssl's own too
        why = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else str(error)
        raise ConfigError(f"the files for TLS ({', '.join(files)}) cannot be used: {why}") from error
