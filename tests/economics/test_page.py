"""The page in a real browser, without network: every chart is drawn, nothing overlaps, at phone and desktop width."""

import shutil
from pathlib import Path

import pytest

from bimetal.cli.tco_model import throughput_of
from bimetal.economics.analysis import analyse
from bimetal.economics.page import render_page
from bimetal.economics.scenario import load_scenario

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

MEASURE = """() => {
  const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const clash = boxes => boxes.some((a, i) => boxes.slice(i + 1).some(b =>
    Math.min(a[2], b[2]) - Math.max(a[0], b[0]) > 1 && Math.min(a[3], b[3]) - Math.max(a[1], b[1]) > 1));
  const plots = [...document.querySelectorAll('.plotly-graph-div')];
  const drawn = p => p.querySelectorAll('.bars path, .scatterlayer path').length;
  const groups = plots.map(p => ({
    drawn: drawn(p),
    inside: box(p.querySelector('.main-svg'))[2] <= box(p.closest('section'))[2] + 1,
    clash: ['.xtick text', '.ytick text', '.legendtext'].some(s => clash([...p.querySelectorAll(s)].map(box))) ||
      clash([...p.querySelectorAll('.xtick text, .legendtext')].map(box)) ||
      [...p.querySelectorAll('.ytick text')].some(e => box(e)[0] < box(p)[0] - 1),
  }));
  return {
    plots: groups, sections: clash([...document.querySelectorAll('section')].map(box)),
    wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  };
}"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as p:
        running = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "num_charts"),
    [(["case-study-2026"], 5), (["rent-vs-own"], 8), (["case-study", "case-study-2026"], 9)],
)
def test_every_chart_is_drawn_without_network_or_overlap(browser, tmp_path, names, num_charts):
    page_file = tmp_path / "tco.html"
    scenarios = [load_scenario(SCENARIOS / f"{name}.yaml", throughput_of) for name in names]
    page_file.write_text(render_page(analyse(scenarios, 2_000)), encoding="utf-8")
    for width in (390, 1280):
        page = browser.new_page(viewport={"width": width, "height": 900})
        said, asked = [], []
        page.on(
            "console", lambda m, said=said: said.append(m.text) if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda e, said=said: said.append(str(e)))
        page.on("request", lambda r, asked=asked: asked.append(r.url) if r.url.startswith("http") else None)
        page.goto(page_file.as_uri())
        page.wait_for_function(
            f"document.querySelectorAll('.plotly-graph-div .legend, .plotly-graph-div .xtick').length >= {num_charts}"
        )
        page.wait_for_timeout(500)  # for the charts to take their final width
        found = page.evaluate(MEASURE)
        page.close()
        assert said == [] and asked == []
        assert len(found["plots"]) == num_charts
        assert all(p["drawn"] > 0 and p["inside"] and not p["clash"] for p in found["plots"]), (width, found)
        assert not found["sections"] and found["wider"] <= 0, (width, found)


def test_rent_or_own_says_where_there_is_no_price():
    html = render_page(analyse([load_scenario(SCENARIOS / "rent-vs-own.yaml", throughput_of)], 200))
    assert "<td>MI355X</td><td>no price</td><td>no on-demand price</td>" in html


def test_names_are_escaped_and_nothing_is_fetched():
    scenario = load_scenario(SCENARIOS / "case-study-2026.yaml", throughput_of)
    html = render_page(analyse([scenario], 200))
    body = html[html.index("<body>") :]
    assert "src=" not in body and "href=" not in body
    assert "article, claim C19" in body
    for said in (
        "UNVERIFIED in the catalogue: gpus.MI300X.price_usd",
        "saving against all-h100",
        "on systems",
    ):
        assert said in body
    assert "costs what all-h100 does, per token" in body
