"""Random numbers of a step and of its items: functions of a whole key, in torch, numpy and `random`, on every path."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpbench
from dpbench import PrivateLoop
from dpbench.data.lots import LotLoader
from dpbench.privacy.randomness import keyed_generator, keyed_seed, seed_global_generators
from dpbench.session import session
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for, weights_of

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(4).tolist(),
    "numpy": lambda: np.random.rand(4).tolist(),
    "random": lambda: [random.random() for _ in range(4)],
}


@pytest.fixture(autouse=True)
def _numbers_of_other_tests() -> Any:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def drawn(seed: int) -> dict[str, list[float]]:
    seed_global_generators((seed,), CPU)
    return {name: draw() for name, draw in DRAWS.items()}


@pytest.mark.parametrize("bits", [32, 62, 64, 128, 255])
def test_seeds_that_agree_below_a_bit_give_other_numbers(bits: int) -> None:
    """`torch.manual_seed` and `numpy.random.seed` know 32 bits, of which all could be tried."""
    seed = keyed_seed((3, 1, 4)) % 2**bits
    one, other = drawn(seed), drawn(seed + 2**bits)
    assert drawn(seed) == one
    for name in DRAWS:
        assert one[name] != other[name]


def test_the_whole_state_is_filled_and_none_is_anothers() -> None:
    seed_global_generators((5, 7), CPU)
    states = torch.get_rng_state(), np.random.get_state()[1], np.array(random.getstate()[1][:624], np.uint32)
    words = [states[0][24 : 24 + 8 * 624].numpy().view(np.uint64).astype(np.uint32), *states[1:]]
    assert torch.equal(states[0], keyed_generator((5, 7)).get_state())
    for i, a in enumerate(words):
        assert len(set(a.tolist())) > 600
        assert all(not np.intersect1d(a, b).size > 5 for b in words[:i])
    for low in range(2000):  # no seed of 32 bits that is near the key
        assert torch.default_generator.manual_seed(low).get_state().tolist()[24:40] != states[0].tolist()[24:40]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_states_of_a_gpu() -> None:
    device = torch.device("cuda", 0)
    draws = []
    for key in ((1, 2), (1, 2), (1, 3), (1 + 2**64, 2)):
        seed_global_generators(key, device)
        draws.append(torch.rand(5, device=device))
    generator = torch.cuda.default_generators[0]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[3])
    assert generator.initial_seed() >= 2**32 and generator.get_offset() >= 2**32


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
        "harness/run/priors.py",  # public data
        "harness/run/samples.py",  # of a trained generator
        "harness/run/train.py",  # first weights
    }


# ------------------------------------------------------------------------------------------------- steps


class Noting(Classifier):
    """What the step could draw of each kind."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__(manual)
        self.numbers: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        self.numbers.append({name: draw() for name, draw in DRAWS.items()})
        return super().loss(batch)


def fit(folder: Path, seed: int | None, manual: bool = False, loader: Any = None, steps: int = 3) -> list[Any]:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    module = Noting(manual)
    strategy = DPSGD(noise_multiplier=1.0, seed=seed, delta=1e-3)
    trainer_for(folder, strategy, steps).fit(module, loader or loader_of(pictures(), seed=0))
    return module.numbers


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_a_secure_step_draws_numbers_that_nobody_knows(tmp_path: Path, manual: bool) -> None:
    first, second = (fit(tmp_path / str(i), None, manual) for i in range(2))
    for name in DRAWS:
        assert not {str(one[name]) for one in first} & {str(one[name]) for one in second}


def test_a_seeded_step_repeats_itself(tmp_path: Path) -> None:
    first, second, other = (fit(tmp_path / str(i), seed) for i, seed in enumerate((5, 5, 6)))
    assert first == second
    assert first[-1]["numpy"] != other[-1]["numpy"] and first[-1]["random"] != other[-1]["random"]


