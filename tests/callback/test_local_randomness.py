"""Random numbers of a step and of its items: functions of a whole key, in torch, numpy and `random`, on every path."""

from __future__ import annotations

import ast
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import dpbench
from dpbench import PrivateLoop
from dpbench.data.loader import PrivateDataLoader
from dpbench.privacy.randomness import keyed_generator, keyed_seed, seed_global_generators
from dpbench.session import session
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(4).tolist(),
    "numpy": lambda: np.random.rand(4).tolist(),
    "random": lambda: [random.random() for _ in range(4)],
}


def drawn(seed: int) -> dict[str, list[float]]:
    seed_global_generators((seed,), CPU)
    return {name: draw() for name, draw in DRAWS.items()}


@pytest.mark.parametrize("bits", [32, 255])
def test_seeds_that_agree_below_a_bit_give_other_numbers(bits: int) -> None:
    """`torch.manual_seed` and `numpy.random.seed` know 32 bits, of which all could be tried."""
    seed = keyed_seed((3, 1, 4)) % 2**bits
    one, other = drawn(seed), drawn(seed + 2**bits)
    assert drawn(seed) == one
    assert all(one[name] != other[name] for name in DRAWS)


def test_the_whole_state_is_filled() -> None:
    seed_global_generators((5, 7), CPU)
    assert torch.equal(torch.get_rng_state(), keyed_generator((5, 7)).get_state())
    for state in (np.random.get_state()[1], random.getstate()[1]):
        assert len(set(state)) > 600


def test_no_seed_of_32_bits_is_left_where_private_records_are_in_sight() -> None:
    """What calls torch's or numpy's own seeding: on public inputs, on made-up ones, and in probes."""
    package = Path(dpbench.__file__).parent
    calls = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("manual_seed", "manual_seed_all", "seed_everything"):
                calls.add(str(path.relative_to(package)))
    assert calls <= {
        "guards/_number_of_records.py",  # a step that is run and thrown away
        "privacy/randomness.py",
        "privacy/record_axis/mode.py",  # compared with a step's own generator
        "data/images.py",  # noise images for first bounds
        "capabilities/prior/features.py",  # made-up images
        "capabilities/prior/pretraining.py",  # and what is trained on them
        "data/scattering.py",  # a test image of the transform
        "records/record_gradients.py",  # first bounds, on noise
        "records/step_state.py",  # put back
        "capabilities/users/cohorts.py",  # first bounds, on noise
        "harness/reproduce/tracking.py",  # pictures
        "harness/run/check.py",  # a step that is run and thrown away
        "capabilities/synthesis/_fidelity.py",
        "capabilities/synthesis/memorization.py",
        "harness/run/evaluation.py",  # guesses of a trained language model
        "harness/run/priors.py",  # public data
        "harness/run/samples.py",  # of a trained generator
        "capabilities/hugging_face/samples.py",  # of a trained language model
        "harness/run/train.py",  # first weights
    }


# ------------------------------------------------------------------------------------------------- steps


def reseed() -> None:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)


def numbers_of_steps(folder: Path, seed: int | None, driver: str = "automatic") -> list[Any]:
    """What the steps could draw of each kind."""
    reseed()
    numbers: list[Any] = []

    class Noting(Classifier):
        def loss(self, batch: Any) -> Tensor:
            numbers.append({name: draw() for name, draw in DRAWS.items()})
            return super().loss(batch)

    module = Noting()
    strategy = DPSGD(noise_multiplier=1.0, seed=seed, delta=1e-3, ledger=str(folder / "ledger.jsonl"))
    if driver == "loop":
        sgd = torch.optim.SGD(module.net.parameters(), 0.1)
        list(PrivateLoop(module.net, sgd, loader_of(pictures()), strategy, lambda _, batch: module.loss(batch), 2))
    else:
        trainer_for(folder, strategy, 2).fit(module, loader_of(pictures()))
    return numbers


@pytest.mark.parametrize("driver", ["automatic", "loop"])
def test_a_secure_step_draws_numbers_that_nobody_knows(tmp_path: Path, driver: str) -> None:
    first, second = (numbers_of_steps(tmp_path / name, None, driver) for name in "ab")
    for name in DRAWS:
        assert not {str(one[name]) for one in first} & {str(one[name]) for one in second}


def test_a_seeded_step_repeats_itself(tmp_path: Path) -> None:
    first, second, other = (numbers_of_steps(tmp_path / name, seed) for name, seed in (("a", 5), ("b", 5), ("c", 6)))
    assert first == second
    assert all(first[-1][name] != other[-1][name] for name in DRAWS)


def test_a_step_draws_by_its_whole_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack of the review: by 32 bits of it alone, anybody could try all masks of dropout."""
    seen: list[int] = []
    monkeypatch.setattr(session, "seed_global_generators", lambda parts, device: seen.extend(parts))
    numbers_of_steps(tmp_path, None)
    assert min(seen[:1]) > 2**200


# ------------------------------------------------------------------------------------------------- items


class Augmented(Dataset[Any]):
    """Each item has noise of all three kinds in it."""

    def __init__(self) -> None:
        self.pictures = pictures()

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, position: int) -> Any:
        image, label = self.pictures[position]
        return image + torch.rand(1) + np.float32(np.random.rand()) + random.random(), label


class Seeing(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch[0].clone())


def items(folder: Path, seed: int | None, steps: int, loader: PrivateDataLoader, start: Any = None) -> list[Tensor]:
    reseed()
    module = Seeing()
    strategy = DPSGD(noise_multiplier=1.0, seed=seed, delta=1e-3, fingerprint="one run")
    trainer = trainer_for(folder, strategy, steps)
    trainer.fit(module, loader, ckpt_path=start, weights_only=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module.batches


def test_a_secure_run_draws_augmentations_that_nobody_knows(tmp_path: Path) -> None:
    everybody = loader_of(pictures(), 60, None, "full").lots
    runs = [items(tmp_path / name, None, 2, PrivateDataLoader(Augmented(), everybody)) for name in "ab"]
    for one, other in zip(*runs, strict=True):
        assert not (one == other).any()


def test_a_resumed_run_augments_as_the_whole_one(tmp_path: Path) -> None:
    whole, part, rest = (PrivateDataLoader.poisson(Augmented(), 12, seed=5) for _ in range(3))
    batches = items(tmp_path / "whole", 5, 4, whole)
    first = items(tmp_path / "part", 5, 2, part)
    second = items(tmp_path / "part", 5, 4, rest, start=tmp_path / "part" / "last.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(batches, first + second, strict=True))


def note_worker(folder: Path, worker: int) -> None:
    (folder / str(worker)).touch()


def test_workers_call_the_users_own_function(tmp_path: Path) -> None:
    note = functools.partial(note_worker, tmp_path)  # can be pickled, as Python 3.14 asks for
    loader = PrivateDataLoader.poisson(Augmented(), 12, seed=5, num_workers=1, worker_init_fn=note)
    trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3), 1).fit(Classifier(), loader)
    assert (tmp_path / "0").exists()
