"""Commands about epsilon: `dpbench account`, `dpbench calibrate` and `dpbench audit`."""

from __future__ import annotations

import argparse
import sys

from dpbench.cli.arguments import (
    Answer,
    Commands,
    add_command,
    add_config_dir,
    add_json,
    add_runs,
    add_trust,
    integer,
    own_code,
    place,
)
from dpbench.errors import ConfigurationError

_ACCOUNT = """\
--accountant NAME[,NAME...] or all: docs/epsilon.md lists accountants and the sampling that each covers.
Poisson sampling is accounted for with one record added or removed, batches of a fixed size with one replaced.

examples:
  dpbench account runs/demo --accountant all
  dpbench account runs/demo --delta 1e-6 --accountant pld --json
  dpbench account runs/sweep                        each run, and all of them together
  dpbench account runs/sweep --selection geometric --mean-trials 2
  dpbench account runs/demo --population 1000000 --batch-size 5000     planning: nominal, no guarantee
"""

_CALIBRATE = """\
Leave out one of --noise-multiplier, --sample-rate (or --batch-size), --steps (or --epochs), --epsilon, --delta.
--advantage or --tpr in place of --epsilon state the budget as what any membership test may reach.
With --continue-from, noise, rate and delta default to those of that run.

examples:
  dpbench calibrate --epsilon 3 --delta 1e-5 --population 60000 --batch-size 256 --epochs 60 --accountant pld
  dpbench calibrate --noise-multiplier 1.1 --sample-rate 0.0042667 --steps 14062 --delta 1e-5
  dpbench calibrate --advantage 0.1 --population 60000 --batch-size 256 --epochs 60
  dpbench calibrate --continue-from runs/demo --epsilon 20      how many more steps
"""

_AUDIT = """\
The run must have been trained with canaries: made-up gradients, each included in a batch with probability 1/2. Guessing
which ones were included gives lower bounds of epsilon, which must not exceed the sound one; their statistics show
whether noise, sensitivity and sampling were as declared. The picture is audit.png in the folder of the run.

A run on noise (data=random_noise) needs none: each record is a canary with its random label, and only the final weights
are attacked. That is a weaker test, of what the published model reveals.

"The family" is the ledger's own releases with all noise scaled by one factor.

exit status: 0 consistent, 1 no audit possible, 3 epsilon violated or mechanism not as declared.
Passing is not a proof of privacy; it rules out only violations that these canaries can detect.

examples:
  dpbench train experiment=audit hydra.run.dir=runs/small      a small network with canaries, half a minute
  dpbench train audit=gradient_canaries hydra.run.dir=runs/audited
  dpbench audit runs/audited
"""


def add_parsers(commands: Commands) -> None:
    """Add the commands."""
    _add_account(commands)
    _add_calibrate(commands)
    _add_audit(commands)


def _add_account(commands: Commands) -> None:
    summary = "Recompute epsilon of runs and sweeps from their ledgers."
    parser = add_command(commands, "account", summary, _account, epilog=_ACCOUNT)
    add = parser.add_argument
    add_runs(parser, "folder of a run or a sweep, or a ledger")
    add("--delta", type=float, help="delta (default: the run's own)")
    add("--accountant", default="rdp", metavar="NAME", help="rdp (default), pld or others, see below")
    add(
        "--nominal",
        action="store_true",
        help="if an accountant does not cover the sampling, report a nominal epsilon for sampling that it covers",
    )
    add(
        "--population",
        type=integer,
        metavar="N",
        help="nominal: cost of the runs with this number of records (users)",
    )
    add(
        "--batch-size",
        type=float,
        metavar="B",
        help="with --population: expected batch size, with noise scaled in proportion (default: as in the runs)",
    )
    add(
        "--selection",
        metavar="DISTRIBUTION",
        help="only the best run is published; number of trials: geometric, logarithmic, poisson, or a shape",
    )
    add("--mean-trials", type=float, metavar="MEAN", help="mean of that distribution")
    add(
        "--releases",
        type=integer,
        metavar="N",
        help="count only the first N releases of each run",
    )
    add_json(parser)


