"""Refusals, each with its remedy, of layers and sums that would break the guarantee silently."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.utils.hooks import RemovableHandle

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.privacy.gradients._parametrized import is_function, is_parametrized
from dpbench.privacy.gradients.layers import rule_of
from dpbench.privacy.gradients.parameter import ParameterGradients

_OF_RECORDS = re.compile(r" \(off by [^)]*\)")
"""Part of an error that tells of the records: the training goes on, and this would stay in its log."""
_SHOWN = 3
_LOW = 5e-2  # relative, of sums with the mantissa of bfloat16
_UNSEEN = 4  # roundings of the whole gradient; a larger gradient by autograd is not noise
_ROUNDING = 2**-5  # of each record, where they are added up with that mantissa: twice the error observed with AVX2
_BatchNorm = nn.modules.batchnorm._BatchNorm
_InstanceNorm = nn.modules.instancenorm._InstanceNorm
_STATISTICS = (_BatchNorm, _InstanceNorm)
_SPECTRAL_NORM = (
    "has spectral normalization, whose power iteration couples all weights and writes to buffers in every forward "
    "pass; remove it (dpbench.fix(model)) or clip the weights"
)


def refuse_unsupported(model: nn.Module) -> None:
    """Check that no trainable layer mixes records or escapes the per-record gradients.

    Raises:
        UnsupportedModuleError: Names every offending module, the reason and the remedy.
    """
    _refuse(model, _problem)


def refuse_statistics(model: nn.Module) -> None:
    """Check that no layer keeps statistics of records, or computes with those of a batch.

    Raises:
        UnsupportedModuleError: Names every offending module, the reason and the remedy.
    """
    _refuse(model, _statistics_problem)


def _refuse(model: nn.Module, problem_of: Callable[[nn.Module], str | None]) -> None:
    problems: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        problem = problem_of(module)
        if problem is not None:
            kind = type(module)
            layer = f"{name or 'the model'} ({kind.__name__})"
            layers = problems.setdefault(problem, [])
            layers.append(layer)
    if problems:
        reasons = [f"{_few(layers)} {problem}" for problem, layers in problems.items()]
        listing = "; ".join(reasons)
        raise UnsupportedModuleError(f"this model cannot be trained privately: {listing}.")


def trainable_of(model: nn.Module, loss_reduction: str) -> dict[str, nn.Parameter]:
    """The trainable parameters of a model by name, tied ones once.

    Raises:
        ConfigurationError: No parameter is trainable, or `loss_reduction` is unknown.
        UnsupportedModuleError: One is complex, where clipping and noise are real.
    """
    if loss_reduction not in ("mean", "sum"):
        raise ConfigurationError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}.")
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ConfigurationError("the model has no trainable parameters.")
    for name, parameter in trainable.items():
        if parameter.is_complex():
            raise UnsupportedModuleError(
                f"{name} is complex, but noise is real: make it a real parameter with a last dimension of 2, and "
                "convert it in forward (torch.view_as_complex)."
            )
    return trainable


def guard_training_mode(model: nn.Module, recording: Callable[[], bool]) -> list[RemovableHandle]:
    """Refuse layers that are in evaluation mode now, and would keep or use statistics of a batch in training mode.

    Args:
        model: Passed `refuse_unsupported`.
        recording: Function that returns whether forward passes are those of private records.
    """

    def refuse(layer: nn.Module, args: object) -> None:
        if not layer.training or not recording():
            return
        problem = _problem(layer)
        if problem is not None:
            kind = type(layer)
            raise UnsupportedModuleError(f"a {kind.__name__} was put into training mode: it {problem}.")

    layers = [module for module in model.modules() if isinstance(module, _STATISTICS)]
    return [layer.register_forward_pre_hook(refuse) for layer in layers]


def _few(names: Sequence[str]) -> str:
    """The first names, and how many there are."""
    first = ", ".join(names[:_SHOWN])
    if len(names) <= _SHOWN:
        return first
    return f"{first}, ... ({len(names)} in all)"


def _problem(module: nn.Module) -> str | None:
    """Why a module cannot be trained, as the end of a sentence about it; None: it can.

    A module without trainable parameters of its own may still mix records, or compute the weights of others.
    """
    return _record_problem(module) or _weight_problem(module) or _trainable_problem(module)


def _record_problem(module: nn.Module) -> str | None:
    """Problems of modules with or without parameters: code without hooks, and records that are mixed."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled by TorchScript, which allows no hooks; use the module that it was compiled from"
    hooks = module._forward_pre_hooks.values()
    if any(isinstance(hook, BasePruningMethod) for hook in hooks):
        return "is pruned, so its weight is computed from another; make it permanent (torch.nn.utils.prune.remove)"
    return _statistics_problem(module)


