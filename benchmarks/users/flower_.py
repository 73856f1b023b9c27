"""The round in Flower's simulation (Beutel et al. 2020): one Ray worker on one core, which trains one client at a time.

Clients keep their data and a network in memory from round to round, so that what is timed is training, messages,
and the server's share.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from benchmarks.orders import Orders
from benchmarks.users.tasks import CLIP, NOISE, TASKS, Task, loss

PRIVATE = "private"  # clipped and noised by Flower's own strategy
_TASK, _USERS = "BENCHMARK_TASK", "BENCHMARK_USERS"  # in the environment of Ray's workers


@cache
def _world() -> tuple[Task, nn.Module, Tensor, Tensor]:
    """What a worker keeps."""
    torch.set_num_threads(1)
    task = TASKS[os.environ[_TASK]]
    return task, task.model(), *task.data(int(os.environ[_USERS]))


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Local training of one client."""
    task, model, inputs, targets = _world()
    user = int(context.node_config["partition-id"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    for rows in torch.split(torch.randperm(task.rows_of_user), task.batch):
        optimizer.zero_grad()
        loss(model(inputs[user, rows]), targets[user, rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    arrays, metrics = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": task.rows_of_user})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def serve(task: Task, users: int, orders: Orders, kind: str, facts: dict[str, Any]) -> None:
    """Train as long as rounds are ordered; `kind` "private" clips and noises, else Flower averages only."""
    os.environ |= {_TASK: task.name, _USERS: str(users)}
    server = ServerApp()

    def between(number: int, arrays: ArrayRecord) -> None:
        if number == 0:
            orders.say(**facts)
        orders.advance()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy: Any = FedAvg(fraction_evaluate=0.0, min_train_nodes=users, min_available_nodes=users)
        if kind == PRIVATE:
            strategy = DifferentialPrivacyServerSideFixedClipping(strategy, NOISE, CLIP, users)
        arrays = ArrayRecord(task.model().state_dict())
        strategy.start(grid, arrays, num_rounds=10**6, timeout=3600, evaluate_fn=between)

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server,
        client_app,
        users,
        backend_config={
            "client_resources": resources,
            "init_args": {"num_cpus": 1, "include_dashboard": False, "log_to_driver": False},
        },
    )
