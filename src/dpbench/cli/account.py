"""`dpbench account`: epsilon of runs and sweeps, from their ledgers."""

from __future__ import annotations

import argparse
import sys
from textwrap import TextWrapper

from dpbench.cli.arguments import Commands, add_command, place, png, whole

_EPILOG = """\
accountants (--accountant NAME, several with commas, or all), and the lots that each covers:
{accountants}
Poisson lots are accounted for with one record added or removed, lots of a fixed size with one replaced.

examples:
  dpbench train hydra.run.dir=runs/demo             a run to ask about
  dpbench account runs/demo --accountant all --plot epsilon.png
  dpbench account runs/demo --delta 1e-6 --accountant pld --json
  dpbench account runs/demo --releases 10           after the first ten releases
  dpbench train -m seed=0,1 hydra.sweep.dir=runs/sweep
  dpbench account runs/sweep                        each run, and all of them together
  dpbench account runs/demo --population 1000000 --batch-size 5000     planning: nominal, no guarantee
  dpbench account runs/sweep --selection geometric --mean-trials 2
"""


def _epilog() -> str:
    from dpbench.privacy.accounting.accountants import ACCOUNTANTS

    width = max(map(len, ACCOUNTANTS)) + 4
    wrapper = TextWrapper(width=100, subsequent_indent=" " * width, break_on_hyphens=False)
    entries = []
    for name, accountant in ACCOUNTANTS.items():
        lots = " or ".join(kind.replace("_", " ") for kind in accountant.samplings)
        entries.append(wrapper.fill(f"{'  ' + name:<{width}}{accountant.title}; {lots}"))
    return _EPILOG.format(accountants="\n".join(entries))


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "account", "epsilon of runs and sweeps, from their ledgers", _epilog)
    add = parser.add_argument
    add("paths", type=place, nargs="+", metavar="RUN", help="folder of a run or a sweep, or a ledger")
    add("--delta", type=float, help="delta (default: the run's own)")
    add("--accountant", default="rdp", metavar="NAME", help="see below (default: rdp)")
    nominal = "where an accountant does not cover how lots were drawn, compute what other lots would cost, and say so"
    add("--nominal", action="store_true", help=nominal)
    add("--population", type=whole, metavar="N", help="nominal: what the runs would cost with so many records (users)")
    grown = "with --population: expected lot size there, noise grown alike (default: as in the runs)"
    add("--batch-size", type=float, metavar="B", help=grown)
    shapes = "only the best run is published: number of trials geometric, logarithmic, poisson, or a shape"
    add("--selection", metavar="DISTRIBUTION", help=shapes)
    add("--mean-trials", type=float, metavar="MEAN", help="mean of that distribution")
    first = "only the first N releases of each run, as of a model that was published before the others were made"
    add("--releases", type=whole, metavar="N", help=first)
    add("--plot", type=png, metavar="PNG", help="draw epsilon against steps and against the order")
    add("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the epsilons; 3 where a ledger is damaged."""
    from dpbench.reports.account import AccountingRequest, account, accountant_names, selection_named

    names = accountant_names(options.accountant)
    selection = selection_named(options.selection, options.mean_trials)
    request = AccountingRequest(
        accountants=names,
        delta=options.delta,
        nominal=options.nominal,
        selection=selection,
        population=options.population,
        lot_size=options.batch_size,
        releases=options.releases,
    )
    report = account(options.paths, request)
    print(report.to_json() if options.json else report.text)
    if options.plot is not None:
        from dpbench.reports.account_plot import plot_epsilon

        options.plot.parent.mkdir(parents=True, exist_ok=True)
        plot_epsilon(options.plot, report.ledgers, report.facts["delta"], names, options.nominal)
    if report.doubt is not None:
        print(f"dpbench: warning: {report.doubt}", file=sys.stderr)
    for name, damage in report.damage.items():
        print(f"dpbench: error: {name}: {damage}; the epsilon of what is there is no guarantee.", file=sys.stderr)
    return 3 if report.damage else 0
