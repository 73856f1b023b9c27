"""The private network of a GAN is probed as any other: a record and the image made for it, and no other record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.errors import UnsupportedModuleError
from dpbench.models import MLPGAN, ConvGAN
from dpbench.modules import GAN
from tests.support.gan import fit, flat, gan

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


class Total(GAN):
    """A broken mutant: the sum where loss_reduction says mean, behind the generator's noise."""

    def discriminator_loss(self, on_records: Tensor, on_made: Tensor) -> Tensor:
        return (F.softplus(-on_records) + F.softplus(on_made)).sum()


class Relativistic(GAN):
    """A broken mutant: each record against the mean of all made images (Jolicoeur-Martineau 2018)."""

    def discriminator_loss(self, on_records: Tensor, on_made: Tensor) -> Tensor:
        return F.softplus(-(on_records - on_made.mean())).mean() + F.softplus(on_made - on_records.mean()).mean()


class Spread(nn.Module):
    """Minibatch standard deviation (Karras et al. 2018)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x - x.mean(0)).square().mean(0).add(1e-6).sqrt()


def with_spread() -> GAN:
    module = gan()
    body: Any = module.discriminator
    first = next(name for name, child in body.named_modules() if isinstance(child, nn.Linear))
    body.set_submodule(first, nn.Sequential(body.get_submodule(first), Spread()))
    return module


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gan(Total), "depends on the number of the other records"),
        (lambda: gan(Relativistic), "depends on the contents of the other records"),
        (with_spread, "depends on the contents of the other records"),
    ],
    ids=["total", "relativistic", "spread"],
)
def test_coupled_discriminators_are_refused(tmp_path: Path, make: Any, words: str) -> None:
    with pytest.raises(UnsupportedModuleError, match=words):
        fit(tmp_path, make())


# Each two of these together, not each three.
@pytest.mark.parametrize(
    ("loss", "pair", "conditional"),
    [
        ("standard", MLPGAN, False),
        ("standard", ConvGAN, True),
        ("wasserstein", MLPGAN, True),
        ("wasserstein", ConvGAN, False),
    ],
)
def test_a_healthy_gan_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Any, pair: Any, conditional: bool
) -> None:
    from dpbench.guards._coupling import CouplingProbe

    probed = gan(GAN, pair, conditional, loss=loss)
    fit(tmp_path / "probed", probed, steps=9)
    monkeypatch.setattr(CouplingProbe, "check", lambda *_: None)
    plain = gan(GAN, pair, conditional, loss=loss)
    fit(tmp_path / "plain", plain, steps=9)
    assert torch.equal(flat(probed), flat(plain))
