"""Special tokens, added tokens and chat templates from the files next to a checkpoint's tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inflight.errors import ConfigError, ModelError
from inflight.model_files import read_object, read_text

# The names of special tokens in templates and configurations.
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_TEMPLATE_FOLDER = "additional_chat_templates"

ChatTemplateSource = str | dict[str, str]  # one template, or several by name


def read_special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens. tokenizer_config.json overrides the older special_tokens_map.json."""
    named = {**(read_object(folder, "special_tokens_map.json") or {}), **config}
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = named.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def read_added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the tokens that tokenizer_config.json or added_tokens.json declares, by id in ascending order."""
    declared: dict[int, dict[str, Any]] = {}
    try:
        for text, token_id in (read_object(folder, "added_tokens.json") or {}).items():
            declared[int(token_id)] = {"content": text}
        for token_id, token in (config.get("added_tokens_decoder") or {}).items():
            if isinstance(token, dict) and isinstance(token.get("content"), str):
                declared[int(token_id)] = token
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"the added tokens of {folder} are not a mapping between ids and tokens: {error}"
        ) from error
    return dict(sorted(declared.items()))


def read_template_option(option: str) -> str:
    """Return the template of the `chat_template` option, which is its text or the path of a file."""
    if "{{" in option or "{%" in option:
        return option
    try:
        return Path(option).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"chat_template is {option!r:.200}: it must be a template or the path of a template file ({why})"
        ) from error


def read_chat_template(folder: Path, config: dict[str, Any]) -> ChatTemplateSource | None:
    """Return the checkpoint's template or templates. Separate files override tokenizer_config.json."""
    templates: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    for entry in inline if isinstance(inline, list) else ():
        if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
            raise ModelError(
                f"chat_template in tokenizer_config.json has the entry {entry!r:.100}: it must have name and template"
            )
        templates[str(entry["name"])] = str(entry["template"])
    older = (read_object(folder, "chat_template.json") or {}).get("chat_template")
    if isinstance(older, str):
        templates["default"] = older
    names = ["chat_template.jinja"]
    names += sorted(f"{_TEMPLATE_FOLDER}/{path.name}" for path in (folder / _TEMPLATE_FOLDER).glob("*.jinja"))
    for name in names:
        source = read_text(folder, name)
        if source is not None:
            templates["default" if name == "chat_template.jinja" else Path(name).stem] = source
    if not templates:
        return None
    return templates["default"] if list(templates) == ["default"] else templates
