"""The documentation builds without a warning, links to what exists, and its references leave nothing out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest

from kvtide.cli.main import cli
from kvtide.connectors.config import schema

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

for package in ("sphinx", "myst_parser", "furo", "sphinx_click", "torch", "transformers"):
    pytest.importorskip(package, reason="the documentation needs the extra docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; warnings are errors."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-d", f"{target}-trees", "-b", "html"]
    done = subprocess.run([*command, DOCS, target], capture_output=True, text=True, cwd=target, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return target


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name == "id" and value:
                self.ids.add(value)


def test_every_link_leads_somewhere(site: Path) -> None:
    pages = {path: _Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 20
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                assert parts.netloc == "pradyunsg.me" or "github.com/pradyunsg" in link, f"{path.name} links to {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages.get(target)
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and known is not None and anchor not in known.ids):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = re.compile(r"""(?:<script[^>]+src|<link[^>]+href|<img[^>]+src)=["'](?:https?:)?//""")
    assert not [path.name for path in site.rglob("*.html") if fetched.search(path.read_text())]


def _commands(command: click.Command = cli, path: str = "kvtide") -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _commands(found, f"{path} {name}")


def test_the_command_reference_has_every_option(site: Path) -> None:
    text = unescape((site / "reference/cli.html").read_text())
    ids = _Page(text).ids
    for path, command in _commands():
        dashed = path.replace(" ", "-")
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                option = f"cmdoption-{dashed}-{parameter.opts[0].lstrip('-')}"
                assert option.lower() in {each.lower() for each in ids}, option


def test_the_configuration_reference_has_every_key(site: Path) -> None:
    text = unescape((site / "reference/configuration.html").read_text())
    document = schema()
    for name, kind in document["$defs"].items():
        if name == "TransferConfig":
            continue
        for key, field in kind.get("properties", {}).items():
            assert f">{key}<" in text, f"{name}.{key}"
            if default := field.get("default"):
                assert json.dumps(default) in re.sub(r"<[^>]+>", "", text), f"{name}.{key}"


def test_the_api_reference_has_every_public_name(site: Path) -> None:
    from public_api import LIST

    ids: set[str] = set()
    for page in (site / "generated/api").glob("*.html"):
        ids |= _Page(page.read_text()).ids
    missing = []
    for line in LIST.read_text().splitlines():
        name = re.split(r"[( ]", line)[0]
        inherited = name.rpartition(".")[2] in ("open_store", "open_small")
        if name not in ids and not inherited:
            missing.append(name)
    assert not missing


def test_pictures_show_what_the_allocator_did(site: Path) -> None:
    pictures = {path.name: path.read_text() for path in (DOCS / "generated/pictures").glob("*.svg")}
    assert set(pictures) == {"groups.svg", "arena.svg", "windows.svg", "tiers.svg", "waste.svg"}
    # A window of 64 in blocks of 8 never holds more than 9 blocks, full attention all 30.
    assert ">30 held<" in pictures["windows.svg"]
    assert pictures["windows.svg"].count(">8 held<") >= 20
    assert "992 device hit" in pictures["tiers.svg"]
    assert "992 store hit" in pictures["tiers.svg"]
    for name in pictures:
        assert list((site / "_images").glob(name)), name


def test_every_page_of_integrations_is_listed(site: Path) -> None:
    text = (site / "generated/integrations.html").read_text()
    for page in (DOCS / "integrations").glob("*.md"):
        assert f"integrations/{page.stem}.html" in text
