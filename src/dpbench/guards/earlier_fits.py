"""The run of a training: a new one, or the one that a ledger records already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dpbench.errors import ConfigurationError
from dpbench.guards.guard import Guard
from dpbench.privacy.accounting.ledger import FILE_NAME
from dpbench.privacy.accounting.seal import Seal, difference
from dpbench.privacy.accounting.writer import records_a_run
from dpbench.privacy.budget import Budget

_TRAINED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter → (ledger of what it holds, its seal)


PRIVATE_PAST = (
    "the checkpoint was made by a private strategy: continuing without privacy would void its epsilon. Start a new run."
)


class EarlierFits(Guard):
    """Remembers where the releases are recorded that a module holds."""

    name = "earlier fits"
    prevents = "a trained model continues with a ledger or checkpoint that does not cover its earlier training"

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._trained: list[nn.Parameter] = []

    def on_attach(self) -> None:
        """From now on there may be releases."""
        self._trained += self.session.trained.parameters

    def on_change(self) -> None:
        """Note the parameters trained so far: frozen or taken out, they hold releases all the same."""
        self._trained += self.session.trained.parameters

    def on_end(self) -> None:
        """Remember the ledger, with the parameters."""
        if self._trained:
            releases = self.session.releases
            note_training(self.session.training.module, releases.budget, releases.num_releases, self._trained)
            self._trained = []


def note_training(module: nn.Module, budget: Budget, releases: int, trained: Sequence[nn.Parameter] = ()) -> None:
    """Note the ledger of the releases that the parameters of a module hold, wherever these are used.

    Args:
        module: Its trainable parameters hold them.
        budget: Budget of the training.
        releases: Number of releases that were made.
        trained: Parameters that were trained, and may be frozen by now.
    """
    if not releases or budget.path is None:
        return
    record = (budget.path, budget.seal)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in (*trained, *trainable):
        _TRAINED[parameter] = record


def other_record(module: nn.Module, ledger: Path, after: Path | None) -> Path | None:
    """Ledger of releases that a module holds and a given ledger does not; None if there are none.

    A ledger that was moved away, deleted or edited no longer has them, though another may lie in its place.

    Args:
        module: The module to be trained.
        ledger: Ledger of the coming releases.
        after: Ledger with which that one begins.
    """
    ledgers = {ledger.resolve()}
    if after is not None:
        ledgers.add(after.resolve())
    for parameter in module.parameters():
        if parameter not in _TRAINED:
            continue
        path, seal = _TRAINED[parameter]
        if path.resolve() not in ledgers or not _holds(path, seal):
            return Path(path)
    return None


def _holds(path: Path, seal: Seal | None) -> bool:
    """Return whether a ledger begins as it was sealed; ranks other than 0 have no seal."""
    return seal is None or (path.is_file() and difference(path, seal, "") is None)


def refuse_unknown_past(private_past: bool | None, private: bool) -> None:
    """Raise ConfigurationError where a run would go on from a checkpoint of the other kind.

    Args:
        private_past: True if a private strategy made the checkpoint; None: no strategy of this project did.
        private: True if this one is private.
    """
    if private_past and not private:
        raise ConfigurationError(PRIVATE_PAST)
    if private and not private_past:
        raise ConfigurationError(
            "the checkpoint (or what this trainer trained before) was not made by a private strategy, so its "
            "weights depend on the data in ways that no ledger covers: start a new run with a new trainer (to start "
            "from public weights, load them into the module)."
        )


def ledger_in(folder: Path, last: Path | None, resumes: bool, known: Seal | None) -> Path:
    """Choose the ledger of a training for which none was given.

    That is `ledger.jsonl` in a folder; for a further run, such as that of a notebook's cell that is run again, it is
    one in the first free of the folders run-2, run-3, ... below, with room for all other files of the run.

    Args:
        folder: Folder of the trainer.
        last: Ledger of the strategy's earlier fit, in which it goes on; None before it made any.
        resumes: True if the training goes on from a checkpoint.
        known: The checkpoint's seal of its ledger, if it has one.

    Raises:
        ConfigurationError: The checkpoint may be of several of them, which begin alike: runs of one seed.
    """
    first = folder / FILE_NAME
    number = 1
    ledger = first
    possible = []
    while records_a_run(ledger):
        if last is not None and ledger.resolve() == last.resolve():
            return ledger
        if known is not None and difference(ledger, known, "") is None:
            possible.append(ledger)
        number += 1
        ledger = folder / f"run-{number}" / FILE_NAME
    if len(possible) > 1:
        raise ConfigurationError(
            f"the checkpoint may belong to the run recorded in {possible[0]} or in {possible[1]}, which begin alike: "
            "pass the path of its ledger (ledger=...)."
        )
    if possible:
        return possible[0]
    return first if resumes else ledger


def goes_on(pl_module: pl.LightningModule, ledger: Path, last: Path | None, after: Path | None) -> bool:
    """Return whether a fit without a checkpoint goes on with the run that its strategy made before.

    Args:
        pl_module: The module to be trained.
        ledger: Ledger of the coming releases.
        last: Ledger of the strategy's earlier fit; None before it made any.
        after: Ledger with which that one begins.

    Returns:
        True if the ledger is the same, so that epsilon is of all fits together; else a new run begins.

    Raises:
        ConfigurationError: The module, or a part that it shares with a trained one, holds releases that another ledger
            records, so that this one would not cover it.
    """
    if last is not None and ledger.resolve() == last.resolve():
        return True
    before = other_record(pl_module, ledger, after)
    if before is not None:
        if before.resolve() == ledger.resolve():
            place = f"whose releases {before} no longer has"
        else:
            place = f"recorded in {before}, not in {ledger}"
        raise ConfigurationError(
            f"this {type(pl_module).__name__} was already trained in a private run {place}: create the module anew, "
            "with all of its parts, for a new run, or continue from the checkpoint of the earlier one "
            f"(trainer.fit(..., ckpt_path=...), and ledger={str(before)!r}). For a second stage in one budget "
            f"(unfreezing, a new head, another learning rate), make a new strategy with after={str(before)!r}."
        )
    return False


def refuse_unknown_training(trainer: pl.Trainer, trains_here: bool) -> None:
    """Refuse a checkpoint by a process that started others, which trained, and has their weights since.

    Raises:
        ConfigurationError: Their releases are not known here: the checkpoint would say that there were none.
    """
    if trainer.state.finished and not trains_here:
        raise ConfigurationError(
            "this process did not train and does not know what was released, so its checkpoint would claim that "
            "nothing was: if subprocesses train (ddp_spawn, ddp_fork, ddp_notebook), let a "
            "ModelCheckpoint save there, or save only weights (trainer.save_checkpoint(..., weights_only=True))."
        )
