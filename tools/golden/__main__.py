"""`python -m tools.golden compare|write|base`; see CONTRIBUTING.md, "Golden runs"."""

from __future__ import annotations

import argparse
import sys

from tools.golden import compare


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(prog="python -m tools.golden", description=compare.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    comparing = commands.add_parser("compare", help="train the golden runs, and say what differs")
    comparing.add_argument(
        "--base",
        metavar="REVISION",
        help="the revision whose weights they must have (default: the one in tests/golden/base.txt)",
    )
    commands.add_parser("write", help="write tests/golden again, after a change that is meant")
    commands.add_parser("base", help="compare later revisions with the commit that is checked out, after a raise")
    arguments = parser.parse_args()
    if arguments.command == "base":
        print(compare.set_base())
        return 0
    if arguments.command == "write":
        compare.write()
        return 0
    wrong = 0
    for line in compare.problems(arguments.base):
        print(line, file=sys.stderr)
        wrong += 1
    print("no difference" if not wrong else f"{wrong} differences")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
