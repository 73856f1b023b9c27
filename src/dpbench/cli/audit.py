"""`dpbench audit`: is the epsilon of a run true, as far as canaries can tell."""

from __future__ import annotations

import argparse
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.cli import train
from dpbench.cli.arguments import Commands, add_command, add_trust, place
from dpbench.errors import ConfigurationError

if TYPE_CHECKING:
    from dpbench.reports.audit import AuditReport

_EPILOG = """\
The run must have been trained with canaries: made-up vectors that join the lots by the flip of a coin. What they saw
gives lower bounds of epsilon, which must not exceed the sound one, and shows whether noise, sensitivity and lots were
as declared. The picture is audit.png in the folder of the run.

A run on noise (data=random_noise) needs none: each record is a canary with its random label, and the final weights are
all that is looked at. That tells less, and sees what the published model shows.

"The family" is the ledger's own releases with all noise scaled by one factor.

exit status: 0 consistent, 1 no audit is possible, 3 the epsilon is violated, or something is not as declared.
A passed audit is no proof: it finds what these canaries show, no more.

examples:
  dpbench audit --self                     train a small network with canaries, half a minute, and audit that
  dpbench train audit=gradient_canaries hydra.run.dir=runs/audited
  dpbench audit runs/audited
  dpbench audit runs/audited --confidence 0.99 --json
  dpbench train data=random_noise data.like=mnist data.train_size=2000 model=mlp hydra.run.dir=runs/noise
  dpbench audit runs/noise                 by labels
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "audit", "is a run's epsilon true, as far as canaries tell", _EPILOG)
    parser.add_argument("run", type=place, nargs="?", metavar="RUN", help="folder of a run with canaries")
    parser.add_argument("--self", action="store_true", help="train experiment=audit, and audit that run")
    what = "of each bound by itself, and of the verdict as a whole (default: 0.95)"
    parser.add_argument("--confidence", type=float, default=0.95, metavar="P", help=what)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Print the audit and draw its picture; 3 where something is wrong with the run."""
    from dpbench.auditing import Verdict

    if options.self == (options.run is not None):
        raise ConfigurationError("name one run, dpbench audit RUN; or dpbench audit --self trains one and audits it.")
    if not 0 < options.confidence < 1:
        raise ConfigurationError(f"confidence must lie strictly between 0 and 1, not {options.confidence}.")
    report, picture = _audited(_trained() if options.self else options.run, options.confidence, options.trust)
    print(report.to_json() if options.json else f"{report.text}\n  {'picture':<12} {picture}")
    return 0 if report.result.verdict == Verdict.CONSISTENT else 3


def _audited(folder: Path, confidence: float, trust: bool) -> tuple[AuditReport[Any], Path]:
    """The audit of a run, by its canaries or, of a run on noise, by labels; and its picture."""
    from dpbench.reports.audit import audit_by_labels, audit_run, refuse_unended, require_private
    from dpbench.reports.plots import plot_audit
    from dpbench.runs.folder import RunFolder

    run = RunFolder(folder)
    report: AuditReport[Any] | None = None
    if run.begun and not run.audit.exists():
        from dpbench.run.label_scores import is_on_noise, label_scores  # brings torch, which canaries do not need

        if is_on_noise(run):
            require_private(run)
            report = audit_by_labels(run, label_scores(run, trust), confidence)
    if report is None:
        refuse_unended(folder)
        report = audit_run(folder, confidence)
    return report, plot_audit(run.audit_picture, report)


def _trained() -> Path:
    """Train the experiment of audits, in a folder of its own."""
    folder = Path("outputs") / f"{datetime.now():%Y-%m-%d}" / f"{datetime.now():%H-%M-%S}-audit-{os.getpid()}"
    words = ["experiment=audit", f"hydra.run.dir={folder}"]
    if train.run(argparse.Namespace(words=words)):
        raise ConfigurationError("the training that was to be audited has failed.")
    return folder
