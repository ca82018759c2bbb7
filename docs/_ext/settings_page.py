"""The configuration reference, from the JSON schema that `kvtide config schema` prints: one table a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from kvtide.connectors.config import schema
from kvtide.connectors.registry import BUILT_IN


def pages() -> dict[str, str]:
    """The page, to be included in the configuration reference."""
    return {"configuration.md": "\n".join(_lines(schema())) + "\n"}


def _lines(document: dict[str, Any]) -> Iterator[str]:
    definitions = document["$defs"]
    yield "## Every configuration"
    yield ""
    yield from _table(_resolve(document, definitions), definitions)
    for name in BUILT_IN:
        branch = next(b for b in document["allOf"] if b["if"]["properties"]["kv_connector"]["const"] == name)
        settings = branch["then"]["properties"]["kv_connector_extra_config"]
        module = import_module(BUILT_IN[name])
        opening = (module.__doc__ or "").strip().split("\n\n")[0]
        yield f"## {name}"
        yield ""
        yield _escaped(" ".join(opening.split()))
        yield ""
        yield from _table(_resolve(settings, definitions), definitions)
    yield "### A tier of a MultiConnector"
    yield ""
    yield from _table(definitions["TierConfig"], definitions)


def _table(kind: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    required = set(kind.get("required", ()))
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key, field in kind["properties"].items():
        default = "**required**" if key in required else f"`{json.dumps(field.get('default'))}`"
        meaning = _escaped(field.get("description") or _described(field))
        yield f"| `{key}` | {_type(field, definitions)} | {default} | {meaning} |"
    yield ""


def _described(field: dict[str, Any]) -> str:
    return next((part["description"] for part in field.get("anyOf", ()) if "description" in part), "")


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in field:
        return f"`{field['$ref'].rpartition('/')[2]}`"
    if "anyOf" in field:
        kinds = [_type(part, definitions) for part in field["anyOf"]]
        return " or ".join(dict.fromkeys(kinds)).replace("integer or string", "size")
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    name = field.get("type", "any")
    name = name if isinstance(name, str) else " or ".join(name)
    if name == "array":
        return f"list of {_type(field.get('items', {}), definitions)}"
    if name == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"map to {_type(field['additionalProperties'], definitions)}"
    bounds = [
        f"{sign} {field[bound]}"
        for bound, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if bound in field
    ]
    return f"{name} {', '.join(bounds)}".strip()


def _resolve(kind: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = definitions[kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind
    return found


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("{", "&#123;").replace("<", "&lt;")
