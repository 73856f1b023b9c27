"""`dpbench sample`: a synthetic data set with a card that says how private it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.files import replacing
from dpbench.harness.run.saved_config import read_config
from dpbench.harness.run.saved_module import SavedModule, last_checkpoint, load_module, require_module
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.ledgers import read_run_ledger
from dpbench.harness.runs.numbers import epsilon_text, membership_text
from dpbench.harness.runs.provenance import commit, config_hash
from dpbench.harness.runs.record import doubt, has_canaries, privacy_of, read_result
from dpbench.modules.gan import GAN
from dpbench.modules.image_generator import SHAPE
from dpbench.privacy.accounting.ledger import Ledger
from dpbench.privacy.accounting.seal import STATE_KEY, Seal, difference
from dpbench.templates import render

IMAGES = "images.npz"
CARD = "privacy.json"
_IMAGES_AT_ONCE = 1000
_MOST_IMAGES = 10_000_000


def sample(
    run: Path,
    number: int,
    out: Path,
    seed: int = 0,
    trust: bool = False,
) -> str:
    """Write a synthetic data set: images.npz, with uint8 images (N, H, W, C) and labels (N,), and its card.

    Sampling is post-processing of what the discriminator released: it costs nothing, however often it is done.

    Args:
        run: Folder of a trained GAN.
        number: Of images.
        out: Folder, which appears when it is complete.
        seed: Of the noise.
        trust: Whether the checkpoint may hold objects, see `read_checkpoint`.

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
    images, labels = make(trained.module, number, seed)
    with new_contents(out) as new:
        _write_npz(new, images, labels)
        (new / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        (new / "README.md").write_text(_readme(card), encoding="utf-8")
    return f"{number} images in {out}: {guarantee(card)}"


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
        "learned_from_canaries": has_canaries(config),
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
    strategy = checkpoint.get("callbacks", {}).get(STATE_KEY, {"private": False})
    if not strategy["private"]:
        return None
    ledger = read_run_ledger(path) if path.exists() else None
    if ledger is None or ledger.damage or len(ledger.releases) < strategy["releases"]:
        raise ConfigurationError(
            f"{path} is missing, damaged or cut: the checkpoint made {strategy['releases']} releases. Without all of "
            "them no epsilon can be stated; restore the ledger."
        )
    seal = Seal.read(strategy.get("ledger"))
    reason = ledger.doubt
    if not reason and seal is not None:
        reason = difference(path, seal, "the checkpoint")
    if reason is not None:
        raise ConfigurationError(f"{path}: {reason}. No epsilon can be stated; restore the ledger of this run.")
    return ledger


def guarantee(card: Mapping[str, Any]) -> str:
    """What a card states of epsilon, in one line."""
    if card["delta"] is None:
        return "NOT private, it was trained without privacy"
    epsilons = []
    for name, epsilon in card["epsilon"].items():
        if epsilon is not None:
            epsilons.append(f"ε = {epsilon_text(epsilon)} ({name.upper()})")
    stated = ", ".join(epsilons) or "no finite ε"
    relation = str(card["neighbouring_relation"]).replace("_", " ")
    return f"{stated} at δ = {card['delta']:g}, unit: {card['unit']}, {relation}"


def _readme(card: Mapping[str, Any]) -> str:
    return render(
        "data_card.md",
        card=card,
        images_file=IMAGES,
        guarantee=guarantee(card),
        membership=membership_text(card["membership"]),
        card_file=CARD,
    )


def load_gan(run: RunFolder, trust: bool = False) -> SavedModule:
    """A run's generator, with where it comes from.

    Args:
        run: Folder.
        trust: Whether the checkpoint may hold objects, see `read_checkpoint`.

    Raises:
        ConfigurationError: It holds no run, no generator, no checkpoint, one of another architecture, or one that holds
            objects and is not trusted.
    """
    require_module(run, read_config(run), GAN, "holds no generator: train one with module=gan model=conv_gan.")
    checkpoint = last_checkpoint(run, trust)
    if SHAPE not in checkpoint:
        raise ConfigurationError(f"{run.checkpoint} is of another architecture than {run.config} says: no generator's.")
    return load_module(run, checkpoint)


def make(module: GAN, number: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Images, every class as often as the others (frequencies of the training data are private).

    Args:
        module: From `load_gan`.
        number: Of images.
        seed: Of the noise; the same seed gives the same images.

    Returns:
        uint8 (N, C, H, W), and labels (N,) where the generator knows classes.

    Raises:
        ConfigurationError: The number or the seed is out of range, or what was made are no images.
    """
    if not 1 <= number <= _MOST_IMAGES:
        raise ConfigurationError(
            f"--num-samples must lie between 1 and {_MOST_IMAGES:,} images, not {number} (more: with other seeds)."
        )
    if not 0 <= seed < 2**63:
        raise ConfigurationError(f"--seed must lie between 0 and 2^63 - 1, not {seed}.")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % module.num_classes
    parts = []
    for part in torch.split(labels, _IMAGES_AT_ONCE):
        images = module.sample(part, generator)
        if not images.isfinite().all():
            raise ConfigurationError("the generator makes values that are not finite: its training has diverged.")
        parts.append((255 * images).round().byte().cpu())
    return torch.cat(parts), labels if module.classes else None


@contextmanager
def new_contents(out: Path) -> Iterator[Path]:
    """An empty folder that becomes `out` when the block ends without an error.

    Raises:
        ConfigurationError: It cannot be written; what was there is still there.
    """
    try:
        with replacing(out) as new:
            new.mkdir(parents=True)
            yield new
    except OSError as error:
        raise ConfigurationError(f"--out {out} cannot be written: {error.strerror}.") from error


def resolve_out(out: Path) -> Path:
    """Resolve the links of a new folder's path.

    Raises:
        ConfigurationError: Something is there, or links lead nowhere.
    """
    try:
        out = out.resolve()
    except (RuntimeError, OSError) as error:  # a loop of links
        raise ConfigurationError(f"{out} cannot be written: {error}.") from error
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigurationError(f"{out} is not empty: choose another folder, or remove it.")
    return out
