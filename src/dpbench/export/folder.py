"""`dpbench export`: a folder with a model that others can load."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save

from dpbench.errors import ConfigurationError
from dpbench.export.card import BUILD, FACTS, LEDGER, WEIGHTS, build_file, card, facts_of
from dpbench.export.network import load_network
from dpbench.runs.folder import RunFolder
from dpbench.synthesis.contents import new_contents, resolve_out
from dpbench.synthesis.sample import complete_ledger, guarantee

_OWN = re.compile(r"model\.safetensors|config\.json|privacy\.json|ledger\.jsonl|README\.md")


def export(run: Path, out: Path, insecure: bool = False, force: bool = False, trust: bool = False) -> str:
    """Write the weights of a run, how to build its network, its ledger and its card.

    Nothing else of the checkpoint is in it: no state of an optimizer, of random numbers, of metrics or of an audit.

    Args:
        run: Folder of a run.
        out: Folder, which appears when it is complete.
        insecure: Export also where the noise came from a seed.
        force: Replace the exported model in `out`.
        trust: Whether the checkpoint may hold objects, see `read_checkpoint`.

    Returns:
        A summary for the terminal.

    Raises:
        ConfigurationError: There is no model, its checkpoint holds objects and is not trusted, its ledger is not
            intact, its audit speaks against it, its noise came from a seed, `out` is not empty, or cannot be written.
    """
    out = resolve_out(out, force, FACTS, _OWN, "exported model")
    folder = RunFolder(run)
    network = load_network(folder, trust)
    ledger = complete_ledger(folder.ledger, network.checkpoint)
    facts = facts_of(folder, network, ledger)
    _refuse(folder, facts, insecure)
    with new_contents(out) as new:
        # Not save_file, whose files others may not read.
        (new / WEIGHTS).write_bytes(save(dict(network.weights), {"format": "pt"}))
        _write(new / BUILD, build_file(network))
        _write(new / FACTS, facts)
        (new / "README.md").write_text(card(network, facts), encoding="utf-8")
        if ledger is not None:
            shutil.copyfile(folder.ledger, new / LEDGER)
    count = sum(value.numel() for value in network.weights.values())
    return f"{count:,} numbers in {out}: {guarantee(facts)}"


def _refuse(run: RunFolder, facts: dict[str, Any], insecure: bool) -> None:
    """Raise ConfigurationError where the card would promise what nobody should rely on."""
    if facts["doubt"] is not None:
        raise ConfigurationError(f"{run}: {facts['doubt']}; its epsilon is no guarantee, and no card may state it.")
    if facts["private"] and not facts["secure_randomness"] and not insecure:
        raise ConfigurationError(
            f"the noise of {run} came from a seed, and whoever knows it can subtract it: train with "
            "strategy.secure=true, or export it with --insecure, and its card says so."
        )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
