"""`dpbench sample`: a synthetic data set with a card that says how private it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.harness.run.samples import sample_images
from dpbench.harness.run.saved_config import read_config
from dpbench.harness.run.saved_module import SavedModule, last_checkpoint, load_module, require_module
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.ledgers import complete_ledger
from dpbench.harness.runs.new_folder import new_contents, resolve_out
from dpbench.harness.runs.numbers import guarantee_text, membership_text
from dpbench.harness.runs.provenance import commit, config_hash
from dpbench.harness.runs.record import doubt, inserted_copies, is_audited, privacy_of, read_result
from dpbench.modules.gan import GAN
from dpbench.modules.image_generator import SHAPE
from dpbench.templates import render

IMAGES = "images.npz"
CARD = "privacy.json"


def sample(
    run: Path,
    number: int,
    out: Path,
    seed: int = 0,
    trust: bool = False,
) -> str:
    """Write a synthetic data set: images.npz, with uint8 images (N, H, W, C) and labels (N,), and its card.

    Sampling is post-processing of the discriminator's releases: it costs nothing, however often it is done.

    Args:
        run: Folder of a trained GAN.
        number: Number of images.
        out: Folder, which appears when it is complete.
        seed: Seed of the noise.
        trust: True if the checkpoint may hold objects; see `read_checkpoint`.

    Returns:
        A summary for the terminal.

    Raises:
        ConfigurationError: There is no generator, its checkpoint holds objects and is not trusted, its ledger is not
            intact, its audit speaks against it, `out` is not empty, or cannot be written.
    """
    out = resolve_out(out)
    folder = RunFolder(run)
    trained = load_gan(folder, trust)
    card = _card(folder, trained, number, seed)
    images, labels = sample_images(trained.module, number, seed)
    with new_contents(out) as new:
        _write_npz(new, images, labels)
        (new / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        (new / "README.md").write_text(_readme(card), encoding="utf-8")
    return f"{number} images in {out}: {guarantee_text(card)}"


def _write_npz(folder: Path, images: Tensor, labels: Tensor | None) -> None:
    arrays: dict[str, Any] = {"images": images.permute(0, 2, 3, 1).numpy()}
    if labels is not None:
        arrays["labels"] = labels.numpy()
    np.savez_compressed(folder / IMAGES, **arrays)


def _card(run: RunFolder, trained: SavedModule, number: int, seed: int) -> dict[str, Any]:
    record = read_result(run) if run.result.exists() else {}
    config = record.get("config", trained.config)  # a resumed run may have changed it
    ledger = complete_ledger(run.ledger, trained.checkpoint)
    reason = doubt(record["privacy"]) if record else None
    if reason is not None:
        raise ConfigurationError(f"{run}: {reason}; its epsilon is not a guarantee and cannot be stated in a card.")
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
        "membership": privacy.get("membership"),
        "secure_randomness": ledger is not None and ledger.secure,
        "learned_from_canaries": is_audited(config),
        "inserted_copies": inserted_copies(config),
        "run": config["run"]["name"],
        "config_hash": config_hash(config),
        "commit": record.get("commit"),  # of the code that trained; none while a run is not finished
        "sampling_commit": commit(),
        "date": date.today().isoformat(),
    }


def _readme(card: Mapping[str, Any]) -> str:
    return render(
        "data_card.md",
        card=card,
        images_file=IMAGES,
        guarantee=guarantee_text(card),
        membership=membership_text(card["membership"]),
        card_file=CARD,
    )


def load_gan(run: RunFolder, trust: bool = False) -> SavedModule:
    """A run's generator, with where it comes from.

    Args:
        run: Folder.
        trust: True if the checkpoint may hold objects; see `read_checkpoint`.

    Raises:
        ConfigurationError: It holds no run, no generator, no checkpoint, one of another architecture, or one that holds
            objects and is not trusted.
    """
    require_module(run, read_config(run), GAN, "has no generator: train with module=gan model=conv_gan.")
    checkpoint = last_checkpoint(run, trust)
    if SHAPE not in checkpoint:
        raise ConfigurationError(
            f"{run.checkpoint} has no generator, although {run.config} describes one: restore both files of one run."
        )
    return load_module(run, checkpoint)
