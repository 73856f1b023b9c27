"""The card of an exported model: what it is, how private, and what that does not cover."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import yaml

from dpbench import __version__
from dpbench.export.network import Network
from dpbench.privacy.accounting.ledger import Ledger
from dpbench.runs.folder import RunFolder
from dpbench.runs.numbers import epsilons_text, noise_text, uncovered_text
from dpbench.runs.provenance import config_hash
from dpbench.runs.record import doubt, is_audited, privacy_of, read_result, without_accuracy

WEIGHTS, BUILD, FACTS, LEDGER = "model.safetensors", "config.json", "privacy.json", RunFolder.ledger
_NOT_COVERED = (
    "**Tuning.** Settings that were chosen by looking at results on the same data cost privacy of their own: every run "
    "that was compared counts (`dpbench account RUN RUN ...`).",
    "**Other runs on the same data**, published or not: their ε add up with this one.",
    "**Preparation of the data**: selection, cleaning, normalization constants, vocabularies, and how large they are.",
    "**Validation and test records**: the figures below tell of them.",
    "**Floating point**: the guarantee is that of the ideal Gaussian mechanism.",
)
_SEEDED = (
    "**Seeded noise.** This run's noise came from a seed (strategy.secure=false): whoever knows seed, code and "
    "settings can compute it and subtract it. For a model that is to protect anybody train with strategy.secure=true."
)
_INPUTS = ("name", "scale", "image_size", "features")
_FOREIGN = "loading these weights requires the code that defines it."


def facts_of(run: RunFolder, network: Network, ledger: Ledger | None) -> dict[str, Any]:
    """What is known of a run's model, as plain data.

    Args:
        run: Folder.
        network: That is exported.
        ledger: Complete and intact; None of a run without privacy.
    """
    record = read_result(run) if run.finished else {}
    config = record.get("config", network.config)
    privacy = privacy_of(run.ledger, private=ledger is not None)
    measured = without_accuracy(record) if record else {}
    kept = {name: value for name, value in measured.items() if name.startswith("test/") and value is not None}
    known = ("population", "microbatch_size", "noise_multiplier", "sample_rate", "expected_batch_size", "sampling")
    only_if_any = ("uncovered_delta", "noise_end")
    return {
        "private": ledger is not None,
        "epsilon": privacy["epsilon"],
        "delta": privacy["delta"],
        "unit": privacy["unit"],
        "neighbouring_relation": privacy["neighbouring_relation"],
        **{name: privacy.get(name) for name in known},
        **{name: privacy[name] for name in only_if_any if name in privacy},
        "ledger_sha256": (privacy.get("ledger") or {}).get("sha256"),
        "releases": privacy.get("releases"),
        "steps": network.checkpoint["global_step"],
        "finished": run.finished,
        "secure_randomness": bool(config["strategy"].get("secure")) and ledger is not None and ledger.secure,
        "learned_from_canaries": is_audited({"config": config}),
        "doubt": doubt(record["privacy"]) if record else None,
        "training_data": (config.get("data") or {}).get("name"),
        "strategy": str(config["strategy"].get("_target_", "")).rpartition(".")[2],
        "trainable": config.get("trainable"),
        "moving_average_of_weights": config.get("ema_decay"),
        "metrics": {name: round(value, 6) for name, value in kept.items() if math.isfinite(value)},
        "run": config["run"]["name"],
        "config_hash": config_hash(config),
        **{name: record.get(name) for name in ("commit", "code_hash", "versions")},
        "exported_by": f"dpbench {__version__}",
    }


def build_file(network: Network) -> dict[str, Any]:
    """How to build the network: the content of config.json."""
    data = network.config.get("data") or {}
    found: dict[str, Any] = {"target": network.target, "arguments": dict(network.arguments)}
    found |= {} if network.part is None else {"part": network.part}
    inputs = {name: data[name] for name in _INPUTS if data.get(name) is not None}
    if "features" in inputs:  # made of pixels as they are
        inputs.pop("scale", None)
    found["inputs"] = inputs
    if not network.ours:
        found["note"] = f"{network.target} is not a class of dpbench: {_FOREIGN}"
    return found


def card(network: Network, facts: Mapping[str, Any]) -> str:
    """README.md, with the front matter that model hubs read."""
    front = yaml.safe_dump(_front(facts), sort_keys=False, allow_unicode=True)
    lines = ["---", front.rstrip(), "---", "", f"# {_line(facts['run'])}", "", *_about(network, facts), ""]
    lines += ["## Privacy", "", *_privacy(facts), "", "## Use", "", *_use(network)]
    if facts["metrics"]:
        lines += ["", "## Results", "", "| on test data | |", "| --- | ---: |"]
        lines += [f"| {_line(name)} | {value:.4g} |" for name, value in facts["metrics"].items()]
    lines += ["", "## Where it comes from", "", *_origin(facts)]
    return "\n".join(lines) + "\n"


def _line(text: Any) -> str:
    """A name as one line that ends no table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _front(facts: Mapping[str, Any]) -> dict[str, Any]:
    mark = "differential-privacy" if facts["private"] else "not-private"
    privacy = {name: facts[name] for name in _IN_FRONT if facts[name] is not None}
    epsilon = {name: round(value, 6) for name, value in facts["epsilon"].items() if value is not None}
    front: dict[str, Any] = {"license": "unknown", "library_name": "pytorch", "tags": ["pytorch", "dpbench", mark]}
    front |= {} if facts["training_data"] is None else {"datasets": [str(facts["training_data"])]}
    front["differential_privacy"] = {"private": facts["private"], "epsilon": epsilon, **privacy}
    return front


