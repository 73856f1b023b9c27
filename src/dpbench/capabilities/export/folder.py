"""`dpbench export`: a folder with a model that others can load, and a card that says how private it is."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import save

from dpbench import __version__
from dpbench.capabilities.export._network import Network, load_network
from dpbench.errors import ConfigurationError
from dpbench.harness.reports.end_of_sweep import cost_of_sweep
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.ledgers import complete_ledger
from dpbench.harness.runs.new_folder import new_contents, resolve_out
from dpbench.harness.runs.numbers import (
    epsilon_text,
    epsilons_text,
    guarantee_text,
    membership_text,
    noise_text,
    uncovered_text,
)
from dpbench.harness.runs.provenance import config_hash
from dpbench.harness.runs.record import doubt, inserted_copies, is_audited, privacy_of, read_result, without_accuracy
from dpbench.privacy.accounting.ledger import Ledger
from dpbench.templates import render

WEIGHTS = "model.safetensors"
BUILD = "config.json"
FACTS = "privacy.json"
_OF_A_SWEEP = "multirun.yaml"  # in the folder of a sweep, beside those of its runs
_FOREIGN = "loading these weights requires the code that defines it."
_IN_FRONT = (
    "delta",
    "unit",
    "neighbouring_relation",
    "noise_multiplier",
    "sample_rate",
    "releases",
    "ledger_sha256",
    "secure_randomness",
)


def export(run: Path, out: Path, insecure: bool = False, trust: bool = False) -> str:
    """Write the weights of a run, how to build its network, its ledger and its card.

    Nothing else of the checkpoint is in it: no state of an optimizer, of random numbers, of metrics or of an audit.

    Args:
        run: Folder of a run.
        out: Folder, which appears when it is complete.
        insecure: Export also where the noise came from a seed.
        trust: True if the checkpoint may hold objects; see `read_checkpoint`.

    Returns:
        A summary for the terminal.

    Raises:
        ConfigurationError: There is no model, its checkpoint holds objects and is not trusted, its ledger is not
            intact, its audit speaks against it, its noise came from a seed, `out` is not empty, or cannot be written.
    """
    out = resolve_out(out)
    folder = RunFolder(run)
    network = load_network(folder, trust)
    if (network.config.get("data") or {}).get("membership") is not None:
        raise ConfigurationError(
            f"{folder} was trained with data.membership, and its seed reveals the members: export a run without that "
            "setting."
        )
    ledger = complete_ledger(folder.ledger, network.checkpoint)
    facts = _facts_of(folder, network, ledger)
    _refuse(folder, facts, insecure)
    with new_contents(out) as new:
        # Not save_file, whose files others may not read.
        (new / WEIGHTS).write_bytes(save(dict(network.weights), {"format": "pt"}))
        if network.export_to is not None:
            network.export_to(new)
        _write_json(new / BUILD, build_file(network))
        _write_json(new / FACTS, facts)
        (new / "README.md").write_text(_card(network, facts), encoding="utf-8")
        if ledger is not None:
            shutil.copyfile(folder.ledger, new / RunFolder.ledger)
    summary = f"{facts['numbers']:,} numbers in {out}: {guarantee_text(facts)}"
    if facts["sweep"] is not None:
        summary += f"\n{facts['sweep']}"
    return summary


def _refuse(run: RunFolder, facts: Mapping[str, Any], insecure: bool) -> None:
    """Raise ConfigurationError if the card would state an ε that is no guarantee."""
    if facts["doubt"] is not None:
        raise ConfigurationError(
            f"{run}: {facts['doubt']}; its epsilon is not a guarantee and cannot be stated in a card."
        )
    if facts["private"] and not facts["secure_randomness"] and not insecure:
        raise ConfigurationError(
            f"the noise of {run} is seeded, and anyone who knows the seed can subtract it: train with "
            "strategy.secure=true, or export it with --insecure, and its card says so."
        )


def _sweep_of(run: RunFolder) -> str | None:
    """Privacy cost of the sweep that contains a run, in one line; None without a sweep, or without ε."""
    sweep = run.path.resolve().parent
    if not (sweep / _OF_A_SWEEP).is_file():
        return None
    cost = cost_of_sweep([sweep])
    if cost is None:
        return None
    text = f"This run is one of the {cost.count} runs of a sweep"
    if cost.refusal or cost.unprotected:
        return f"{text}: the cost of choosing it by its results is not known."
    together = f"ε = {epsilon_text(cost.epsilon)} (RDP) at δ = {cost.delta:g}"
    return f"{text}, which cost {together} together: so does choosing it by its results."


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def _facts_of(run: RunFolder, network: Network, ledger: Ledger | None) -> dict[str, Any]:
    """Facts of a run's model, as plain data.

    Args:
        run: Folder.
        network: The network to be exported.
        ledger: The run's ledger, complete and intact; None for a run without privacy.
    """
    record = read_result(run) if run.finished else {}
    config = record.get("config", network.config)
    privacy = privacy_of(run.ledger, private=ledger is not None)
    return {
        "private": ledger is not None,
        **privacy,
        "ledger_sha256": None if ledger is None else privacy["ledger"]["sha256"],
        "steps": network.checkpoint["global_step"],
        "finished": run.finished,
        "secure_randomness": bool(config["strategy"].get("secure")) and ledger is not None and ledger.secure,
        "learned_from_canaries": is_audited(config),
        "inserted_copies": inserted_copies(config),
        "doubt": doubt(record["privacy"]) if record else None,
        "sweep": _sweep_of(run),
        "training_data": _data_of(config.get("data") or {}),
        "strategy": str(config["strategy"].get("_target_", "")).rpartition(".")[2],
        "trainable": config.get("trainable"),
        "trained_numbers": _trained_numbers(ledger),
        "numbers": sum(value.numel() for value in network.weights.values()),
        "moving_average_of_weights": config.get("ema_decay"),
        "metrics": _test_metrics(record),
        "run": config["run"]["name"],
        "config_hash": config_hash(config),
        "commit": record.get("commit"),
        "code_hash": record.get("code_hash"),
        "versions": record.get("versions"),
        "exported_by": f"dpbench {__version__}",
    }


def _data_of(options: Mapping[str, Any]) -> str:
    """Name the training data, with the file or folder of a user's own."""
    name = str(options.get("name") or options.get("_target_"))
    own = options.get("options")
    path = own.get("path") if isinstance(own, Mapping) else None
    return f"{name} ({Path(path).name})" if isinstance(path, str) else name


