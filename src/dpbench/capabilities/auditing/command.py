"""The command, an entry point of `dpbench.commands`."""

from __future__ import annotations

import argparse

from dpbench.cli.arguments import Answer, Commands, add_command, add_config_dir, add_json, add_trust, own_code, place
from dpbench.errors import ConfigurationError

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


def add_parser(commands: Commands) -> None:
    """Add the command."""
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
    from dpbench.capabilities.auditing.audit import Verdict
    from dpbench.capabilities.auditing.report import PICTURE, audit_by_labels, audit_run
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
            from dpbench.capabilities.auditing.label_scores import (  # brings torch, which canaries do not need
                is_on_noise,
                label_scores,
            )

            on_noise = is_on_noise(run)
        if on_noise:
            report = audit_by_labels(run, label_scores(run, options.trust), options.confidence)
        else:
            report = audit_run(options.run, options.confidence)
    picture = write_figure(run.path / PICTURE.file, roc_figure([report.roc_panel]))
    text = f"{report.text}\n  {'picture':<12} {picture}"
    return Answer(text, report.facts, 0 if report.result.verdict == Verdict.CONSISTENT else 3)
