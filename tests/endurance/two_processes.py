"""Trainings on two processes beside busy ones: how many are lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.endurance.runs import Process, append, read

_WORDS = [
    "train",
    "model=mlp",
    "model.hidden=[8]",
    "data.image_size=8",
    "logger=none",
    "strategy.delta=1e-4",
    "trainer=ddp_cpu",
    "trainer.max_steps=5",
    "hydra.run.dir=run",
]


class TwoProcesses:
    """A series of runs of ordinary processes; a second call goes on with the log of the first."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.log, self._seed = folder, folder / "two_processes.jsonl", seed
        folder.mkdir(parents=True, exist_ok=True)

    def series(self, runs: int, beside: int) -> bool:
        """Run until the log has so many; whether none was lost."""
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(beside)]
        try:
            while len(read(self.log)) < runs:
                line = self.run(len(read(self.log)), beside)
                append(self.log, line)
                print(f"{line['run'] + 1:4}/{runs} runs; {'LOST' if line['lost'] else 'ended well'}", flush=True)
        finally:
            for process in busy:
                process.kill()
        return not any(line["lost"] for line in read(self.log))

    def run(self, number: int, beside: int) -> dict[str, Any]:
        """One run; lost unless it ends with status 0 and a result."""
        place = self.folder / f"two-{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        process = Process.start([*_WORDS, f"seed={self._seed + number}"], place, ordinary=True)
        status = process.wait()
        process.kill("all")
        printed = process.log.read_text(encoding="utf-8")
        result = place / "run" / "result.json"
        lost = status != 0 or not result.exists() or json.loads(result.read_text(encoding="utf-8"))["steps"] != 5
        died = " died in the training" in printed  # and what it had left to do was nothing
        if not lost:
            shutil.rmtree(place)
        return {"run": number, "beside": beside, "status": status, "lost": lost, "died": died}
