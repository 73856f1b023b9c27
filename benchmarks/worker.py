"""A process that is measured: `benchmarks.processes` starts it, as a fork or by `-m benchmarks.worker FD WORDS`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection

from benchmarks import machine
from benchmarks.orders import Orders, first_steps, one_line

_SIZES = 60  # lots, after which nearly all sizes were met
_SIZES_OF_GRAPHS = 600  # a size is recorded when it comes again


def main(pipe: Connection, words: tuple[str, ...]) -> None:
    """Serve orders until there are no more.

    Args:
        pipe: To whoever measures.
        words: ("steps", workload, device, method), ("networks", name, way) or
            ("users", family, kind, task, users, *methods).
    """
    try:
        if words[0] == "steps":
            _, workload, device, method = words
            _steps(pipe, workload, device, method)
        elif words[0] == "networks":
            _networks(pipe, *words[1:])
        else:
            _, family, kind, task, users, *methods = words
            _users(pipe, family, kind, task, int(users), methods)
    except Exception as error:  # whatever a peer may come up with: the others are measured all the same
        pipe.send({"error": one_line(error)})


def _steps(pipe: Connection, name: str, device: str, method: str) -> None:
    """Steps of a method; says first how much memory the first two of them took."""
    import torch

    from benchmarks.methods import MALLOC, PURE, TRITON, step_of
    from benchmarks.workloads import GPU_WORKLOADS
    from dpbench.harness.run.runtime import keep_large_blocks
    from dpbench.privacy import kernels, native

    torch.set_num_threads(1)  # while others start beside it
    native.select("off" if method.endswith(PURE) else "auto")
    kernels.select(TRITON if method.endswith(TRITON) else "none")
    if MALLOC not in method:
        keep_large_blocks()
    workload = GPU_WORKLOADS[name]
    if method.startswith("harness/"):
        from benchmarks.ours import harness

        sizes = _SIZES_OF_GRAPHS if method.endswith("graph") and device == "cuda" else _SIZES
        harness(workload, method.removeprefix("harness/"), device, Orders(pipe, device, sizes))
        return
    orders = Orders(pipe, device, _SIZES if method.endswith("drawn") else 0)
    step = step_of(method, workload, device)
    peak = first_steps(step, device)
    orders.functions[method] = step
    orders.say(peak_mb=peak)
    orders.advance()


def _networks(pipe: Connection, name: str, way: str) -> None:
    """Steps of a network in one of the ways; says first how much memory the first two of them took."""
    import torch

    from benchmarks.networks import serve

    torch.set_num_threads(1)
    serve(Orders(pipe), name, way)


def _users(pipe: Connection, family: str, kind: str, name: str, users: int, methods: Sequence[str]) -> None:
    """Rounds of users, by dpbench or by a peer; says first what it found out about itself."""
    import torch

    from benchmarks.users.tasks import TASKS

    torch.set_num_threads(1)
    task = TASKS[name]
    # Flower trains in processes of Ray's.
    orders = Orders(pipe, cpu_clock=machine.cpu_of_tree if family == "flower" else time.process_time)
    if family == "pfl":
        from benchmarks.users.pfl_ import serve as serve_pfl

        serve_pfl(task, users, orders, kind, {"peer": f"pfl {version('pfl')}"})
    elif family == "flower":
        from benchmarks.users.flower_ import serve as serve_flower

        peer = {"peer": f"flwr {version('flwr')}, ray {version('ray')}"}
        serve_flower(task, users, orders, kind, peer)
    else:
        from benchmarks.users.ours import serve
        from benchmarks.users.plain import add_functions

        facts = add_functions(orders.functions, task, users, methods)
        serve(task, users, orders, facts)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), tuple(sys.argv[2:]))
