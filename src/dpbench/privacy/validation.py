"""Layers that would break the guarantee silently, refused by name with the way out."""

from __future__ import annotations

from torch import nn

from dpbench.errors import UnsupportedModuleError

_GROUP_NORM_HINT = "replace it by torch.nn.GroupNorm (opacus.validators.ModuleValidator.fix does that)"


def refuse_unsupported(model: nn.Module) -> None:
    """Check that no trainable layer mixes records or escapes the per-record gradients.

    Raises:
        UnsupportedModuleError: Names every offending module, the reason and the remedy.
    """
    problems = [
        f"{name or 'the model'} ({type(module).__name__}) {problem}"
        for name, module in model.named_modules()
        if (problem := _problem(module)) is not None
    ]
    if problems:
        raise UnsupportedModuleError("this model cannot be trained privately: " + "; ".join(problems) + ".")


def _problem(module: nn.Module) -> str | None:
    trainable = any(p.requires_grad for p in module.parameters(recurse=False))
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return f"mixes the records of a lot; {_GROUP_NORM_HINT}"
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        return "keeps running statistics of private records; set track_running_stats=False"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters(recurse=False)):
        return "is not initialised yet; run one forward pass on random data before training"
    if _has_spectral_norm(module):
        return "has spectral normalisation, whose power iteration couples all weights; remove it or clip the weights"
    if any(type(hook).__name__ == "WeightNorm" for hook in module._forward_pre_hooks.values()):
        return "computes its weight from other parameters; remove it (torch.nn.utils.remove_weight_norm)"
    if not trainable:
        return None
    for known in (nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention):
        if isinstance(module, known) and type(module) is not known:
            return (
                f"is a subclass, whose forward may differ; hold a torch.nn.{known.__name__} inside of a module instead"
            )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.max_norm or module.scale_grad_by_freq):
        return "rescales by the whole lot; leave out max_norm and scale_grad_by_freq"
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return "computes a weight from other parameters; remove the parametrization (torch.nn.utils.parametrize)"
    return None


def _has_spectral_norm(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return any(type(hook).__name__ == "SpectralNorm" for hook in hooks) or type(module).__name__ == "_SpectralNorm"
