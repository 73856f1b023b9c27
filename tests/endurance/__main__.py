"""`python -m tests.endurance`: kill runs at random moments and resume them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Runs are forked from a process that has imported PyTorch, whose OpenMP threads do not survive a fork.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.endurance.crash import Crash
from tests.endurance.report import crash_page


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.endurance", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("runs") / "endurance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, metavar="MD", help="write there what the log says")
    options = parser.parse_args()
    folder = options.folder.resolve()
    is_good = Crash(folder, options.seed).series(options.kills)
    text = crash_page(folder)
    if options.report is not None:
        options.report.write_text(text, encoding="utf-8")
    print(text)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
