"""The list of integrations: the pages that `integrations/` has."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "integrations"


def pages() -> dict[str, str]:
    """One page that leads to the others."""
    names = sorted(path.stem for path in FOLDER.glob("*.md"))
    listed = "\n".join(f"../integrations/{name}" for name in names)
    text = (
        "# Integrations\n\nHow kvtide is put into engines that exist, and into one of your own. "
        f"`kvtide doctor engine` says which of them it finds.\n\n```{{toctree}}\n:maxdepth: 2\n\n{listed}\n```\n"
    )
    return {"integrations.md": text}
