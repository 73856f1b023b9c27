"""The command, an entry point of `dpbench.commands`."""

from __future__ import annotations

import argparse

from dpbench.cli.arguments import Answer, Commands, add_command, add_config_dir, add_trust, own_code, place

_EXPORT = """\
FOLDER gets model.safetensors, config.json (class and arguments of the network), README.md (a model card with epsilon
and what it does not cover), privacy.json (machine-readable) and the ledger. Nothing else of the checkpoint is exported.

examples:
  dpbench train strategy.secure=true hydra.run.dir=runs/secure
  dpbench export runs/secure --out models/digits
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "export", "Export a trained model with its model card.", _export, epilog=_EXPORT)
    add = parser.add_argument
    add("folder", type=place, metavar="RUN", help="folder of a run")
    add("--out", type=place, required=True, metavar="FOLDER", help="folder for the model and its card")
    add("--insecure", action="store_true", help="export even if the noise is seeded (strategy.secure=false)")
    add_config_dir(parser)
    add_trust(parser)


def _export(options: argparse.Namespace) -> Answer:
    from dpbench.capabilities.export.folder import export

    with own_code(options, options.folder):
        return Answer(export(options.folder, options.out, options.insecure, options.trust))
