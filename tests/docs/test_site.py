"""The documentation: what is made from the code is complete, and what is broken fails the build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.harness.run.search_path import conf_dir
from tools.site import reference

ROOT = Path(__file__).parents[2]
SPHINX = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--nitpicky"]


@pytest.fixture(scope="module")
def keys() -> str:
    return reference.settings_page()


def test_every_key_of_every_file_has_an_anchor_of_its_own(keys: str) -> None:
    anchors = re.findall(r'<span id="([^"]+)"', keys)
    assert len(anchors) == len(set(anchors)) > 300
    assert {"run.seed", "strategy.strategy.target_epsilon", "adaptive_mean.strategy.alpha"} <= set(anchors)
    groups = {path.parent.name for path in conf_dir().glob("*/*.yaml")} - {"base", "table"}
    groups -= {"experiment", "hparams_search", "debug"}  # whose files set keys of others
    assert groups == set(re.findall(r"^## (\w+)$", keys, re.M))


def test_keys_have_type_default_and_meaning(keys: str) -> None:
    (row,) = (line for line in keys.splitlines() if 'id="dpsgd.strategy.max_grad_norm"' in line)
    assert [cell.strip() for cell in row.split("|")][2:4] == ["a positive number", "`1.0`"]
    rows = [line for line in keys.splitlines() if line.startswith("| <span")]
    assert not [row for row in rows if not row.split("|")[-2].strip()]


def test_every_key_of_a_paper_has_an_entry() -> None:
    texts = [path for folder in ("src", "conf", "docs", "results") for path in (ROOT / folder).rglob("*.[mpy]*")]
    named = {
        key
        for path in texts
        if path.suffix in (".py", ".md", ".yaml") and "generated" not in path.parts
        for key in re.findall(r"\b[a-z]+(?:_[a-z]+)+_20\d\d\b", path.read_text(encoding="utf-8"))
    }
    entries = re.findall(r"^### (\w+)$", (ROOT / "docs" / "papers.md").read_text(encoding="utf-8"), re.M)
    assert named <= set(entries)


PAGES = [
    page.relative_to(ROOT / "docs").as_posix()
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if "generated" not in page.parts and page.name not in ("README.md", "index.md")
]


def test_every_page_is_listed_in_its_section_and_for_readers_of_the_files() -> None:
    sections = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    blocks = [block for text in sections for block in re.findall(r"```\{toctree\}.*?```", text, re.S)]
    entries = {entry for block in blocks for entry in block.split()}
    readme = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    from_docs = {entry.rpartition("../")[2] for entry in entries}
    for page in PAGES:
        name = page.removesuffix(".md")
        assert name in from_docs or any(name.endswith(f"/{entry}") for entry in entries), page
        assert f"]({page}" in readme, page


@pytest.mark.long
def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    links = "[x](gone1.md) [x](other.md#gone2) [x](#gone3) ![x](gone4.png)"
    (tmp_path / "index.md").write_text(f"# Home\n\n{links}\n\n```{{toctree}}\nother\n```\n")
    (tmp_path / "other.md").write_text("# Other\n")
    (tmp_path / "conf.py").write_text("extensions = ['myst_nb']\nmyst_heading_anchors = 4\nnb_execution_mode = 'off'\n")
    done = subprocess.run([*SPHINX, tmp_path, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode != 0
    assert set(re.findall(r"gone\d", done.stderr)) == {"gone1", "gone2", "gone3", "gone4"}, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    read = tmp_path_factory.mktemp("read") / "doctrees"
    before = ROOT / "site" / ".doctrees"
    if before.is_dir():  # of `make check`: Sphinx reads again what has changed since, half of its work is that
        shutil.copytree(before, read)
    done = subprocess.run([*SPHINX, "-c", "docs", "-d", read, ".", out], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.long
def test_the_site_is_strict_and_asks_no_other_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 100 and (site / "searchindex.js").exists()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)", text)
        loaded += [tag for tag in re.findall(r"<link\b[^>]*>", text) if "stylesheet" in tag or "icon" in tag]
        assert not [one for one in loaded if "//" in one], page
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert not [style for style in styles if re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style)]