def _account(options: argparse.Namespace) -> Answer:
    """Account for ledgers; status 3 if one is damaged."""
    from dpbench.harness.reports.account import AccountingRequest, account

    request = AccountingRequest(**{name: getattr(options, name) for name in AccountingRequest.__dataclass_fields__})
    report = account(options.sources, request)
    for doubt in report.doubts:
        print(f"dpbench: warning: {doubt}", file=sys.stderr)
    for name, damage in report.damage.items():
        print(f"dpbench: error: {name}: {damage}; the epsilon of what is there is not a guarantee.", file=sys.stderr)
    return Answer(report.text, report.facts, 3 if report.damage else 0)


def _add_calibrate(commands: Commands) -> None:
    summary = "Solve for whichever of noise, sampling rate, steps, epsilon, delta is left out."
    parser = add_command(commands, "calibrate", summary, _calibrate, epilog=_CALIBRATE)
    add = parser.add_argument
    add("--noise-multiplier", type=float, metavar="Z", help="noise over the sensitivity of the sum")
    add("--sample-rate", type=float, metavar="Q", help="probability that a record is in a batch")
    add("--batch-size", type=float, metavar="B", help="(expected) records in a batch, of --population")
    add("--population", type=integer, metavar="N", help="number of records")
    add("--steps", type=integer, metavar="T", help="steps (with --continue-from: additional ones)")
    add("--epochs", type=float, metavar="E", help="the same in epochs, as trainer.max_epochs counts them")
    add("--epsilon", type=float, help="target")
    add("--advantage", type=float, metavar="A", help="target: largest advantage (TPR - FPR) of a membership test")
    add("--tpr", metavar="TPR@FPR", help="target: its largest true positive rate at a false positive rate: 0.05@0.01")
    add("--delta", type=float, help="delta")
    add("--sampling", metavar="NAME", help="how batches are drawn: poisson (default) or fixed_size")
    add("--bands", type=integer, metavar="B", help="noise correlated over B steps, on cyclic_poisson batches")
    add("--microbatch-size", type=integer, metavar="M", help="examples per microbatch; doubles the sensitivity")
    add("--accountant", default="rdp", metavar="NAME", help="see dpbench account --help (default: rdp)")
    add("--continue-from", type=place, metavar="RUN", help="continue this run, counting what it has spent")
    add_json(parser)


def _calibrate(options: argparse.Namespace) -> Answer:
    from dpbench.harness.reports.calibrate import calibrate

    facts, text = calibrate(vars(options))
    for doubt in facts["doubts"]:
        print(f"dpbench: warning: {doubt}", file=sys.stderr)
    return Answer(text, facts)


def _add_audit(commands: Commands) -> None:
    summary = "Empirically audit a run's epsilon with canary gradients."
    parser = add_command(commands, "audit", summary, _audit, epilog=_AUDIT)
    parser.add_argument("run", type=place, metavar="RUN", help="folder of a run with canaries, or of one on noise")
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="P",
        help="confidence of each bound, and of the verdict as a whole (default: 0.95)",
    )
    add_json(parser)
    add_config_dir(parser)
    add_trust(parser)


def _audit(options: argparse.Namespace) -> Answer:
    """Audit a run by its canaries or, one on noise, by its labels, and draw the picture.

    Status 3 if something is wrong with the run.
    """
    from dpbench.capabilities.auditing import Verdict
    from dpbench.harness.reports.audit import audit_by_labels, audit_run
    from dpbench.harness.reports.figures import write_figure
    from dpbench.harness.reports.roc import roc_figure
    from dpbench.harness.runs.folder import RunFolder

    run = RunFolder(options.run)
    # Who reads an audit and goes on chooses what the next one shows.
    if run.begun and not run.finished:
        raise ConfigurationError(f"{run} has not ended: audits are of whole runs; `{run.command('resume')}` goes on.")
    with own_code(options, options.run):
        on_noise = False
        if run.begun and not run.audit.exists():
            from dpbench.harness.run.label_scores import is_on_noise, label_scores  # torch: canaries do without

            on_noise = is_on_noise(run)
        if on_noise:
            report = audit_by_labels(run, label_scores(run, options.trust), options.confidence)
        else:
            report = audit_run(options.run, options.confidence)
    picture = write_figure(run.audit_picture, roc_figure([report.roc_panel]))
    text = f"{report.text}\n  {'picture':<12} {picture}"
    return Answer(text, report.facts, 0 if report.result.verdict == Verdict.CONSISTENT else 3)
