"""`dpbench export`: a trained model for others."""

from __future__ import annotations

import argparse

from dpbench.cli.arguments import Commands, add_command, add_trust, place

_EPILOG = """\
FOLDER gets model.safetensors, config.json (class and arguments of the network), README.md (a model card with epsilon
and what it does not cover), privacy.json (the same as data) and the ledger. Nothing else of the checkpoint is exported.

examples:
  dpbench train strategy.secure=true hydra.run.dir=runs/secure
  dpbench export runs/secure --out models/digits
  dpbench export runs/demo --out models/demo --insecure     noise from a seed: for experiments
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "export", "a trained model with a card, for others", _EPILOG)
    add = parser.add_argument
    add("folder", type=place, metavar="RUN", help="folder of a run")
    add("--out", type=place, required=True, metavar="FOLDER", help="where the model and its card go")
    add("--insecure", action="store_true", help="also where the noise came from a seed (strategy.secure=false)")
    add("--force", action="store_true", help="replace the exported model in FOLDER")
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Write the folder and print what it guarantees."""
    from dpbench.export.folder import export

    print(export(options.folder, options.out, options.insecure, options.force, options.trust))
    return 0
