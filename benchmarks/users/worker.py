"""One process that makes rounds when told to: `python -m benchmarks.users.worker FAMILY KIND TASK USERS`."""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import version

from benchmarks.users.clocks import Rounds, cpu_of_tree


def main(family: str, kind: str, name: str, users: int) -> None:
    """Serve orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    rounds = Rounds(answers, cpu_of_tree if family == "flower" else time.process_time)
    try:
        import torch

        from benchmarks.users.tasks import TASKS

        torch.set_num_threads(1)
        task = TASKS[name]
        if family == "pfl":
            from benchmarks.users.pfl_ import serve as pfl

            rounds.facts["peer"] = f"pfl {version('pfl')}"
            pfl(task, users, rounds, kind)
        elif family == "flower":
            from benchmarks.users.flower_ import serve as flower

            rounds.facts["peer"] = f"flwr {version('flwr')}, ray {version('ray')}"
            flower(task, users, rounds, kind)
        else:
            from benchmarks.users.ours import serve
            from benchmarks.users.plain import limit, naive

            if kind == "limit":
                rounds.own["limit"], rounds.facts["limit"] = limit(task, users)
            rounds.own["naive"] = naive(task, users)
            serve(task, users, rounds)
    except Exception as error:  # whatever a peer may come up with: the others are measured all the same
        rounds.say(error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:200])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
