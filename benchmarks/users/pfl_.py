"""The round in pfl-research (Granqvist et al. 2024): its simulation with the Gaussian mechanism applied centrally."""

from __future__ import annotations

import os
from types import MethodType
from typing import Any

os.environ["PFL_PYTORCH_DEVICE"] = "cpu"

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism
from torch import Tensor, nn

from benchmarks.orders import Orders
from benchmarks.users.tasks import CLIP, MOMENTUM, NOISE, Task, loss

EVALUATED = "evaluated"  # metrics of every user before and after its training, as where pfl evaluates in a round


class _Conductor(TrainingProcessCallback):  # type: ignore[misc]
    """Makes a round of pfl's loop when one is ordered."""

    def __init__(self, orders: Orders, facts: dict[str, Any]) -> None:
        self._orders = orders
        self._facts = facts

    def on_train_begin(self, *, model: Any) -> Any:
        self._orders.say(**self._facts)
        self._orders.advance()
        return Metrics()

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
        self._orders.advance()
        return False, Metrics()


def _of_pfl(model: nn.Module) -> nn.Module:
    """The network with the two methods that pfl asks for."""

    def own_loss(self: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss(self.train()(inputs), targets)

    @torch.no_grad()
    def metrics(self: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        mean = float(loss(self.eval()(inputs), targets))
        return {"loss": Weighted(mean * len(inputs), len(inputs))}

    model.loss, model.metrics = MethodType(own_loss, model), MethodType(metrics, model)  # type: ignore[assignment]
    return model


def serve(task: Task, users: int, orders: Orders, kind: str, facts: dict[str, Any]) -> None:
    """Train as long as rounds are ordered; `kind` "evaluated" takes metrics in every round, else none does."""
    inputs, targets = task.data(users)

    def user(number: int) -> Any:
        return Dataset((inputs[number], targets[number]), user_id=str(number))

    net = _of_pfl(task.model())
    model = PyTorchModel(
        model=net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0, momentum=MOMENTUM),
    )
    data = FederatedDataset(user, get_user_sampler("random", list(range(users))))
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, NOISE))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=1 if kind == EVALUATED else 10**8,  # of the first round, which does not count
            train_cohort_size=users,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser(), noise]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=task.lr, local_num_epochs=1, local_batch_size=task.batch
        ),
        model_eval_params=None,
        callbacks=[_Conductor(orders, facts)],
        send_metrics_to_platform=False,
    )
