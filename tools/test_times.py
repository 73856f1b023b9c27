"""Seconds of the tests by file: `python -m tools.test_times TIER=JUNIT.xml ...` writes tests/times.tsv.

The reports are written by pytest: `make test PYTEST_ADDOPTS=--junitxml=quick.xml`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "times.tsv"


def by_file(report: Path, root: Path = ROOT) -> tuple[Counter[str], dict[str, float]]:
    """Cases and seconds of each file, with the fixtures made for them.

    Args:
        report: JUnit report of a run.
        root: Folder of the tests.
    """
    cases: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        file = _file_of(case.attrib["classname"], root)
        cases[file] += 1
        seconds[file] += float(case.attrib["time"])
    return cases, seconds


def _file_of(module: str, root: Path) -> str:
    """File of a dotted name, which may go on with a class."""
    parts = module.split(".")
    while parts:
        for folder in ("", "src/"):
            path = f"{folder}{'/'.join(parts)}.py"
            if (root / path).is_file():
                return path
        parts.pop()
    return module


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.test_times", description=__doc__)
    parser.add_argument("reports", nargs="+", metavar="TIER=JUNIT.xml")
    rows = [("tier", "file", "cases", "seconds")]
    for words in parser.parse_args().reports:
        tier, _, report = words.partition("=")
        cases, seconds = by_file(Path(report))
        rows.append((tier, "all", str(cases.total()), f"{sum(seconds.values()):.0f}"))
        slowest_first = sorted(seconds, key=lambda file: -seconds[file])
        rows += [(tier, file, str(cases[file]), f"{seconds[file]:.1f}") for file in slowest_first]
    TABLE.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
