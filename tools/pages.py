"""Committed pages that are made from the code: `python -m tools.pages NAME ...` writes them (`make NAME`).

`tests/tools/test_pages.py` compares them with what the code makes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from dpbench.files import replacing

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Page:
    """A page, or the part of one that stands between two marks.

    Attributes:
        file: In the repository.
        module: Its function `page` makes the text; imported late, since some take PyTorch and some do not.
        is_part: Whether the text stands between the marks.
    """

    file: str
    module: str
    is_part: bool = False


PAGES = {
    "map": Page("CONTRIBUTING.md", "tools.package_map", is_part=True),
    "guards": Page("docs/guards.md", "tools.guards_table", is_part=True),
    "layers": Page("docs/layers.md", "tools.layer_table"),
    "combinations": Page("docs/combinations.md", "tools.combinations"),
    "zoo": Page("docs/zoo.md", "tools.zoo.page"),
    "audits": Page("results/audit/README.md", "tools.audits.page"),
}


def committed(name: str) -> str:
    """The file of a page as it is."""
    return (ROOT / PAGES[name].file).read_text(encoding="utf-8")


def up_to_date(name: str) -> str:
    """The file of a page as it should be.

    Raises:
        ValueError: The marks of a part do not stand in its page once each, in their order.
    """
    page = PAGES[name]
    text: str = import_module(page.module).page()
    if not page.is_part:
        return text.rstrip("\n") + "\n"
    begin = f"<!-- {name}: written by `make {name}` -->"
    end = f"<!-- end of {name} -->"
    old = committed(name)
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise ValueError(f"{page.file} needs the lines {begin} and {end}, once each.")
    before = old.partition(begin)[0]
    after = old.partition(end)[2]
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def main(names: list[str]) -> int:
    """Write pages; 2 for a name that is none."""
    unknown = set(names) - set(PAGES)
    if unknown or not names:
        print(f"usage: python -m tools.pages {{{','.join(PAGES)}}} ...", file=sys.stderr)
        return 2
    for name in names:
        text = up_to_date(name)
        with replacing(ROOT / PAGES[name].file) as new:
            new.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
