"""`python -m tests.endurance crash` and `python -m tests.endurance two-processes`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


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
        command.add_argument("--report", type=Path, metavar="MD", help="write what the log says, and run nothing")
    options = parser.parse_args()
    if options.command == "crash":
        from tests.endurance.crash import Crash

        series = Crash(options.folder.resolve(), options.seed)
        good = options.report is not None or series.series(options.kills)
    else:
        from tests.endurance.two_processes import TwoProcesses

        series = TwoProcesses(options.folder.resolve(), options.seed)
        good = options.report is not None or series.series(options.runs, options.beside)
    if options.report is not None:
        options.report.write_text(series.report() + "\n", encoding="utf-8")
    else:
        print(series.report())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
