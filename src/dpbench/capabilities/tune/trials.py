"""The trials of a tuning: drawn once, run one by one, continued after a kill, and gone when it is over.

Until then, their number, settings and keys lie in a hidden folder that its owner alone can read, like a key: whoever
knows the number of trials, or sees a trial that was not chosen, knows more than the ledger accounts for.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel
from scipy import stats

from dpbench.capabilities.tune.space import Space
from dpbench.capabilities.tune.stated import BestOfTrials
from dpbench.errors import ConfigurationError
from dpbench.files import write_json
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.readers import read_json
from dpbench.locks import open_locked
from dpbench.privacy.accounting.composition import Selection
from dpbench.privacy.accounting.ledger import Header, Release
from dpbench.privacy.accounting.writer import LedgerWriter, records_a_run
from dpbench.privacy.events import NOISE_END, SumQuery
from dpbench.privacy.mechanism.noise import add_gaussian_noise
from dpbench.privacy.randomness import Stream, digest_of, fresh_key

HIDDEN = ".trials"
_STATE = "state.json"
_SCORE = "score"
_DAMAGED = "choose another --out, since trials are never drawn again"
_FOLDERS = "folders"  # one level down: the links of the folder above count those below it


class Trial(NamedTuple):
    """A trial that was drawn.

    Attributes:
        words: Own options.
        key: Secret key of the noise on its score.
    """

    words: tuple[str, ...]
    key: int

    @property
    def name(self) -> str:
        """Name of its folder, which says nothing of the key."""
        return digest_of((self.key, Stream.SELECTION, 1)).hex()[:16]


class Winner(NamedTuple):
    """The trial with the best score.

    Attributes:
        trial: The trial.
        folder: Its folder, which is removed with all others by `forget`.
        score: Its score with noise, per expected record.
    """

    trial: Trial
    folder: Path
    score: float


class _State(BaseModel, strict=True):
    """Content of the file of trials: the request, and words and key of each trial."""

    request: dict[str, Any]
    trials: list[list[Any]]


def draw_trials(space: Space, selection: Selection, rng: np.random.Generator | None = None) -> list[Trial]:
    """Draw number, settings and keys of all trials.

    Args:
        space: Settings to draw from.
        selection: Distribution of the number.
        rng: Draws numbers and settings, in tests; None takes the operating system's entropy. Keys always do.
    """
    if rng is None:
        rng = np.random.Generator(np.random.PCG64DXSM(secrets.randbits(128)))
    return [Trial(space.draw(rng), fresh_key()) for _ in range(_number(selection, rng))]


def _number(selection: Selection, rng: np.random.Generator) -> int:
    distribution = distribution_of(selection)
    number = int(distribution.rvs(random_state=rng))
    while number < 1 and not math.isinf(selection.shape):  # the negative binomial distribution is truncated
        number = int(distribution.rvs(random_state=rng))
    return number


def distribution_of(selection: Selection) -> Any:
    """The distribution of the number of trials in scipy's form; negative binomial ones before they are truncated."""
    mean = selection.mean_trials
    shape = selection.shape
    if math.isinf(shape):
        return stats.poisson(mean)
    if mean == 1:
        return stats.randint(1, 2)
    return stats.logser(1 - selection.gamma) if shape == 0 else stats.nbinom(shape, selection.gamma)


def chance_of_at_most(selection: Selection, number: int) -> float:
    """Probability of at most so many trials."""
    distribution = distribution_of(selection)
    nothing = 0.0 if math.isinf(selection.shape) else float(distribution.cdf(0))
    return float((distribution.cdf(number) - nothing) / (1 - nothing))


