"""Networks whose layers mix records, after one call."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import dpbench
from dpbench.errors import UnsupportedModuleError
from dpbench.models.fixing import fix
from dpbench.models.wide_resnet import WeightStandardization
from dpbench.privacy.gradients.engine import PerRecordEngine


def test_a_network_of_torchvision() -> None:
    model = torchvision.models.resnet18(num_classes=4)
    with pytest.raises(UnsupportedModuleError, match=r"BatchNorm2d.*dpbench\.fix\(model\)"):
        PerRecordEngine(model)
    done = dpbench.fix(model)
    assert len(done) == 20 and done[0] == "bn1 (BatchNorm2d) is GroupNorm(32, 64) now"
    assert fix(model) == []
    engine = PerRecordEngine(model)
    loss = model(torch.randn(2, 3, 32, 32)).square().mean()
    assert all(part.per_record().isfinite().all() for part in engine.backward(loss, 2, verify=True))


def test_scale_shift_and_evaluation_mode_stay() -> None:
    norm = nn.BatchNorm2d(6)
    nn.init.normal_(norm.weight)
    norm.bias.requires_grad_(False)
    evaluated = nn.BatchNorm2d(6).eval()
    model = nn.ModuleDict({"a": norm, "b": evaluated, "c": nn.BatchNorm2d(6, affine=False), "d": nn.BatchNorm1d(6)})
    assert len(fix(model)) == 3
    assert model["a"].weight is norm.weight and not model["a"].bias.requires_grad
    assert model["a"].num_groups == 2 and model["d"].num_groups == 1
    assert model["b"] is evaluated and model["c"].weight is None
    assert model["d"](torch.randn(3, 6)).abs().sum() > 0


def test_running_statistics_are_left_out() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True, affine=True))
    assert fix(model) == ["0 (InstanceNorm2d) keeps no running statistics any more"]
    PerRecordEngine(model)
    assert model(torch.randn(2, 3, 4, 4)).shape == (2, 3, 4, 4) and "0.running_mean" not in model.state_dict()


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_weights_are_plain_and_as_they_were(norm: object) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(4, 4)))  # type: ignore[operator]
    model[0].bias.requires_grad_(False)
    model.eval()
    x = torch.randn(3, 4)
    before = model(x)
    (line,) = fix(model)
    assert "of weight any more" in line
    torch.testing.assert_close(model(x), before)
    assert PerRecordEngine(model).names == ["0.weight"]


def test_rows_without_positions() -> None:
    """A SyncBatchNorm does not say whether there are any: a group of one number would be normalized to zero."""
    model = nn.Sequential(nn.SyncBatchNorm(32))
    assert fix(model) == ["0 (SyncBatchNorm) is GroupNorm(1, 32) now"]
    assert model(torch.randn(3, 32)).std() > 0.5


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_layer_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match=r"2 \(LazyBatchNorm2d\) is not initialized yet"):
        fix(model)
    assert isinstance(model[1], nn.BatchNorm2d)
    model(torch.randn(2, 3, 8, 8))
    assert len(fix(model)) == 2


def test_a_layer_in_two_places() -> None:
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    assert len(fix(model)) == 2
    assert isinstance(model[0], nn.GroupNorm) and model[0] is model[2]


def test_what_cannot_be_fixed() -> None:
    with pytest.raises(ValueError, match="itself a BatchNorm"):
        fix(nn.BatchNorm1d(3))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not 'resnet18'"):
        fix("resnet18")  # type: ignore[arg-type]


def test_a_batch_norm_with_an_activation_keeps_it() -> None:
    class NormAct(nn.BatchNorm2d):
        """As timm's."""

        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(super().forward(x))

    net = nn.Sequential(nn.Conv2d(3, 8, 3), NormAct(8))
    assert fix(net) == ["1 (NormAct) is GroupNorm(8, 8), ReLU now"]
    assert (net(torch.randn(2, 3, 5, 5)) >= 0).all()


def test_weight_standardization_stays() -> None:
    """A function of one tensor without buffers, through which per-record gradients go."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 8, 3)
    parametrize.register_parametrization(convolution, "weight", WeightStandardization(8), unsafe=True)
    net = nn.Sequential(convolution, nn.BatchNorm2d(8), parametrizations.weight_norm(nn.Conv2d(8, 8, 3)))
    x = torch.randn(2, 3, 8, 8)
    before = convolution(x)
    assert fix(net) == [
        "1 (BatchNorm2d) is GroupNorm(8, 8) now",
        "2 (ParametrizedConv2d) has no WeightNorm of weight any more",
    ]
    assert parametrize.is_parametrized(convolution, "weight")
    assert not parametrize.is_parametrized(net[2])
    assert torch.equal(convolution(x), before)
    assert "0.parametrizations.weight.0.gain" in PerRecordEngine(net).names
