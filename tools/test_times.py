"""Seconds of the tests by file: `python -m tools.test_times TIER=JUNIT.xml ...` writes tests/times.tsv.

The reports are written by pytest: `make test PYTEST_ADDOPTS=--junitxml=quick.xml`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "times.tsv"


def by_file(report: Path, root: Path = ROOT) -> pd.DataFrame:
    """Cases and seconds of each file, with the fixtures made for them, the slowest first.

    Args:
        report: JUnit report of a run.
        root: Folder of the tests.
    """
    cases = [case.attrib for case in ElementTree.parse(report).iter("testcase")]
    seconds = pd.Series([float(case["time"]) for case in cases])
    files = [_file_of(case["classname"], root) for case in cases]
    return seconds.groupby(files, sort=False).agg(["size", "sum"]).sort_values("sum", ascending=False, kind="stable")


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
    lines = ["tier\tfile\tcases\tseconds"]
    for words in parser.parse_args().reports:
        tier, _, report = words.partition("=")
        files = by_file(Path(report))
        lines.append(f"{tier}\tall\t{files['size'].sum()}\t{files['sum'].sum():.0f}")
        lines += [f"{tier}\t{file}\t{count}\t{seconds:.1f}" for file, count, seconds in files.itertuples()]
    TABLE.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
