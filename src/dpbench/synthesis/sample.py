"""`dpbench sample`: a synthetic data set with a card that says how private it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import Ledger
from dpbench.privacy.accounting.seal import Seal, difference
from dpbench.run.saved_module import SavedModule
from dpbench.runs.folder import RunFolder
from dpbench.runs.ledgers import read_run_ledger
from dpbench.runs.numbers import epsilon_text
from dpbench.runs.provenance import commit, config_hash
from dpbench.runs.record import doubt, is_audited, privacy_of, read_result
from dpbench.synthesis.checkpoint import load_gan, make
from dpbench.synthesis.contents import new_contents, resolve_out

Format = Literal["npz", "folder"]
IMAGES, CARD = "images.npz", "privacy.json"
_OWN = re.compile(r"images\.npz|privacy\.json|README\.md|(\d+|unlabelled)(/\d{7,}\.png)?")


def sample(
    run: Path,
    number: int,
    out: Path,
    seed: int = 0,
    form: Format = "npz",
    force: bool = False,
    trust: bool = False,
) -> str:
    """Write a synthetic data set.

    Sampling is post-processing of what the discriminator released: it costs nothing, however often it is done.

    Args:
        run: Folder of a trained GAN.
        number: Of images.
        out: Folder, which appears when it is complete.
        seed: Of the noise.
        form: "npz" (images.npz: uint8 images (N, H, W, C), labels (N,)) or "folder" (PNGs in a folder for each class,
            for `torchvision.datasets.ImageFolder`).
        force: Replace the synthetic data set in `out`.
        trust: Whether the checkpoint may hold objects, see `read_checkpoint`.

    Returns:
        A summary for the terminal.

    Raises:
        ConfigurationError: There is no generator, its checkpoint holds objects and is not trusted, its ledger is not
            intact, its audit speaks against it, `out` is not empty, or cannot be written.
    """
    out = resolve_out(out, force, CARD, _OWN, "synthetic data set")
    folder = RunFolder(run)
    trained = load_gan(folder, trust)
    card = _card(folder, trained, number, seed)
    images, labels = make(trained.module, number, seed)
    with new_contents(out) as new:
        (_write_npz if form == "npz" else _write_folder)(new, images, labels)
        (new / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        (new / "README.md").write_text(_readme(card, form), encoding="utf-8")
    return f"{number} images in {out}: {guarantee(card)}"


def _write_npz(folder: Path, images: Tensor, labels: Tensor | None) -> None:
    arrays: dict[str, Any] = {"images": images.permute(0, 2, 3, 1).numpy()}
    if labels is not None:
        arrays["labels"] = labels.numpy()
    np.savez_compressed(folder / IMAGES, **arrays)


def _write_folder(folder: Path, images: Tensor, labels: Tensor | None) -> None:
    for number, pixels in enumerate(images.permute(0, 2, 3, 1).numpy()):
        place = folder / ("unlabelled" if labels is None else str(int(labels[number])))
        place.mkdir(exist_ok=True)
        Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(place / f"{number:07}.png")


def _card(run: RunFolder, trained: SavedModule, number: int, seed: int) -> dict[str, Any]:
    record = read_result(run) if run.result.exists() else {}
    config = record.get("config", trained.config)  # a resumed run may have changed it
    ledger = complete_ledger(run.ledger, trained.checkpoint)
    if record and (wrong := doubt(record["privacy"])) is not None:
        raise ConfigurationError(f"{run}: {wrong}; its epsilon is no guarantee, and no card may state it.")
    privacy = privacy_of(run.ledger, private=ledger is not None)
    return {
        "images": number,
        "labels": "every class as often" if trained.module.classes else None,
        "seed": seed,
        "training_data": config["data"]["name"],
        "epsilon": privacy["epsilon"],
        "delta": privacy["delta"],
        "unit": privacy["unit"],
        "neighbouring_relation": privacy["neighbouring_relation"],
        "population": privacy.get("population"),
        "sampling": privacy.get("sampling"),
        "secure_randomness": ledger is not None and ledger.secure,
        "learned_from_canaries": is_audited({"config": config}),
        "run": config["run"]["name"],
        "config_hash": config_hash(config),
        "commit": record.get("commit"),  # of the code that trained; none while a run is not finished
        "sampling_commit": commit(),
        "date": date.today().isoformat(),
    }


def complete_ledger(path: Path, checkpoint: dict[str, Any]) -> Ledger | None:
    """The ledger of a checkpoint; None if it was trained without privacy, whatever ledger lies beside it.

    Raises:
        ConfigurationError: It tells of fewer releases than the checkpoint, or is not the ledger that the checkpoint or
            the result knows: ε would be wrong.
    """
    strategy = checkpoint.get("callbacks", {}).get("dpbench.PrivateStrategy", {"private": False})
    if not strategy["private"]:
        return None
    ledger = read_run_ledger(path) if path.exists() else None
    if ledger is None or ledger.damage or len(ledger.releases) < strategy["releases"]:
        raise ConfigurationError(
            f"{path} is missing, damaged or cut: the checkpoint made {strategy['releases']} releases. Without all of "
            "them no epsilon can be stated; restore the ledger."
        )
    seal = Seal.read(strategy.get("ledger"))
    doubt = ledger.doubt or (difference(path, seal, "the checkpoint") if seal is not None else None)
    if doubt is not None:
        raise ConfigurationError(f"{path}: {doubt}. No epsilon can be stated; restore the ledger of this run.")
    return ledger


def guarantee(card: Mapping[str, Any]) -> str:
    """What a card states of epsilon, in one line."""
    if card["delta"] is None:
        return "NOT private, it was trained without privacy"
    known = {name: value for name, value in card["epsilon"].items() if value is not None}
    epsilons = (
        ", ".join(f"ε = {epsilon_text(value)} ({name.upper()})" for name, value in known.items()) or "no finite ε"
    )
    relation = str(card["neighbouring_relation"]).replace("_", " ")
    return f"{epsilons} at δ = {card['delta']:g}, unit: {card['unit']}, {relation}"


def _readme(card: dict[str, Any], form: Format) -> str:
    what = f"`{IMAGES}` (images, uint8, N×H×W×C; labels)" if form == "npz" else "PNGs, a folder for each class"
    lines = [
        "# Synthetic images",
        "",
        f"{card['images']} images made by a GAN that was trained on {card['training_data']}: {what}.",
        "",
        f"- Guarantee: {guarantee(card)}.",
        "- It covers everything in this folder together, and any use of it: sampling is post-processing.",
        "- It does not cover choices that were made by looking at the training data, such as tuning over several runs.",
        f"- Labels: {card['labels'] or 'none, the generator knows no classes'}; class frequencies of the training data "
        "are not reproduced.",
        f"- Made on {card['date']} by run {card['run']} (configuration {card['config_hash']}, trained by "
        f"commit {card['commit'] or 'unknown'}, sampled by {card['sampling_commit']}), seed {card['seed']}.",
        f"- {CARD} also tells how many records the training data had, and how lots were drawn.",
    ]
    if card["learned_from_canaries"]:
        lines.append("- Made-up vectors (canaries of an audit) joined the run's lots: it learned from them, too.")
    if card["delta"] is not None and not card["secure_randomness"]:
        lines.append(
            "- The run's noise came from a seed (strategy.secure=false): whoever knows seed and code can subtract it. "
            "Train with strategy.secure=true before publishing."
        )
    return "\n".join(lines) + "\n"
