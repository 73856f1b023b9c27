"""Users as records: a batch is a cohort, and a record's vector is the change of the weights by local training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.local_training import Client, LocalStep, LocalTraining, kept_randomness
from dpbench.capabilities.users.state import UserState
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import Cohort
from dpbench.errors import ConfigurationError
from dpbench.privacy.events import UNITS
from dpbench.privacy.gradients.parameter import InstantiatedGradients, OneRecord
from dpbench.privacy.randomness import Stream, keyed_generator, seed_global_generators
from dpbench.privacy.releases import ReleaseEngine, TrainableParameters
from dpbench.records.local_logs import LocalLogs
from dpbench.records.noise_step import noise_batch
from dpbench.records.source import SECOND_RELEASE, Piece
from dpbench.records.training import Training, TrainingStep

_TIMES_TELL = (
    "the time of a round grows with the examples of its users, and no noise covers that: timing of this "
    "training (its duration, time stamps of logs, ms per step) may reveal that a very large user takes part. "
    "LocalTraining(max_examples=...) bounds it (records.local.max_examples on the command line)."
)
_ON_NOISE = 8  # made-up users of the step that first bounds are found by
_PUT_BACK = (
    "training_step changes attributes of the module (such as a running average): they are restored after each user, so "
    "that no user's update depends on examples of another. To keep an attribute that does not depend on examples, "
    'decorate the class with @dpbench.independent("name").'
)
_NOT_MERGED = "states of {names} cannot be merged: updates of these metrics in local training are lost."
_NOT_FINITE = (
    "updates of some users are not finite (their local training diverged) and count as zero; "
    "nonprivate/diverged_users counts them in each round. Lower the lr of the local training."
)


class Users:
    """Users as records: DP-FedAvg (McMahan et al. 2018), or DP-FedSGD with one local step on all examples.

    A user's vector is server − client, the weights before minus those after its local training. It is clipped, summed,
    noised and divided like any record's; `p.grad` is the mean of server − client, and the module's optimizer is the
    server's: SGD(lr=1) is FedAvg, with momentum FedAvgM, Adam is FedAdam. Local steps are plain SGD on `training_step`,
    which knows nothing of it. One user is trained at a time: its weights, gradient and update are all that a cohort of
    any size needs in memory.

    Guarantee: the unit of privacy is the user, with all of its examples; users count alike, whatever they hold. The
    neighboring relation is that of the sampling; the sensitivity is the bound that a user's update is clipped to.

    Args:
        local: Options of the local training.

    Raises:
        ConfigurationError: `local` is no local training.
    """

    unit: str | None = "user"
    summands = UNITS
    in_turn = True

    def __init__(self, local: LocalTraining) -> None:
        if isinstance(local, Mapping):
            local = LocalTraining(**local)
        if not isinstance(local, LocalTraining):
            raise ConfigurationError(
                f"local must be a LocalTraining, as in Users(LocalTraining(lr=0.1)), not {local!r}."
            )
        self.local = local
        self._dataset: UserDataset | None = None
        self._said: set[str] = set()
        self._diverged = 0

    def __repr__(self) -> str:
        return f"Users({self.local})"

    def check(self, training: Training) -> None:
        """Local training makes the steps itself, of one network."""
        module = training.module
        if not training.automatic_optimization or getattr(module, "private_module", None) is not None:
            raise ConfigurationError(
                f"{type(module).__name__} makes its own updates (manual optimization, or a private_module as a GAN "
                "has): local training of users needs a training_step(batch) that returns the loss of one network."
            )

    def attach(self, training: Training, part: nn.Module, releases: ReleaseEngine) -> TrainableParameters:
        """Find the parameters that local training moves."""
        self._training = training
        self._releases = releases
        self._on_device = training.local_batches()
        trainable = {name: p for name, p in part.named_parameters() if p.requires_grad}
        if not trainable:
            raise ConfigurationError("the model has no trainable parameters.")
        trained = TrainableParameters(list(trainable.values()), list(trainable))
        self._client = Client(trained.parameters, self.local)
        self._logs = LocalLogs(training.module)
        return trained

    def step(self, own: TrainingStep) -> TrainingStep:
        """Local training of each user in turn; the driver sees one step."""
        step: TrainingStep = self._round(own)
        return step

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do: the updates were accumulated in the step."""

    def begin(self, loader: PrivateDataLoader) -> None:
        """Find the users' examples, and distribute the users of a batch over the processes by their work."""
        self._dataset = users_of(loader)
        self._lots = loader.lots
        is_bounded = self.local.max_examples is not None or self.local.max_steps is not None
        if self._releases.recipe.private and not is_bounded:
            self._training.inform(_TIMES_TELL)
        work = [self.local.examples_of(int(size)) for size in self._dataset.sizes]
        self._lots.work = np.array(work)

    def on_noise(self, generator: torch.Generator) -> Piece:
        """Local training of made-up users, with examples from `noise_batch(size, generator)`."""
        size = self.local.batch_size or 20
        updates: list[list[Tensor]] = []
        training = self._training
        device = training.device
        local_step = LocalStep(
            training.module,
            training.own_step,
            training.index_of_step(),
            measured=False,
        )
        with kept_randomness(device), self._logs.silent():
            for number in range(_ON_NOISE):
                batch = self._on_device(noise_batch(training, size, generator))
                seed_global_generators((Stream.NOISE_BATCH, number), device)
                steps = self.local.steps(size, torch.Generator().manual_seed(number))
                with training.autocast(), self._client.weights():
                    batches = (batch for _ in steps)
                    updates.append(self._client.update(local_step, batches))
        gradients = [
            InstantiatedGradients(functools.partial(torch.stack, of_parameter))
            for of_parameter in zip(*updates, strict=True)
        ]
        return Piece(gradients, _ON_NOISE, None)

    # ------------------------------------------------------------------------------------- one lot

    def open_lot(self, batch: Any) -> None:
        """Check that the cohort is the batch that was drawn."""
        training = self._training
        drawn, _ = self._lots.share(self._releases.num_releases, training.rank, training.world_size)
        if not isinstance(batch, Cohort) or not np.array_equal(batch.positions.cpu().numpy(), drawn):
            raise ConfigurationError(
                "the batch is not the cohort of users that was drawn: a collate_fn, hook or wrapper has changed it. "
                "Collate a user's examples by UserDataset(examples, users, collate_fn=...)."
            )
        self._users = drawn.tolist()
        self._done = False
        self._released = False

    def close_lot(self) -> None:
        """Put the cohort out of reach; its sums are complete."""
        if not self._done:
            raise ConfigurationError("the cohort was not trained: something has replaced training_step.")
        self._released = True

    def detach(self) -> None:
        """Let go of the module."""
        if self._dataset is not None:
            self._lots.work = None
            self._dataset = None

    # ------------------------------------------------------------------------------------- one round

    def _round(self, own_step: Any) -> Any:
        """Stand in for `training_step`: local training of each user in turn; Lightning sees one step."""

        @functools.wraps(own_step)
        def step(cohort: Cohort, *args: Any) -> Tensor:
            if self._done or self._released:
                raise ConfigurationError(SECOND_RELEASE)
            local_step = LocalStep(
                self._training.module,
                own_step,
                args,
                measured=self._releases.recipe.metrics is not None,
            )
            logs = self._logs.collected(self._releases.processes)
            with kept_randomness(self._training.device), logs, self._client.weights():
                self._train(local_step)
            self._done = True
            if self._diverged:
                self._training.module.log(
                    "nonprivate/diverged_users",
                    float(self._diverged),
                    batch_size=1,
                )
                self._say(_NOT_FINITE, self._training.warn)
            return torch.zeros((), device=self._training.device, requires_grad=True)

        return step

    def _train(self, local_step: LocalStep) -> None:
        """Hand the update of each user of the cohort to the release."""
        diverged = torch.zeros((), dtype=torch.long, device=self._training.device)
        state = UserState(self._training)
        try:
            for user in self._users:
                update = self._update(user, local_step)
                record, norms = OneRecord.of(update)
                diverged += ~norms.sum().isfinite()
                self._releases.accumulate(record, 1, None, local_step.values())
                del update, record  # before the next one takes as much
                state.put_back()
        finally:
            state.close()
        if state.has_changed:
            self._say(_PUT_BACK, self._training.inform)
        if state.not_merged:
            self._say(_NOT_MERGED.format(names=", ".join(sorted(state.not_merged))), self._training.inform)
        self._diverged = int(diverged)

    def _say(self, line: str, aloud: Callable[[str], None]) -> None:
        if line not in self._said:
            self._said.add(line)
            aloud(line)

    def _update(self, user: int, local_step: LocalStep) -> list[Tensor]:
        generator = keyed_generator(self._releases.key_of(Stream.LOCAL_TRAINING, user))
        seed_global_generators(self._releases.key_of(Stream.MODEL, 0, user), self._training.device)
        local_step.begin()
        return self._client.update(local_step, self._steps(user, generator))

    def _steps(self, user: int, generator: torch.Generator) -> Iterable[Any]:
        assert self._dataset is not None
        for positions in self.local.steps(len(self._dataset.rows(user)), generator):
            yield self._on_device(self._dataset.batch(user, positions))


def users_of(loader: PrivateDataLoader) -> UserDataset:
    """The users that a loader draws.

    Raises:
        ConfigurationError: Its data set is not of users, or none of them has an example.
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, UserDataset):
        if loader.record_of_row is not None or loader.collate_fn.is_custom:  # type: ignore[union-attr]
            raise ConfigurationError(
                "PrivateDataLoader takes no collate_fn and no record_of_row where records are users: set "
                "UserDataset(examples, users, collate_fn=...)."
            )
        if not dataset.sizes.any():
            raise ConfigurationError(
                f"none of the {len(dataset)} users has an example, so nothing would be learned: check how the "
                "users were made (UserDataset.sizes counts the examples of each)."
            )
        return dataset
    raise ConfigurationError(
        f"a record is a user, but {type(dataset).__name__} has no users: "
        "PrivateDataLoader.poisson(UserDataset(examples, users), expected_batch_size), with the user of each example "
        "in users."
    )
