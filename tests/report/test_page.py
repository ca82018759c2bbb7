"""Pages in a real browser: nothing fetched, no complaint, charts of a size, in light, in dark and on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.simulate import command as simulate_command
from kvtide.cli.simulate import plan, simulate
from kvtide.sims.report import charts, page
from kvtide.sims.report.figures import BINS, histogram, row_of
from kvtide.sims.report.page import run_page, sweep_page
from kvtide.sims.serving.recording import Recording

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
# A name that would be markup, a script's end, or a template's if anything were not escaped.
HOSTILE = "</script><b>{{ 7 * 7 }}"
TRACE = [
    {"timestamp": 400 * i, "input_length": 600, "output_length": 5 + i % 30, "hash_ids": [i % 3, 100 + i]}
    for i in range(60)
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("jinja2", reason="needs the extra report")
    pytest.importorskip("vl_convert", reason="needs the extra report")
    folder = tmp_path_factory.mktemp("page")
    config, trace = folder / "config.json", folder / "trace.jsonl"
    config.write_text(json.dumps(CONFIG))
    trace.write_text("\n".join(map(json.dumps, TRACE)))
    flags = ["--model", str(config), "--trace", str(trace), "--gpu", "l4", "--kv-cache-memory-bytes", "24MiB"]
    flags += ["--offload-tier", "host:32MiB:1GB/s", "--offload-tier", "disk:64MiB:100MB/s"]
    with simulate_command.make_context("simulate", flags) as context:
        options = {
            name: value
            for name, value in context.params.items()
            if name not in ("explain", "compare", "json_file", "html_file")
        }
    deployment, requests = plan(**options)
    result = simulate(deployment, requests, options, Recording(span_s=24.0), bar=False)
    other = {**result["series"][0], "policy": "grouped", **row_of(result)}
    result["comparison"] = [{"policy": "kvtide", **row_of(result)}, other]
    result["trace"] = HOSTILE
    made: dict[str, Any] = json.loads(json.dumps(result, allow_nan=False))
    return made


def sweep_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    figures = row_of(report)
    rows = [
        {"max-num-seqs": seqs, "kv-dtype": dtype, "error": None, **figures, "output_tokens_per_s": 10.0 * seqs}
        for seqs in (64, 128, 256)
        for dtype in ("auto", "fp8")
    ]
    return [*rows, {"max-num-seqs": 512, "kv-dtype": "fp8", "error": HOSTILE, **dict.fromkeys(figures)}]


@pytest.fixture(scope="module")
def pages(report: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("html")
    texts = {
        "run": run_page(report),
        "sweep": sweep_page(sweep_rows(report), ["max-num-seqs", "kv-dtype"], {"gpu": "l4"}),
        "nothing": sweep_page([{"a": 1, "error": "no"}], ["a"], {}),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


class Visit:
    """A page opened in a headless browser: its document after the scripts ran, console, and what it fetched."""

    def __init__(self, html: Path, folder: Path, *flags: str, width: int = 1280) -> None:
        browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
        if browser is None:
            pytest.skip(f"no browser among {', '.join(BROWSERS)}")
        log = folder / "net.json"
        done = subprocess.run(
            [
                *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
                *(f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", "--enable-logging=stderr"),
                *(f"--window-size={width},1200", "--virtual-time-budget=10000", *flags),
                *("--dump-dom", html.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
        )
        self.document = done.stdout
        self.console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        found = set(re.findall(r'"url":"((?:https?|wss?|ftp)://[^"]*)"', log.read_text()))
        # The browser looks for its maker's clock and updates, whatever it opens.
        self.fetched = {url for url in found if not re.match(r"https?://[\w.-]+\.(google|googleapis|gvt1)\.com/", url)}

    @property
    def sizes(self) -> list[tuple[float, float]]:
        """Width and height of every drawn chart."""
        found = re.findall(r'<svg[^>]*class="marks"[^>]*width="([\d.]+)"[^>]*height="([\d.]+)"', self.document)
        return [(float(width), float(height)) for width, height in found]


THEMES = {"light": ("--blink-settings=preferredColorScheme=1",), "dark": ("--blink-settings=preferredColorScheme=0",)}


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 500)])
def test_a_run_in_a_browser(pages: dict[str, Path], tmp_path: Path, theme: str, width: int) -> None:
    visit = Visit(pages["run"], tmp_path, *THEMES[theme], width=width)
    assert visit.console == []
    assert not visit.fetched
    assert 'data-drawn="12"' in visit.document
    assert len(visit.sizes) == 12
    assert all(200 < chart_width <= width and height > 60 for chart_width, height in visit.sizes)
    surface = {"light": "#2563b0", "dark": "#5b9df0"}[theme]
    assert f'fill="{surface}"' in visit.document
    assert "could not be drawn" not in re.sub(r"<script>.*?</script>", "", visit.document, flags=re.DOTALL)
    assert "&lt;/script&gt;&lt;b&gt;{{ 7 * 7 }}" in visit.document


def test_a_page_that_fetches_and_complains_would_be_seen(tmp_path: Path) -> None:
    html = tmp_path / "bad.html"
    html.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("no"); throw 1;</script>')
    visit = Visit(html, tmp_path)
    assert visit.fetched == {"http://127.0.0.1:9/x.png"}
    assert len(visit.console) >= 2


def test_a_sweep_in_a_browser(pages: dict[str, Path], tmp_path: Path) -> None:
    visit = Visit(pages["sweep"], tmp_path)
    assert visit.console == []
    assert len(visit.sizes) == len(charts.COMPARED)
    assert all(width > 200 and height > 100 for width, height in visit.sizes)


def test_a_sweep_of_failures_in_a_browser(pages: dict[str, Path], tmp_path: Path) -> None:
    visit = Visit(pages["nothing"], tmp_path)
    assert visit.console == []
    assert visit.sizes == []


@pytest.mark.parametrize("name", ["run", "sweep"])
def test_a_page_is_one_small_file(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text(encoding="utf-8")
    assert len(text) < 2_000_000
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'(?:src|href)\s*=\s*"(?!data:,)', markup)
    assert "url(" not in markup
    assert "<b>" not in markup


def test_every_chart_has_a_title_and_a_table_with_its_numbers(pages: dict[str, Path], report: dict[str, Any]) -> None:
    text = pages["run"].read_text(encoding="utf-8")
    figures = re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL)
    assert len(figures) == 12
    for figure in figures:
        assert re.search(r"<h3 id=\"title-[\w-]+\">[^<]+</h3>", figure)
        assert figure.count("<tr>") >= 3
    memory = next(figure for figure in figures if 'id="memory"' in figure)
    assert memory.count("<tr>") == 1 + len(report["series"])
    for theme in ("--c1", "--surface"):
        assert text.count(f"{theme}:") == 2  # light and dark


def test_every_axis_says_what_it_is(report: dict[str, Any]) -> None:
    drawn = [
        charts.memory_chart(report["series"]),
        charts.requests_chart(report["series"]),
        charts.batch_chart(report["series"]),
        charts.hits_chart(report["series"]),
        *charts.sweep_charts(sweep_rows(report)[:-1], ["max-num-seqs", "kv-dtype"]),
    ]
    for chart in drawn:
        for axis in ("x", "y"):
            assert chart.spec["encoding"][axis]["title"], (chart.name, axis)
        assert chart.description.endswith(".")


def test_vega_lite_takes_every_specification(report: dict[str, Any]) -> None:
    vl_convert = pytest.importorskip("vl_convert", reason="needs the extra report")
    for chart in (charts.memory_chart(report["series"]), charts.hits_chart(report["series"])):
        spec = {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "width": 300, **chart.spec}
        vega = vl_convert.vegalite_to_vega(spec)
        assert vega["marks"]


def test_tiers_add_up_to_what_was_hit(report: dict[str, Any]) -> None:
    tiers = {tier for item in report["series"] if item["hit_rate_by_tier"] for tier in item["hit_rate_by_tier"]}
    assert tiers == {"device", "host", "disk"}
    for item in report["series"]:
        assert 0 <= sum((item["hit_rate_by_tier"] or {}).values()) <= 1


def test_a_histogram_counts_everything() -> None:
    values = [0.001, 0.001, 0.5, 3.0, 70.0]
    result = histogram(values)
    assert sum(result["counts"]) == len(values)
    assert (result["edges"][0], result["edges"][-1], len(result["counts"])) == (0.001, 70.0, BINS)
    assert sum(histogram([0.25, 0.25])["counts"]) == 2
    assert histogram([]) == {"edges": [], "counts": []}


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"pip install 'kvtide\[report\]'"):
        page.check_packages()
