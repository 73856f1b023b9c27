"""One tuning from its command to its result."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from dpbench.capabilities.tune import planning
from dpbench.capabilities.tune.planning import LoadedData, Request
from dpbench.capabilities.tune.score import check_score, sum_of_scores
from dpbench.capabilities.tune.space import Space, read_space
from dpbench.capabilities.tune.stated import BestOfTrials, Setting
from dpbench.capabilities.tune.trials import HIDDEN, Trial, best_trial, draw_trials, forget, stated_in, tuning_alone
from dpbench.capabilities.tune.winner import TUNING, hide_times, publish
from dpbench.data.module import PrivateDataModule
from dpbench.errors import ConfigurationError, Diverged, DPBenchError, Interrupted, OutOfMemory
from dpbench.harness.run import build
from dpbench.harness.run.processes import processes_to_start
from dpbench.harness.run.saved_module import last_checkpoint, load_module
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.numbers import epsilon_text
from dpbench.templates import render

_HERE = Path(__file__).parent
_NOISE = "strategy.noise_multiplier="


def tune(request: Request, folder: Path) -> str:
    """Train trials, and publish the best one.

    Args:
        request: Settings and budget.
        folder: Folder of the result.

    Returns:
        Text for the terminal.

    Raises:
        DPBenchError: A setting is refused, or the folder holds another tuning.
        Interrupted: A signal; the same command goes on.
    """
    with tuning_alone(folder):
        if (folder / TUNING).exists():
            forget(folder)  # which a kill has prevented
            hide_times(folder)
            raise ConfigurationError(f"{folder} holds the result of a tuning: choose another --out.")
        facts = _tune(request, folder)
        forget(folder)
        hide_times(folder)
    text = render(_HERE / "tuned.txt.jinja", folder=folder, facts=facts, request=request, number=epsilon_text)
    return text.rstrip("\n")


def _tune(request: Request, folder: Path) -> dict[str, Any]:
    """Run the trials that are missing, and write the result."""
    flags = () if request.config_dir is None else (f"--config-dir={request.config_dir}",)
    space = read_space(request.words, lambda words: planning.swept_by([*flags, *words]))
    space = replace(space, words=(*flags, *space.words))
    config = planning.compose([*space.words, *space.draw(np.random.default_rng(0)), f"{_NOISE}1.0"])
    data = _data_of(config, request)
    loaded = LoadedData(config["data"], data)
    check_score(build.build_module(config, data), request.score, request.score_bound)

    def state() -> tuple[BestOfTrials, list[Trial]]:
        with _hidden_output():
            plans = planning.planned(space, request.delta, loaded)
        best = planning.calibrated(request, plans, space.free)
        print(_before(best, request, space, _expected_records(data)), flush=True)
        return best, draw_trials(space, request.selection)

    with _bar():
        try:
            winner = best_trial(
                folder,
                asdict(request),
                state,
                partial(_run, request, space, loaded),
                _expected_records(data),
                request.delta,
            )
        except Interrupted as error:
            kept = f"Trials are kept in {folder / HIDDEN}, which is secret"
            raise Interrupted(error.number, f"the same command (--out {folder})", kept) from None
        return publish(folder, asdict(request), stated_in(RunFolder(folder).ledger), winner)


def _data_of(config: dict[str, Any], request: Request) -> PrivateDataModule[Any]:
    """The data of a trial, with held-out records for its score.

    Raises:
        ConfigurationError: There are none, or a record more would change which they are.
    """
    if processes_to_start(config["trainer"]) > 1:
        raise ConfigurationError("dpbench tune trains in one process: set trainer.devices=1.")
    strategy = build.build_strategy(config, RunFolder(Path(os.devnull)))
    with _hidden_output():
        data = build.build_data(config, strategy)
    if not isinstance(data, PrivateDataModule):
        raise ConfigurationError(
            f"data: {type(data).__name__} holds out no records for a score: subclass PrivateDataModule."
        )
    if request.is_public:
        if data.val_set is None:
            raise ConfigurationError("--validation public: the data set has no validation data.")
    elif config["data"].get("split") != "hash" or not _expected_records(data):
        option = data._val_option
        raise ConfigurationError(
            f"a score needs records that are held out by a hash: set data.split=hash and data.{option}=1000, say, or "
            "declare validation data public (--validation public)."
        )
    return data


def _expected_records(data: PrivateDataModule[Any]) -> float:
    """Expected number of held-out records: the only one by which a score is divided."""
    return float(data._val_count) or float(len(data.val_set or ()))


def _run(
    request: Request,
    space: Space,
    loaded: LoadedData,
    trial: Trial,
    best: BestOfTrials,
    place: Path,
) -> float | None:
    """Train a trial, or go on with it, and measure its score; None if it fails."""
    setting = setting_of(best, space, trial)
    (noise,) = (word for word in setting.words if word.startswith(_NOISE))
    words = [*space.words, *trial.words, noise, f"strategy.delta={request.delta!r}"]
    config = planning.compose(words)
    with _hidden_output():
        try:
            run = RunFolder(place)
            if run.checkpoint.exists():
                config["run"]["resume"] = True
            else:
                # Killed before its first checkpoint: what it had released nobody has seen.
                shutil.rmtree(place, ignore_errors=True)
            shared = loaded.of(config)
            if not run.finished:
                train(config, place, [planning.PlanReader(setting)], show=False, loaded=shared)
            data = shared or _data_of(config, request)
            options = data.model_options() if hasattr(data, "model_options") else {}
            module = load_module(run, last_checkpoint(run), options).module
        except (Interrupted, MemoryError):
            raise
        except (Diverged, OutOfMemory):
            return None
        except DPBenchError as error:  # of settings or of the machine, and never of what records say
            raise type(error)(str(error).replace(str(place), "a trial's folder")) from None
        except Exception:  # of the code of a user: its words may be of records
            return None
        return sum_of_scores(module, data, request.score, request.score_bound)


def setting_of(best: BestOfTrials, space: Space, trial: Trial) -> Setting:
    """The setting of the ledger that a trial has."""
    drawn = set(trial.words)
    for setting in best.settings:
        own = [word for word in setting.words if not word.startswith(_NOISE) and word not in space.free]
        if drawn.issuperset(own):
            return setting
    raise ConfigurationError(f"{' '.join(trial.words)} is no setting that the ledger states.")


def _before(best: BestOfTrials, request: Request, space: Space, expected_records: float) -> str:
    noise = best.score_noise_multiplier
    return render(
        _HERE / "tuning.txt.jinja",
        best=best,
        request=request,
        options=[str(option) for option in space.options],
        rows=planning.costs_of_looking(best, request.delta),
        score_std=None if noise is None else noise / expected_records,
        number=epsilon_text,
    )


@contextlib.contextmanager
def _bar() -> Iterator[None]:
    """A bar that shows seconds, and neither the number of trials nor their ends."""
    ended = threading.Event()
    with (
        os.fdopen(os.dup(2), "w") as terminal,  # the trials cannot write to it
        tqdm.tqdm(bar_format="tuning, {elapsed}", leave=False, disable=None, file=terminal) as bar,
    ):

        def refresh() -> None:
            while not ended.wait(1.0):
                bar.refresh()

        thread = threading.Thread(target=refresh, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextlib.contextmanager
def _hidden_output() -> Iterator[None]:
    """Within, nothing is printed or logged, by any code: a line for each trial would tell their number."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            for number in (1, 2):
                os.dup2(nowhere.fileno(), number)
            yield
    finally:
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        logging.disable(disabled)
