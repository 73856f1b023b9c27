"""Runs that are killed at random moments and resumed, until they end with the bytes of a run that nobody disturbed.

Kills are SIGKILLs to a real `dpbench train` or `dpbench resume`, at a moment that is uniform over the processor's time
that such a command takes (which other work on the machine does not change). Every third or fourth run consists of
ordinary processes; the others are forks of one process that has imported everything, because imports take most of the
time of so small a run.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

from tests.endurance.runs import Process, append, preload, read

_STEPS = 240
_TINY = [
    "model=mlp",
    "model.hidden=[8]",
    "data.image_size=8",
    "logger=none",
    "strategy.delta=1e-4",
    f"trainer.max_steps={_STEPS}",
    "trainer.log_every_n_steps=5",
    "run.checkpoint_every_n_steps=9",
    "run.name=crash",
    "run.group=crash",
]
_TWO = ["trainer.devices=2", "+trainer.strategy=ddp_fork"]  # forks of a worker start as quickly as their parent
CONFIGURATIONS: dict[str, list[str]] = {  # the first two also on two processes
    "dpsgd": ["+optimizer.momentum=0.9", "data.val_size=200"],
    "adaptive_quantile, private metric": ["strategy=adaptive_quantile", "strategy.metrics={accuracy: 1}"],
    "discretized, corrected": ["strategy=discretized", "optimizer=adam", "optimizer.lr=0.01"],
    "target_epsilon, average": ["strategy.target_epsilon=3", "ema_decay=0.9"],
    "microbatches in pieces": ["strategy.microbatch_size=2", "strategy.max_physical_batch_size=24"],
}
_MOST = 8  # kills of one run, which ends undisturbed then


def kinds() -> list[tuple[str, bool, bool]]:
    """(configuration, on two processes, of ordinary processes), in the order in which runs take turns."""
    names = list(CONFIGURATIONS)
    turns = [(names[0], False), (names[0], True), *((name, False) for name in names[1:3])]
    turns += [(names[1], True), *((name, False) for name in names[3:])]
    return [  # of two ordinary processes rarely: a start of theirs takes half a minute
        (name, two, round_ == number // 2 if two else (number + round_) % 3 == 0)
        for round_ in range(4)
        for number, (name, two) in enumerate(turns)
    ]


def words_of(name: str, two: bool, ordinary: bool) -> list[str]:
    """The configuration on the command line."""
    processes = [] if not two else ["trainer=ddp_cpu", f"trainer.max_steps={_STEPS}", "trainer.log_every_n_steps=5"]
    return [*_TINY, *CONFIGURATIONS[name], *(processes if ordinary else _TWO if two else [])]


def _folder_state(run: Path) -> tuple[Any, ...]:
    paths = [run / name for name in ("ledger.jsonl", "checkpoints/last.ckpt", "metrics.csv")]
    return tuple(path.stat().st_mtime_ns if path.exists() else None for path in paths)


def phase_of(run: Path, before: tuple[Any, ...], resumed: bool, steps: int) -> str:
    """What a process was doing when it was killed, as its folder shows."""
    if (run / "result.json").exists():
        return "after the result"
    if any(name.startswith(".last.ckpt") for name in _left_over(run)):
        return "writing a checkpoint"
    if _folder_state(run) == before:
        return "start of a resume" if resumed else "start"
    if "result" in " ".join(_left_over(run)):
        return "writing the result"
    ledger = run / "ledger.jsonl"
    if not ledger.exists() or ledger.read_bytes().count(b"\n") <= steps:
        return "training"
    return "last step, test, result"


def _left_over(run: Path) -> list[str]:
    return [path.name for path in run.rglob(".*") if path.is_file()]


def differences(run: Path, reference: Path) -> list[str]:
    """What is not equal to the last bit in two finished runs; empty: nothing."""
    from dpbench.privacy.accounting.ledger import read_ledger

    one, other = _contents(run), _contents(reference)
    found = [part for part in one if one[part] != other[part]]
    return found if read_ledger(run / "ledger.jsonl").damage is None else [*found, "ledger damaged"]


def _contents(run: Path) -> dict[str, Any]:
    import torch

    from dpbench.canonical import digest_of

    state = torch.load(run / "checkpoints/last.ckpt", weights_only=False)
    record = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return {
        **{part: digest_of(state[part]) for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")},
        **{part: record[part] for part in ("metrics", "privacy", "steps", "config_hash")},
        "ledger": (run / "ledger.jsonl").read_bytes(),
    }


class Crash:
    """A series of runs.

    Args:
        folder: For runs and log; a second call goes on with the log.
        seed: Of every choice.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.log, self._seed = folder, folder / "crash.jsonl", seed
        folder.mkdir(parents=True, exist_ok=True)
        self._lives: dict[tuple[str, bool, bool], float] = {}

    def series(self, kills: int) -> bool:
        """Kill until there were so many kills of runs that ended; whether all of these are as they should be."""
        preload()
        every = kinds()
        while True:
            lines = read(self.log)
            ended = [line for line in lines if "differences" in line]
            done = sum(line["kills"] for line in ended)
            if done >= kills:
                return all(not line["differences"] for line in ended)
            number = max((line["run"] for line in lines), default=-1) + 1
            line = self.run(number, *every[number % len(every)])
            append(self.log, line)
            state = "identical" if not line["differences"] else f"DIFFERS: {line['differences']}"
            print(f"{done + line['kills']:4}/{kills} kills; run {number}, {line['kind']}: {state}", flush=True)

    def reference(self, name: str, two: bool, ordinary: bool) -> Path:
        """A run of the same configuration that nobody disturbs; made once."""
        place = self.folder / f"reference-{list(CONFIGURATIONS).index(name)}-{int(two)}{int(ordinary and two)}"
        done = place / "run" / "result.json"
        if not done.exists() or (name, two, ordinary) not in self._lives:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            process = Process.start(["train", *words_of(name, two, ordinary), "hydra.run.dir=run"], place, ordinary)
            status = process.wait()
            if status != 0:
                raise SystemExit(f"the reference run in {place} ended with {status}: see {process.log}")
            self._lives[name, two, ordinary] = process.computed()
        return place / "run"

    def run(self, number: int, name: str, two: bool, ordinary: bool) -> dict[str, Any]:
        """One run, with as many kills as it takes; the line of the log that says how it went."""
        reference = self.reference(name, two, ordinary)
        draw = random.Random(f"{self._seed}/{number}")
        place = self.folder / f"run-{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        run, kills = place / "run", []
        kind = f"{name}{' on two processes' if two else ''}{', ordinary processes' if ordinary else ''}"
        head = {"run": number, "kind": kind, "seed": f"{self._seed}/{number}", "two": two, "ordinary": ordinary}
        broken: list[str] = []
        while True:
            resumed, before = (run / "config.yaml").exists(), _folder_state(run)
            words = ["resume", "run"] if resumed else ["train", *words_of(name, two, ordinary), "hydra.run.dir=run"]
            process = Process.start(words, place, ordinary)
            moment = draw.uniform(0, self._lives[name, two, ordinary])
            whom = draw.choice(["parent", "all", "worker"]) if two else "parent"
            status = process.wait(moment if len(kills) < _MOST else float("inf"))
            if status is not None:
                break
            time.sleep(draw.uniform(0, 0.01))  # within a slice of the scheduler, too
            whom = process.kill(whom, draw.random())
            if not process.ended():
                broken.append(f"hangs after a kill of {whom}")
            status = process.status
            if status == 0:  # a worker whose work was done
                break
            if whom == "worker" and status == 1 and "dpbench: error: process" not in process.log.read_text():
                broken.append("no clear line")
            kill = {"moment": round(moment, 3), "whom": whom, "status": status, "left": _left_over(run)}
            kills.append({**kill, "phase": phase_of(run, before, resumed, _STEPS)})
            append(self.log, {**head, **kills[-1]})
            if (run / "result.json").exists():
                status = 0
                break
        if status == 0:
            broken += differences(run, reference)
        else:
            broken.append(f"status {status}: {process.log.read_text(encoding='utf-8').splitlines()[-1:]}")
        if not broken:
            shutil.rmtree(place)
        return {**head, "kills": len(kills), "differences": broken}
