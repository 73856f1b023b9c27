"""`python -m tests.endurance crash` and `python -m tests.endurance two-processes`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Runs are forked from a process that has imported PyTorch, whose OpenMP threads do not survive a fork.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.endurance.crash import Crash
from tests.endurance.report import crash_page, two_processes_page
from tests.endurance.two_processes import TwoProcesses


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.endurance", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    crash = commands.add_parser("crash", help="kill runs at random moments and resume them")
    crash.add_argument("--kills", type=int, default=200)
    two = commands.add_parser("two-processes", help="run on two processes beside busy ones")
    two.add_argument("--runs", type=int, default=100)
    two.add_argument("--beside", type=int, default=2, help="busy processes")
    for command in (crash, two):
        command.add_argument("--folder", type=Path, default=Path("runs") / "endurance")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--report", type=Path, metavar="MD", help="write there what the log says")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.command == "crash":
        good, page = Crash(folder, options.seed).series(options.kills), crash_page
    else:
        good, page = TwoProcesses(folder, options.seed).series(options.runs, options.beside), two_processes_page
    text = page(folder)
    if options.report is not None:
        options.report.write_text(text, encoding="utf-8")
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