def test_a_loop_draws_as_a_trainer_does(tmp_path: Path) -> None:
    seen: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append({name: draw() for name, draw in DRAWS.items()})
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    runs = []
    for number in range(2):
        np.random.seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, ledger=str(tmp_path / f"{number}.jsonl"))
        list(PrivateLoop(model, torch.optim.SGD(model.parameters(), 0.1), loader_of(pictures()), strategy, loss, 3))
        runs.append(seen[:])
        seen.clear()
    for name in DRAWS:
        assert runs[0][-1][name] != runs[1][-1][name]


def test_masks_of_seeds_that_agree_in_32_bits(tmp_path: Path) -> None:
    """The attack of the review: with the low bits of the seed alone, nobody gets the masks."""
    seen: list[int] = []

    def seed(parts: tuple[int, ...], device: torch.device) -> None:
        seen.extend(parts)
        seed_global_generators(parts, device)

    masks: list[Tensor] = []

    class Masks(Classifier):
        def loss(self, batch: Any) -> Tensor:
            if not masks:
                masks.append(nn.functional.dropout(torch.ones(50), 0.5))
            return super().loss(batch)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(session, "seed_global_generators", seed)
        strategy = DPSGD(noise_multiplier=1.0, delta=1e-3)
        trainer_for(tmp_path, strategy, 1).fit(Masks(), loader_of(pictures()))
    torch.manual_seed(seen[0] % 2**32)
    assert seen[0] > 2**200 and not torch.equal(nn.functional.dropout(torch.ones(50), 0.5), masks[0])


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


def items(folder: Path, seed: int | None, steps: int = 3, start: Any = None, **options: Any) -> list[Tensor]:
    for reseed in (torch.manual_seed, np.random.seed, random.seed):
        reseed(0)
    module, loader = Seeing(), LotLoader.poisson(Augmented(), 12, seed=5, **options)
    strategy = DPSGD(noise_multiplier=1.0, seed=seed, delta=1e-3, fingerprint="one run")
    trainer = trainer_for(folder, strategy, steps)
    trainer.fit(module, loader, ckpt_path=start, weights_only=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module.batches


def test_a_secure_run_draws_augmentations_that_nobody_knows(tmp_path: Path) -> None:
    runs = []
    for number in range(2):
        for reseed in (torch.manual_seed, np.random.seed, random.seed):
            reseed(0)
        module = Seeing()
        loader = LotLoader(Augmented(), loader_of(pictures(), expected=60, seed=None, kind="full").lots)
        strategy = DPSGD(noise_multiplier=1.0, delta=1e-3)
        trainer_for(tmp_path / str(number), strategy, 2).fit(module, loader)
        runs.append(module.batches)
    for one, other in zip(*runs, strict=True):
        assert not (one == other).any()


@pytest.mark.parametrize("workers", [0, 1])
def test_seeded_augmentations_repeat(tmp_path: Path, workers: int) -> None:
    one, other = (items(tmp_path / str(i), 5, num_workers=workers) for i in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_resumed_run_augments_as_the_whole_one(tmp_path: Path) -> None:
    whole = items(tmp_path / "whole", 5, 4)
    items(tmp_path / "part", 5, 2)
    rest = items(tmp_path / "part", 5, 4, start=tmp_path / "part" / "last.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], rest, strict=True))


def test_workers_call_the_users_own_function(tmp_path: Path) -> None:
    loader = LotLoader.poisson(Augmented(), 12, seed=5, num_workers=1, worker_init_fn=noted_by(tmp_path))
    trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3), 1).fit(Classifier(), loader)
    assert (tmp_path / "0").exists()


def noted_by(folder: Path) -> Callable[[int], None]:
    return lambda worker: (folder / str(worker)).touch()


def test_training_without_privacy_draws_as_before() -> None:
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    loader = loader_of(pictures())
    next(iter(loader))
    assert np.random.rand() == expected and weights_of(Classifier()).numel()