def _statistics_problem(module: nn.Module) -> str | None:
    """Statistics over records, which a layer keeps or computes with."""
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        return (
            "mixes the records of a batch; replace it by torch.nn.GroupNorm (dpbench.fix(model) does), or call its "
            "eval() before training (Lightning keeps it) to use the running statistics of a pretrained network"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats and module.training:
        return "keeps running statistics of private records; set track_running_stats=False"
    if module.training and _is_spectral_norm(module):
        return _SPECTRAL_NORM
    return None


def _is_spectral_norm(module: nn.Module) -> bool:
    hooks = {type(hook).__name__ for hook in module._forward_pre_hooks.values()}
    return "SpectralNorm" in hooks or type(module).__name__ == "_SpectralNorm"


def _weight_problem(module: nn.Module) -> str | None:
    """How a module comes by its weights, where that is by computing them."""
    hooks = {type(hook).__name__ for hook in module._forward_pre_hooks.values()}
    parameters = module.parameters(recurse=False)
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
        return "is not initialized yet; run one forward pass on random data before training"
    if _is_spectral_norm(module):
        return _SPECTRAL_NORM
    is_unknown = is_parametrized(module) and rule_of(module) is None
    if is_unknown and has_trainable(module, recurse=True):
        return (
            "has a weight that is computed from others; remove the parametrization "
            "(torch.nn.utils.parametrize.remove_parametrizations)"
        )
    if "WeightNorm" in hooks:
        return "computes its weight from other parameters; use torch.nn.utils.parametrizations.weight_norm"
    return None


def has_trainable(module: nn.Module, recurse: bool) -> bool:
    """Return whether a module has trainable parameters of its own, or (with `recurse`) of its children."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse))


def _trainable_problem(module: nn.Module) -> str | None:
    """Problem of the layer itself, if it is trained."""
    if not has_trainable(module, recurse=False):
        return None
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.max_norm or module.scale_grad_by_freq):
        return "rescales by the whole batch; leave out max_norm and scale_grad_by_freq"
    if isinstance(module, nn.utils.parametrize.ParametrizationList) and not is_function(module):
        return "computes a weight from other parameters; remove the parametrization (dpbench.fix(model))"
    return None


def check_sums(
    parameters: Mapping[str, Tensor],
    computed: Sequence[ParameterGradients],
    expected: Sequence[Tensor | None],
    records: int,
    tolerance: float,
) -> bool:
    """Compare the sums of per-record gradients with the ordinary gradients of the same batch.

    Args:
        parameters: The parameters, by name.
        computed: Per-record gradients of each.
        expected: Ordinary gradient of each; None: the loss does not depend on it.
        records: R, the number of records in the batch.
        tolerance: Largest difference, relative to the gradient of a parameter in float32 or float64.

    Returns:
        False where nothing can be compared: non-finite records contribute zero to our sums, and a later batch has to
        do.

    Raises:
        UnsupportedModuleError: They differ: a parameter is used where no hook sees it, or its layer mixes records.
    """
    squares = []
    for grad in expected:
        if grad is not None:
            squares.append(float(grad.double().square().sum()))
    total_norm = sum(squares) ** 0.5
    if not total_norm < float("inf"):
        return False
    for (name, parameter), gradients, grad in zip(
        parameters.items(),
        computed,
        expected,
        strict=True,
    ):
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        weights = torch.ones(records, dtype=dtype, device=parameter.device)
        ours = gradients.weighted_sum(weights).double()
        theirs = torch.zeros_like(parameter) if grad is None else grad
        theirs = theirs.double()
        difference = float((ours - theirs).norm())
        scale = max(float(theirs.norm()), 1e-2 * total_norm)
        if parameter.dtype.itemsize < 4 or tolerance >= _LOW:
            # Some processors sum records in bfloat16: terms that cancel leave their rounding errors.
            norms = gradients.squared_norms().double().sqrt()
            rounding = _ROUNDING * float(norms.sum())
            allowed = max(_LOW * scale, rounding)
        else:
            allowed = tolerance * scale
        # A use that no hook saw gives exactly nothing, however small the gradient is.
        noise = _UNSEEN * torch.finfo(dtype).eps * total_norm
        is_missed = difference > noise and not ours.any() and not gradients.squared_norms().any()
        if difference > allowed or is_missed:
            raise UnsupportedModuleError(
                f"per-record gradients of {name} do not add up to its gradient (off by {difference:.2g}): {_UNSEEN_USE}"
            )
    return True


TRAINED_ALONE = 'gradients="auto" or "one_by_one" trains it as it is'
_UNSEEN_USE = (
    "it is used in gradients inside the loss, as for a gradient penalty, or where no hook sees it, or its layer mixes "
    f"records; make it a parameter of an nn.Module whose forward uses it, and call that module; {TRAINED_ALONE}."
)


def reason_of(error: UnsupportedModuleError) -> str:
    """The reason in an error, without figures of the records and without the remedy that is about to be taken."""
    reason = _OF_RECORDS.sub("", " ".join(str(error).split()))
    return reason.replace(f"; {TRAINED_ALONE}.", "")
