"""What a checkpoint's folder says about text, besides tokenizer.json itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inflight.errors import ConfigError, ModelError
from inflight.model_files import read_object, read_text

# The names under which templates and configurations know special tokens.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

MORE_TEMPLATES = "additional_chat_templates"  # a folder

ChatTemplateSource = str | dict[str, str]  # one template, or several by name


def special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens; tokenizer_config.json wins over the older special_tokens_map.json."""
    named = {**(read_object(folder, "special_tokens_map.json") or {}), **config}
    found = {}
    for name in SPECIAL_NAMES:
        value = named.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Tokens that tokenizer_config.json or added_tokens.json declare, by id, in the order of their ids."""
    declared: dict[int, dict[str, Any]] = {}
    try:
        for text, token_id in (read_object(folder, "added_tokens.json") or {}).items():
            declared[int(token_id)] = {"content": text}
        for token_id, token in (config.get("added_tokens_decoder") or {}).items():
            if isinstance(token, dict) and isinstance(token.get("content"), str):
                declared[int(token_id)] = token
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"the added tokens of {folder} are not a mapping of ids and tokens: {error}"
        ) from error
    return dict(sorted(declared.items()))


def given_template(given: str) -> str:
    """A template that whoever started the engine gave: its text, or the file that it is in."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"chat_template is {given!r:.200}: it must be a template, or a file with one ({why})"
        ) from error


def chat_template(folder: Path, config: dict[str, Any]) -> ChatTemplateSource | None:
    """The checkpoint's template or templates: files of their own win over tokenizer_config.json."""
    templates: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    for entry in inline if isinstance(inline, list) else ():
        if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
            raise ModelError(
                f"chat_template in tokenizer_config.json lists {entry!r:.100}: it needs name and template"
            )
        templates[str(entry["name"])] = str(entry["template"])
    older = (read_object(folder, "chat_template.json") or {}).get("chat_template")
    if isinstance(older, str):
        templates["default"] = older
    names = ["chat_template.jinja"]
    names += sorted(f"{MORE_TEMPLATES}/{path.name}" for path in (folder / MORE_TEMPLATES).glob("*.jinja"))
    for name in names:
        source = read_text(folder, name)
        if source is not None:
            templates["default" if name == "chat_template.jinja" else Path(name).stem] = source
    if not templates:
        return None
    return templates["default"] if list(templates) == ["default"] else templates
