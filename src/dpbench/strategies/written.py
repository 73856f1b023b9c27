"""What of a module has been written to: everything that would be saved with it, and be published."""

from __future__ import annotations

from operator import is_

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpbench.errors import UnsupportedModuleError


class Saved:
    """Parameters, buffers and persistent metric states of a module, as they were at one time.

    Tensors count the writes in place (`_version`), which costs microseconds; a write through `.data` is not counted,
    and shows in sums over the contents only.

    Args:
        module: With all that is in it.
        contents: Whether to compare contents, too; costs a pass over all tensors.
    """

    def __init__(self, module: nn.Module, contents: bool = False) -> None:
        self._module = module
        self._tensors = _tensors(module)
        self._versions = _versions(self._tensors)
        self._sums = [_sum(x) for x in self._tensors] if contents else None

    def written(self) -> list[str]:
        """Names of what was written to, replaced or added since then."""
        now = _tensors(self._module)
        versions = _versions(now)
        sums = None if self._sums is None else [_sum(x) for x in now]
        same = len(now) == len(self._tensors) and all(map(is_, now, self._tensors))
        if same and versions == self._versions and sums == self._sums:
            return []
        before = {id(x): (version, i) for i, (x, version) in enumerate(zip(self._tensors, self._versions, strict=True))}
        names = {id(x): name for name, x in _named(self._module)}
        changed = []
        for i, (x, version) in enumerate(zip(now, versions, strict=True)):
            known, place = before.get(id(x), (None, 0))
            if known != version or (sums is not None and self._sums is not None and sums[i] != self._sums[place]):
                changed.append(names.get(id(x), "a tensor"))
        return changed or ["its modules"]


def refuse_forward_writes(saved: Saved) -> None:
    """Raise UnsupportedModuleError where statistics of private records may have got into the model before a release."""
    changed = saved.written()
    if changed:
        raise UnsupportedModuleError(
            f"the forward pass changes {', '.join(changed)} (or a hook that sees the lot does), which would be saved "
            "with the model without noise: keep statistics of private records out of the model. What follows from "
            "released weights alone, such as a target network, belongs into on_before_zero_grad or on_train_epoch_end. "
            "(A generator makes images for a private discriminator in evaluation mode: BatchNorm would tell how many "
            "records there were.)"
        )


def refuse_late_writes(saved: Saved) -> None:
    """Raise UnsupportedModuleError where the model was written to after its update, with the lot still in sight."""
    changed = saved.written()
    if changed:
        raise UnsupportedModuleError(
            f"{', '.join(changed)} changed after the release of a lot, where its records are still in sight (in "
            "on_train_batch_end, or after the optimizer's step in manual optimization), and would be saved without "
            "noise: what follows from released weights alone belongs into on_before_zero_grad, on_train_epoch_end or a "
            "hook of the optimizer (register_step_post_hook); in manual optimization, name the network that sees "
            "records in private_module."
        )


def _tensors(module: nn.Module) -> list[Tensor]:
    found: list[Tensor | None] = []
    modules: list[nn.Module | None] = [module]
    while modules:  # four times in every lot
        one = modules.pop()
        if one is None:
            continue
        if one._parameters:
            found += one._parameters.values()
        if one._buffers:
            found += one._buffers.values()
        if one._modules:
            modules += one._modules.values()
        if "_persistent" in one.__dict__:  # a metric
            found += [x for _, x in _states(one)]
    return [x for x in found if x is not None]


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    named: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for prefix, one in module.named_modules():
        if "_persistent" in one.__dict__:
            named += [(f"{prefix}.{name}", x) for name, x in _states(one)]
    return named


def _states(metric: nn.Module) -> list[tuple[str, Tensor]]:
    """Those of a torchmetrics metric that `state_dict` holds."""
    persistent: dict[str, bool] = metric.__dict__["_persistent"]
    values = [(name, getattr(metric, name, None)) for name, kept in persistent.items() if kept]
    flat = [(name, x) for name, value in values for x in (value if isinstance(value, list) else [value])]
    return [(name, x) for name, x in flat if isinstance(x, Tensor)]


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return [x._version for x in tensors]
    except RuntimeError:  # made in inference mode: not counted
        return [-1 if x.is_inference() else x._version for x in tensors]


def _sum(x: Tensor) -> str:
    """Of the contents in float64, exact enough to show one changed number; as text, so that NaN equals itself."""
    if is_lazy(x) or x.is_meta:
        return ""
    x = x.detach()
    return float((x.abs() if x.is_complex() else x).sum(dtype=torch.float64)).hex()