def _trained_numbers(ledger: Ledger | None) -> int | None:
    """Return how many numbers each release summed over; None where no ledger tells."""
    if ledger is None or ledger.header.plan is None:
        return None
    return sum(group.coordinates for group in ledger.header.plan.groups)


def _test_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics on test data that are finite; none of a run that has not ended."""
    metrics = {}
    for name, value in (without_accuracy(record) if record else {}).items():
        if name.startswith("test/") and value is not None and math.isfinite(value):
            metrics[name] = round(value, 6)
    return metrics


def build_file(network: Network) -> dict[str, Any]:
    """How to build the network: the content of config.json."""
    content: dict[str, Any] = {"target": network.target, "arguments": dict(network.arguments)}
    if network.part is not None:
        content["part"] = network.part
    content["inputs"] = network.inputs
    if not network.ours:
        content["note"] = f"{network.target} is not a class of dpbench: {_FOREIGN}"
    return content


def _card(network: Network, facts: Mapping[str, Any]) -> str:
    """README.md, with the front matter that model hubs read."""
    return render(
        "model_card.md",
        network=network,
        facts=facts,
        front=yaml.safe_dump(_front_matter(facts), sort_keys=False, allow_unicode=True).rstrip(),
        files={"weights": WEIGHTS, "build": BUILD, "facts": FACTS, "ledger": RunFolder.ledger},
        epsilons=epsilons_text(facts["epsilon"]),
        noise=noise_text(facts) if facts["private"] else None,
        membership=membership_text(facts.get("membership")),
        uncovered=uncovered_text(facts),
        foreign=_FOREIGN,
    )


def _front_matter(facts: Mapping[str, Any]) -> dict[str, Any]:
    mark = "differential-privacy" if facts["private"] else "not-private"
    front: dict[str, Any] = {"license": "unknown", "library_name": "pytorch", "tags": ["pytorch", "dpbench", mark]}
    if facts["training_data"] is not None:
        front["datasets"] = [str(facts["training_data"])]
    privacy = {name: facts[name] for name in _IN_FRONT if facts.get(name) is not None}
    front["differential_privacy"] = {"private": facts["private"], "epsilon": facts["epsilon"], **privacy}
    return front
