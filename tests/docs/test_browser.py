"""Pages of results in a browser: they sort, open, draw, follow light and dark, fit a phone, and ask no host."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PHONE = {"width": 390, "height": 800}
TABLE = "results/gradient_compression_table1/README.html"
FRONT = "results/README.html"
CLAIMS = "results/claims/table.html"

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

_CONF = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/src"]
extensions = ["myst_nb", "sphinx_copybutton"]
include_patterns = ["results/*.md", "results/*/README.md", "results/claims/table.md"]
root_doc = "results/README"
html_theme = "furo"
html_static_path = [{root!r} + "/docs/_static"]
html_css_files = ["site.css"]
html_copy_source = False
nb_execution_mode = "off"
myst_heading_anchors = 4
suppress_warnings = ["myst.xref_missing", "toc.not_included"]
def setup(app):
    from tools.site import links, results
    links.register(app)
    results.register(app)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of results alone: all others take minutes."""
    folder = tmp_path_factory.mktemp("browser")
    (folder / "conf").mkdir()
    (folder / "conf" / "conf.py").write_text(_CONF.format(root=str(ROOT)))
    command = [sys.executable, "-m", "sphinx", "--quiet", "-c", folder / "conf", ROOT, folder / "site"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as session:
        chromium = session.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Visit:
    """A page with what it complained of and asked for."""

    def __init__(self, browser, site: Path, **settings) -> None:  # type: ignore[no-untyped-def]
        self.site, self.complaints, self.asked = site, [], []
        context = browser.new_context(**settings)
        self.page = context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.complaints.append(request.url))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def go(self, name: str):  # type: ignore[no-untyped-def]
        self.page.goto(f"file://{self.site}/{name}")
        return self.page

    def close(self) -> None:
        self.page.context.close()
        assert not self.complaints
        assert not [url for url in self.asked if not url.startswith(("file:", "data:", "blob:"))]


@pytest.fixture
def visit(browser, site: Path):  # type: ignore[no-untyped-def]
    one = Visit(browser, site, viewport={"width": 1280, "height": 900})
    yield one
    one.close()


def _column(page, number: int) -> list[str]:  # type: ignore[no-untyped-def]
    rows = page.locator("article table").first.locator("tbody tr")
    return [rows.nth(n).locator("td").nth(number).inner_text() for n in range(rows.count())]


def test_pages_load_without_complaints(visit: Visit, site: Path) -> None:
    for path in sorted(site.glob("results/**/*.html")):
        visit.go(str(path.relative_to(site)))
    assert "plotly" in " ".join(visit.asked)  # the front page
    assert sum("plotly.min.js" in url for url in visit.asked) == 1


def test_a_click_sorts_numbers_as_numbers_and_what_is_missing_last(visit: Visit) -> None:
    page = visit.go(CLAIMS)
    head = page.locator("article table").first.locator("th").nth(6)  # ε by pld
    assert head.inner_text().startswith("pld") and head.get_attribute("aria-sort") is None
    for direction, most in (("ascending", False), ("descending", True)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == direction
        shown = _column(page, 6)
        known = [float(text) for text in shown if text != "–"]
        assert known == sorted(known, reverse=most) and len(known) > 5
        assert set(shown[len(known) :]) == {"–"}
    assert page.locator("th[aria-sort]").count() == 1


def test_the_keyboard_sorts(visit: Visit) -> None:
    page = visit.go(TABLE)
    button = page.locator("article table").first.locator("th button").nth(1)
    button.focus()
    page.keyboard.press("Enter")
    assert [text[:5] for text in _column(page, 1)] == ["82.63", "83.60", "86.87", "88.39"]


def test_a_cell_opens_its_runs_and_draws_their_curves(visit: Visit) -> None:
    page = visit.go(TABLE)
    assert not [url for url in visit.asked if "plotly" in url]
    page.get_by_role("link", name="83.60 ± 3.70").click()
    cell = page.locator("details.cell[open]")
    assert cell.count() == 1 and "σ = 1.0; 8,000 steps; discretized" in cell.locator("summary").inner_text()
    cell.locator(".curve .scatterlayer .trace").first.wait_for()
    assert cell.locator(".curve .scatterlayer .trace").count() == 5
    assert cell.locator("table.runs tbody tr").count() == 5
    cell.locator("summary").click()
    page.get_by_role("link", name="83.60 ± 3.70").click()  # the address stays; it opens again
    page.locator("details.cell[open]").wait_for()


def test_an_address_of_a_cell_opens_it(visit: Visit) -> None:
    page = visit.go(f"{TABLE}#cell-sigma_0.7--dpsgd")
    page.locator("details.cell[open] .curve .scatterlayer .trace").first.wait_for()


def test_pictures_follow_light_and_dark(visit: Visit) -> None:
    page = visit.go(f"{TABLE}#cell-sigma_0.7--dpsgd")
    words = page.locator("details.cell[open] .curve .xtitle")
    words.wait_for()
    colors = []
    for theme in ("light", "dark", "light"):
        page.evaluate(f"document.body.dataset.theme = '{theme}'")
        wanted = page.evaluate("getComputedStyle(document.body).color")
        page.wait_for_function(
            "wanted => getComputedStyle(document.querySelector('details[open] .xtitle')).fill === wanted", arg=wanted
        )
        colors.append(wanted)
    assert colors[0] == colors[2] != colors[1]


def test_the_overview_is_drawn_and_leads_to_a_cell(visit: Visit) -> None:
    page = visit.go(FRONT)
    page.locator(".overview .scatterlayer .trace").first.wait_for()
    assert page.locator(".overview .js-plotly-plot").count() >= 3
    assert not page.locator("img.still").is_visible()
    link = page.evaluate("dpbenchResults.panels[0].traces[0].links[0]")
    page.goto(f"file://{visit.site}/results/{link}")
    assert page.locator("details.cell[open]").count() == 1


def test_names_of_the_overview_fit_a_phone(browser, site: Path) -> None:  # type: ignore[no-untyped-def]
    visit = Visit(browser, site, viewport=PHONE)
    page = visit.go(FRONT)
    page.locator(".overview .legendtext").first.wait_for()
    ends = page.evaluate("[...document.querySelectorAll('.legendtext')].map((e) => e.getBoundingClientRect().right)")
    assert len(ends) > 10 and max(ends) <= PHONE["width"]
    visit.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", [FRONT, CLAIMS, f"{TABLE}#cell-sigma_0.7--dpsgd"])
def test_pages_fit_a_phone(browser, site: Path, name: str, scheme: str) -> None:  # type: ignore[no-untyped-def]
    visit = Visit(browser, site, viewport=PHONE, color_scheme=scheme)
    page = visit.go(name)
    if "claims" not in name:
        page.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    visit.close()


def test_without_scripts_pictures_and_runs_are_there(browser, site: Path) -> None:  # type: ignore[no-untyped-def]
    visit = Visit(browser, site, java_script_enabled=False)
    page = visit.go(FRONT)
    assert page.locator("img.still").is_visible()
    page = visit.go(f"{TABLE}#cell-sigma_0.7--dpsgd")
    assert page.locator(
        "#cell-sigma_0\\.7--dpsgd table.runs"
    ).is_visible()  # the browser itself opens what a link leads to
    assert page.locator("img[alt=curves]").is_visible()
    visit.close()
