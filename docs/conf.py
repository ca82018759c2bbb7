"""Sphinx: the pages here, and those that `_ext` generates from the installed kvtide into `generated/` at every build.

    python -m sphinx -W --keep-going -b html docs OUT

Needs the extra `docs`; nothing is fetched from anywhere.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

import api_pages  # noqa: E402
import benchmark_page  # noqa: E402
import docstrings  # noqa: E402
import integration_page  # noqa: E402
import pictures  # noqa: E402
import settings_page  # noqa: E402

project = "kvtide"
author = "the kvtide authors"
copyright = author
release = version = metadata.version("kvtide")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
exclude_patterns = ["_ext", "generated/configuration.md", "generated/benchmarks.md"]  # which others include
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3

smartquotes = False  # options begin with two hyphens
autodoc_typehints_format = "short"
autodoc_type_aliases = {"npt.ArrayLike": "npt.ArrayLike", "Int64Array": "Int64Array", "StoreKey": "StoreKey"}
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"kvtide {release}"
html_static_path = ["_static"]
html_css_files = ["kvtide.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"


def setup(app: Any) -> None:
    """Generate pages and pictures, and read docstrings as the Markdown that they are."""
    generated = HERE / "generated"
    sources = (api_pages.pages, settings_page.pages, benchmark_page.pages, integration_page.pages, pictures.pictures)
    for name, text in (item for source in sources for item in source().items()):
        path = generated / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    app.connect("autodoc-process-docstring", docstrings.to_rst)
    app.connect("autodoc-process-signature", docstrings.signature)
    app.connect("autodoc-skip-member", docstrings.skip)
    app.connect("sphinx-click-process-description", docstrings.examples)