@contextmanager
def tuning_alone(folder: Path) -> Iterator[None]:
    """Lock the folder of a tuning, which is made if need be.

    Raises:
        ConfigurationError: Another process tunes in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = open_locked(RunFolder(folder).lock)
    except BlockingIOError:
        raise ConfigurationError(f"another process is tuning in {folder}: choose another --out.") from None
    with lock:
        try:
            yield
        finally:
            if not records_a_run(RunFolder(folder).ledger) and not (folder / HIDDEN).exists():
                RunFolder(folder).lock.unlink(missing_ok=True)
                with suppress(OSError):  # it holds other files
                    folder.rmdir()  # of a command that was refused


def best_trial(
    folder: Path,
    request: dict[str, Any],
    state: Callable[[], tuple[BestOfTrials, list[Trial]]],
    run: Callable[[Trial, BestOfTrials, Path], float | None],
    expected_records: float,
    delta: float,
) -> Winner | None:
    """Run the trials that are missing, and return the best of all.

    Args:
        folder: Folder of the tuning, where the ledger lies.
        request: All that determines the settings; a tuning that is continued must have the same one.
        state: Function that gives the statement for the ledger and draws the trials; called at the first start only.
        run: Function of a trial, the statement and the trial's folder, which may hold its interrupted training: the sum
            of its scores over the held-out records, each from 0 to 1; None: it failed.
        expected_records: Expected number of held-out records.
        delta: δ of the ledger.

    Returns:
        The winner; None if no trial was drawn, or all failed, which looks the same.

    Raises:
        ConfigurationError: The request is another one, or files are lost or damaged.
    """
    hidden = folder / HIDDEN
    ledger = RunFolder(folder).ledger
    if not records_a_run(ledger):
        ledger.unlink(missing_ok=True)  # of a kill after its header
        best, trials = state()
        _hide(hidden, request, trials)
        _write_ledger(ledger, best, delta)
    best = stated_in(ledger)
    winner: Winner | None = None
    for trial in _trials_in(hidden, request, ledger):
        place = hidden / _FOLDERS / trial.name
        score = _score_of(trial, best, place, run, expected_records)
        # The first of equal scores: as trials are exchangeable, one of them at random.
        if score is not None and (winner is None or score > winner.score):
            winner = Winner(trial, place, score)
    return winner


def _score_of(
    trial: Trial,
    best: BestOfTrials,
    place: Path,
    run: Callable[[Trial, BestOfTrials, Path], float | None],
    expected_records: float,
) -> float | None:
    """Score of a trial, from its file or by running it: with noise before it is written."""
    file = place / f"{_SCORE}.json"
    if not file.exists():
        total = run(trial, best, place)
        if total is not None:
            sums = torch.tensor([total], dtype=torch.float64)
            if best.score_noise_multiplier is not None:
                add_gaussian_noise(sums, [(1, best.score_noise_multiplier)], (trial.key, Stream.SELECTION))
            total = float(sums) / expected_records
        place.mkdir(exist_ok=True)
        write_json(file, {_SCORE: total})
    score: float | None = read_json(file, dict[str, float | None], _DAMAGED)[_SCORE]
    return score


def _hide(hidden: Path, request: dict[str, Any], trials: Sequence[Trial]) -> None:
    """Write the trials into a new folder for its owner alone."""
    shutil.rmtree(hidden, ignore_errors=True)  # drawn before a kill, and never begun: the ledger was not written
    hidden.parent.mkdir(parents=True, exist_ok=True)
    hidden.mkdir(mode=0o700)
    (hidden / _FOLDERS).mkdir()
    content = {"request": request, "trials": [[trial.words, f"{trial.key:x}"] for trial in trials]}
    write_json(hidden / _STATE, content)
    os.chmod(hidden / _STATE, 0o600)


def _trials_in(hidden: Path, request: dict[str, Any], ledger: Path) -> list[Trial]:
    try:
        content = read_json(hidden / _STATE, _State, _DAMAGED)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{ledger} is of a tuning that is over, or of which the trials are gone: they are never drawn again, and "
            "its epsilon is spent. Choose another --out."
        ) from None
    if content["request"] != json.loads(json.dumps(request)):
        raise ConfigurationError(
            f"{ledger.parent} holds a tuning of other settings, which were fixed before its first trial: repeat its "
            f"own command, or choose another --out. It was begun with {content['request']}."
        )
    return [Trial(tuple(words), int(key, 16)) for words, key in content["trials"]]


def _write_ledger(path: Path, best: BestOfTrials, delta: float) -> None:
    header = Header(
        unit=best.unit,
        neighboring_relation=best.neighboring_relation,
        population=best.population,
        delta=delta,
        noise_end=NOISE_END,
    )
    writer = LedgerWriter(path, header)
    # The cost is that of the statement, whatever the query says: its noise multiplier is the least of any trial.
    least = min(part.noise_multiplier for setting in best.settings for part in setting.releases)
    writer.append(Release(0, best.with_curve(), (SumQuery(best.kind, 1.0, least),)))
    writer.close()


def stated_in(ledger: Path) -> BestOfTrials:
    """The statement of a tuning's ledger.

    Raises:
        ConfigurationError: It is a ledger of something else, or damaged.
    """
    from dpbench.privacy.accounting.ledger import read_ledger

    book = read_ledger(ledger)
    samplings = [release.sampling for _, release in book.releases]
    if book.damage is not None or len(samplings) != 1 or not isinstance(samplings[0], BestOfTrials):
        raise ConfigurationError(f"{ledger} is not that of a tuning, or damaged: choose another --out.")
    return samplings[0]


def forget(folder: Path) -> None:
    """Remove all trials, their number and their keys."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder / HIDDEN)
