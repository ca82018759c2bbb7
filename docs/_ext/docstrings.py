"""kvtide's docstrings are plain text in the manner of Markdown; Sphinx reads reStructuredText. The few differences:

`code` gets double backquotes, or becomes a link where it is a public name; an indented block is shown as it stands; and
signs that reStructuredText would take for markup are escaped.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import Any

import public_api

_CODE = re.compile(r"`([^`\n]+)`")
_MARKUP = re.compile(r"([*|\\]|(?<=\w)_(?=\W|$))")


def to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's hook: rewrite a docstring in place."""
    lines[:] = convert(lines)


def skip(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Sphinx's hook: fields of named tuples, which the signature shows, and the suite's tests are no members."""
    if type(obj).__name__ == "_tuplegetter" or name.startswith("test_"):
        return True
    return None


def signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Sphinx's hook: types that autodoc leaves unresolved are shown by their names."""
    return _named(signature), _named(returns)


def examples(app: Any, ctx: Any, lines: list[str]) -> None:
    """sphinx-click's hook: show a help text's examples as commands."""
    shown: list[str] = []
    for line in lines:
        if line.strip() == "| Examples:":
            shown += ["Examples:", "", ".. code-block:: console", ""]
        elif line.startswith("|   "):
            shown.append("   $ " + line.removeprefix("|").strip())
        else:
            shown.append(line)
    lines[:] = shown


def convert(lines: list[str]) -> list[str]:
    """The lines of a docstring as reStructuredText."""
    converted: list[str] = []
    literal = listed = False
    for number, line in enumerate(lines):
        before = lines[number - 1] if number else ""
        if literal and line.strip() and not line.startswith("    "):
            literal = False
        if not literal and line.startswith("    ") and not before.strip() and not listed:
            literal = True
            converted += ["::", ""]
        if line.strip() and not line.startswith(" "):
            listed = bool(re.match(r"[-*] |\d+\. ", line))
            if listed and before.strip() and not re.match(r"[-*] |\d+\. | ", before):
                converted.append("")
        converted.append(line if literal else _inline(line))
    return converted


def _named(text: str | None) -> str | None:
    return None if text is None else re.sub(r"TypeAliasForwardRef\('([^']+)'\)", r"\1", text)


def _inline(line: str) -> str:
    parts = _CODE.split(line)
    for at, part in enumerate(parts):
        if at % 2:
            parts[at] = _link(part)
        else:
            bullet = re.match(r"\s*[-*] ", part) if at == 0 else None
            start = bullet.end() if bullet else 0
            parts[at] = part[:start] + _MARKUP.sub(r"\\\1", part[start:])
    text = ""
    for at, part in enumerate(parts):
        # Inline markup must stand alone: `block`s becomes ``block``\ s.
        glue = "\\ " if at and text and part and at % 2 == 0 and re.match(r"\w", part) else ""
        if at % 2 and text and re.search(r"[\w(]$", text) and not text.endswith("("):
            glue = "\\ "
        text += glue + part
    return text


def _link(code: str) -> str:
    target = _targets().get(code)
    return f":py:obj:`{code} <{target}>`" if target else f"``{code}``"


@cache
def _targets() -> dict[str, str]:
    """Public names, as docstrings use them, that mean one thing only."""
    found: dict[str, set[str]] = {}
    for module, names in public_api.public_modules():
        for name in names:
            value = getattr(import_module(module), name)
            members = public_api.public_members(value) if isinstance(value, type) else {}
            for path in (name, *(f"{name}.{member}" for member in members)):
                found.setdefault(path, set()).add(f"{module}.{path}")
    return {path: homes.pop() for path, homes in found.items() if len(homes) == 1 and path[0].isupper()}
