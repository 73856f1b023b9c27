"""A record moves a sum by at most its bound in every precision of the network and of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpbench.privacy import native
from dpbench.privacy.gradients import tf32
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.layers import instantiated
from dpbench.privacy.gradients.parameter import OuterProductGradients, zero_gradients
from dpbench.privacy.mechanism.clipping import VectorGroup, clip_and_sum

ROUNDING = 1e-5  # of the bound: what float32 leaves of the other records in the difference of two sums
RECORDS = 8
BITS = {"tf32": 11, "bf16": 8}


def rounded(x: Tensor, bits: int) -> Tensor:
    """Float32 rounded to the nearest number of so many bits, halves away from zero, as GPUs make their factors."""
    dropped = 24 - bits
    half = 1 << (dropped - 1)
    return ((x.contiguous().view(torch.int32) + half) & -(1 << dropped)).view(torch.float32)


class RoundedProducts(TorchDispatchMode):
    """Matrix products of float32 as a processor makes them that follows PyTorch's settings, which this CPU may not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__.rstrip("_")
        precision = torch.backends.mkldnn.matmul.fp32_precision
        if name in ("mm", "mv", "bmm", "addmm", "addmv", "baddbmm") and precision in BITS:
            *added, first, second = args
            if first.dtype == torch.float32:
                args = (*added, rounded(first, BITS[precision]), rounded(second, BITS[precision]))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _by_products() -> Iterator[None]:
    """Without kernels, which add up without products."""
    before = native.mode()
    native.select("off")
    yield
    native.select(before)
    torch.set_float32_matmul_precision("highest")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x, x, x)[0]
        return output


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 16)), (24,)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 1)), (3, 8, 8)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)), (3, 6, 6)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(6, 16), nn.Linear(16, 8)), (9,)),
    "attention": (Attention, (7, 16)),
}
PRECISIONS = ["64-true", "32-true", "bf16-mixed", "bf16-true", "high", "medium"]


def clipped_sum(model: nn.Module, x: Tensor, directions: Tensor, precision: str) -> Tensor:
    """Sum of the records' gradients in float64, each clipped at 1."""
    engine = PerRecordEngine(model, "sum")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        output = model(x).flatten(1)
    loss = (output.to(directions.dtype) * directions).sum()
    gradients = engine.backward(loss, len(x))
    engine.close()
    with torch.no_grad():
        sums, _ = clip_and_sum(gradients, (everything(gradients),))
    return torch.cat([total.flatten() for total in sums]).double()


def everything(gradients: list[Any], bound: float = 1.0) -> VectorGroup:
    return VectorGroup("all", tuple(range(len(gradients))), bound)


@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, precision) for i, name in enumerate(NETWORKS) for precision in PRECISIONS[i % 2 :: 2]],
)
def test_a_record_moves_the_sum_by_at_most_the_bound(name: str, precision: str) -> None:
    """Beside others and alone; all are clipped, and one is in a lot less than in the other."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    model = make().to(dtype)
    x = torch.randint(6, (RECORDS, *shape)) if name == "embedding" else torch.randn(RECORDS, *shape).to(dtype)
    width = model(x).flatten(1).shape[1]
    directions = 100 * torch.randn(RECORDS, width, dtype=torch.promote_types(dtype, torch.float32))
    if precision in ("high", "medium"):
        torch.set_float32_matmul_precision(precision)
    with RoundedProducts():
        total = clipped_sum(model, x, directions, precision)
        for record in range(RECORDS):
            own = torch.arange(RECORDS) == record
            moved = total - clipped_sum(model, x[~own], directions[~own], precision)
            alone = clipped_sum(model, x[own], directions[own], precision)
            assert float(moved.norm()) == pytest.approx(1, abs=ROUNDING)
            assert float(alone.norm()) == pytest.approx(1, abs=ROUNDING)


@pytest.mark.parametrize(
    ("precision", "outputs", "inputs", "bound", "share"),
    [
        # Of one position: both factors are rounded up as far as that goes, once the record is clipped.
        ("bf16", (3.0,), (1 + 2.0**-8,), (1 + 2.0**-8) ** 2, 1.0077),
        # Of two, which nearly cancel: the worst of four million.
        ("tf32", (1232.571044921875, -2462.914794921875), (1.0921943187713623, 0.5523717403411865), 1.54, 1.08),
    ],
)
def test_the_bound_needs_products_in_float32(
    precision: str, outputs: tuple[float, ...], inputs: tuple[float, ...], bound: float, share: float
) -> None:
    """A record that would move the sum by such a share of the bound, if PyTorch's settings held in its products."""
    g, a = (torch.tensor(numbers).view(1, -1, 1).expand(-1, -1, 8) for numbers in (outputs, inputs))
    gradients = [OuterProductGradients(g, a)]
    torch.set_float32_matmul_precision({"tf32": "high", "bf16": "medium"}[precision])
    shares = []
    for add_up in (clip_and_sum, clip_and_sum.__wrapped__):  # type: ignore[attr-defined]
        with RoundedProducts():
            sums, _ = add_up(gradients, (everything(gradients, 8 * bound),))
        shares.append(float(sums[0].double().norm()) / (8 * bound))
    assert shares[0] <= 1 + 1e-6
    assert shares[1] >= share


def test_settings_of_products_are_put_back() -> None:
    matmul: Any = torch.backends.mkldnn.matmul
    torch.set_float32_matmul_precision("high")
    with tf32.refused_in_matrix_products():
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32 and matmul.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cuda.matmul.allow_tf32
    matmul.fp32_precision = "bf16"  # of one device
    assert tf32.is_allowed("cpu")
    with tf32.refused_in_matrix_products():
        assert matmul.fp32_precision == "ieee"
    assert matmul.fp32_precision == "bf16"


def test_a_parameter_in_bfloat16_that_the_loss_does_not_depend_on() -> None:
    gradients = [instantiated(torch.ones(RECORDS, 3)), zero_gradients(torch.ones(2, 3).bfloat16(), RECORDS)]
    sums, _ = clip_and_sum(gradients, (everything(gradients),))
    assert not sums[1].any() and float(sums[0].norm()) == pytest.approx(RECORDS)