_IN_FRONT = (
    "delta", "unit", "neighbouring_relation", "noise_multiplier", "sample_rate", "releases", "ledger_sha256",
    "secure_randomness",
)  # fmt: skip


def _about(network: Network, facts: Mapping[str, Any]) -> list[str]:
    what = f"`{network.target}`" + (f", its `{network.part}`" if network.part else "")
    how = f"with {facts['strategy']}" if facts["private"] else "WITHOUT privacy"
    lines = [f"{what}, trained {how} on {_line(facts['training_data'])} for {facts['steps']:,} steps."]
    if facts["trainable"] is not None:
        lines.append(f"Only a part of it was trained: {facts['trainable']}.")
    if facts["moving_average_of_weights"] is not None:
        lines.append("The weights are their moving average, which costs no privacy.")
    if not facts["finished"]:
        lines += ["", "**The run has not ended**: these are the weights of its last checkpoint."]
    if facts["learned_from_canaries"]:
        lines += ["", "**Made-up vectors (canaries of an audit) joined its lots**: it learned from them, too."]
    return lines


def _privacy(facts: Mapping[str, Any]) -> list[str]:
    if not facts["private"]:
        return ["**None.** This model was trained without privacy: its ε is infinite, and it may repeat its records."]
    relation = str(facts["neighbouring_relation"]).replace("_", " ")
    kind = str((facts["sampling"] or {}).get("kind", "")).replace("_", " ")
    lines = [
        f"- (ε, δ)-differentially private with ε = {epsilons_text(facts['epsilon'])} at δ = {facts['delta']:g}.",
        f"- Unit of privacy: one {facts['unit']}, of {facts['population']:,}; neighbors: {relation}.",
        f"- {facts['releases']:,} releases, {noise_text(facts)}, {kind} sampling.",
        f"- Every release is in [{LEDGER}]({LEDGER}), SHA-256 `{facts['ledger_sha256']}`: any accountant can read it "
        f"again, `dpbench account {LEDGER} --accountant all`.",
        *([] if (uncovered := uncovered_text(facts)) is None else [f"- δ is {uncovered}."]),
        "- It covers these weights and whatever is computed from them.",
        "",
        "Not covered:",
        "",
        *(f"- {line}" for line in _NOT_COVERED),
    ]
    return lines if facts["secure_randomness"] else [*lines, f"- {_SEEDED}"]


def _use(network: Network) -> list[str]:
    module, _, name = network.target.rpartition(".")
    part = "" if network.part is None else f".{network.part}"
    lines = [
        "```python",
        "import json",
        "from safetensors.torch import load_file",
        f"from {module} import {name}",
        "",
        f'model = {name}(**json.load(open("{BUILD}"))["arguments"]){part}',
        f'model.load_state_dict(load_file("{WEIGHTS}"))',
        "model.eval()",
        "```",
        "",
    ]
    if not network.ours:
        return [*lines, f"`{network.target}` is not a class of dpbench: {_FOREIGN}"]
    return [*lines, f"Inputs are prepared as `inputs` of {BUILD} says (`data.*` of dpbench)."]


def _origin(facts: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in (facts["versions"] or {}).items())
    rows = {"commit": facts["commit"], "code": facts["code_hash"], "settings": facts["config_hash"]}
    lines = [f"- {name}: `{value}`" for name, value in rows.items() if value is not None]
    return [*lines, *([f"- versions: {versions}"] if versions else []), f"- all of this as data: [{FACTS}]({FACTS})"]
