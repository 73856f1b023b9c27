"""The engine's gradients against autograd of each record's own loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.records.tagging import under_tags
from tests.support.reference import mean_square, reference_gradients

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LOTS = (0, 1, 7)

Networks = dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]
"""By name: how to make one, and the shape of one record."""


def assert_each_exact(networks: Networks, name: str, lots: Sequence[int] = LOTS, **options: Any) -> None:
    """Lots of several sizes, one of them empty; tokens for networks that look something up, and else numbers."""
    make, shape = networks[name]
    for records in lots:
        torch.manual_seed(records)
        model = make()
        looks_up = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
        x = torch.randint(0, 5, (records, *shape)) if looks_up else torch.randn(records, *shape)
        assert_exact(model, x, **options)


def assert_exact(
    model: nn.Module, inputs: Tensor, tags: bool = False, dtypes: Sequence[torch.dtype] = tuple(TOLERANCE)
) -> None:
    """All answers of the engine equal the reference, and the forward pass that of the model alone."""
    for dtype in dtypes:
        typed = copy.deepcopy(model).to(dtype)
        x = inputs.to(dtype) if inputs.is_floating_point() else inputs
        expected = reference_gradients(typed, x)
        loss_alone = mean_square(typed, x).detach()
        hooks = _hooks(typed)
        engine = PerRecordEngine(typed)
        if tags:
            engine.follow_tags()
        loss = under_tags(engine, lambda batch, typed=typed: mean_square(typed, batch), x, len(x))
        torch.testing.assert_close(loss.detach(), loss_alone, rtol=10 * TOLERANCE[dtype], atol=0.0, equal_nan=True)
        gradients = engine.backward(loss, len(x), verify=True)
        assert engine.names == list(expected)
        largest = max((float(rows.norm()) for rows in expected.values()), default=1.0)
        for name, got in zip(engine.names, gradients, strict=True):
            want = expected[name]
            # A gradient that cancels to zero has no relative error.
            scale = max(float(want.norm()), 1e-3 * largest) or 1.0
            assert_answers(got, want, scale, dtype, name)
        _assert_closed(engine, typed, hooks)


def assert_answers(got: ParameterGradients, want: Tensor, scale: float, dtype: torch.dtype, name: str = "") -> None:
    """The three answers, sums into another tensor, and those of some records alone."""

    def close(actual: Tensor, wanted: Tensor, unit: float) -> None:
        assert actual.shape == wanted.shape, name
        assert float((actual.double() - wanted.double()).norm()) <= TOLERANCE[dtype] * unit, name

    records = len(want)
    weights = torch.linspace(-1, 2, records, dtype=dtype)
    close(got.per_record(), want, scale)
    close(got.squared_norms(), torch.einsum("r...,r...->r", want, want), scale**2)
    summed = torch.einsum("r,r...->...", weights.double(), want)
    close(got.weighted_sum(weights), summed, 2 * scale)
    for precision in (dtype, torch.float64):  # the running sum may be more precise than a parameter
        total = torch.zeros(summed.shape, dtype=precision)
        got.add_weighted_sum(weights, total)
        got.add_weighted_sum(weights, total)
        close(total, 2 * summed, 4 * scale)
    if records > 1:
        keep = torch.tensor([0, records - 1])
        close(got.select(keep).per_record(), want[keep], scale)


def _hooks(model: nn.Module) -> list[int]:
    return [
        len(module._forward_hooks) + len(module._forward_pre_hooks) + ("forward" in vars(module))
        for module in model.modules()
    ]


def _assert_closed(engine: PerRecordEngine, model: nn.Module, hooks: list[int]) -> None:
    assert not engine._uses and not engine._shared_calls.calls  # also of what a checkpoint runs again
    engine.close()
    assert _hooks(model) == hooks
    assert torch.overrides._get_current_function_mode() is None


def losses(output: Any) -> Tensor:
    """Each record's own loss."""
    rows = output if isinstance(output, Tensor) else output.logits
    flat = rows.flatten(1).double()
    return flat.square().mean(1) + flat.sin().mean(1)


def assert_exact_in_its_pass(
    model: nn.Module,
    inputs: Tensor,
    rtol: float = 1e-10,
    tags: bool = False,
    half: bool = False,
    draws_as_alone: bool = True,
) -> None:
    """With the random numbers of one forward pass; in float64, or automatically in bfloat16."""
    records = len(inputs)
    hooks = _hooks(model)
    engine = PerRecordEngine(model)
    if tags:
        engine.follow_tags()
    engine.expect(records)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return losses(model(x))

    torch.manual_seed(0)
    of_records = under_tags(engine, forward, inputs, records)
    with engine.paused():
        singly = [
            torch.autograd.grad(loss, engine.parameters, retain_graph=True, materialize_grads=True)
            for loss in of_records
        ]
    computed = engine.backward(of_records.mean(), records, verify=True)
    expected = [torch.stack(rows) for rows in zip(*singly, strict=True)]
    largest = max(float(rows.norm()) for rows in expected)
    for name, got, want in zip(engine.names, computed, expected, strict=True):
        error = float((got.per_record() - want).norm())
        assert error <= rtol * max(float(want.norm()), 1e-4 * largest), name
        assert got.squared_norms().dtype == (torch.float32 if half else torch.float64)
    _assert_closed(engine, model, hooks)
    torch.manual_seed(0)
    assert not draws_as_alone or torch.equal(forward(inputs), of_records)
