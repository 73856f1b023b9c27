"""Training of a part of a network: a layer, biases, norms, or low-rank adapters of its linear layers (LoRA)."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

_KNOWN = (
    "last_layer, bias, norm, lora:RANK (such as lora:8), the name of a parameter or a pattern of names ('*head*'), or "
    "several joined by +"
)


class LoRA(nn.Module):
    """A linear layer with a low-rank update: W x + b + U D x (Hu et al. 2021).

    U is zero at first, so that the network computes the same as before. The paper's factor α/r is 1.

    Args:
        base: The layer, which stays as it is.
        rank: Rows of D, columns of U.

    Shape:
        (*, in_features) → (*, out_features).
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        # Beside the layer: a model may be on a GPU, or in half precision, by now.
        place = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, **place)
        self.up = nn.Linear(rank, base.out_features, bias=False, **place)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the layer and of its update."""
        outputs: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return outputs

    @property
    def weight(self) -> Tensor:
        """W + U D, for code that reads the weight of a layer instead of calling it."""
        return self.base.weight + self.up.weight @ self.down.weight

    @property
    def bias(self) -> Tensor | None:
        """Of the layer."""
        return self.base.bias

    def merged(self) -> nn.Linear:
        """The layer with the update in its weight."""
        with torch.no_grad():
            self.base.weight.copy_(self.weight)
        return self.base


def train_only(model: nn.Module, parts: str) -> list[str]:
    """Freeze all of a network but some parts; before an optimizer is made for it.

    * `last_layer`: the module that was registered last of those with parameters, such as a classifier's output.
    * `bias`: all biases (Bu et al. 2022, bu_bias_2022).
    * `norm`: weights and biases of layers whose class has "norm" in its name, such as `nn.LayerNorm`.
    * The full name of a parameter, or a pattern of names with `*`, `?` or `[]`, such as `*.attention.*`.
    * `lora:RANK`: an adapter (`LoRA`) for each `nn.Linear`, except the last layer if that is trained itself
      (Yu et al. 2022).

    Parameters that are frozen already stay frozen.

    Args:
        model: The network, not yet trained; adapters are put into it.
        parts: One of these, or several joined by "+".

    Returns:
        Names of the parameters that are trained.

    Raises:
        TypeError: The model is no module.
        ValueError: There is no such part, or nothing of one can be trained.

    >>> train_only(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), "lora:1+last_layer")
    ['0.down.weight', '0.up.weight', '2.weight', '2.bias']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"train_only takes a torch.nn.Module, not {model!r}.")
    ranks = []
    chosen: set[nn.Parameter] = set()
    last = _last_layer(model)
    for part in parts.split("+"):
        if part.startswith("lora:"):
            ranks.append(_rank(part, parts))
        else:
            parameters = _parameters_of(part, model, last)
            if not any(parameter.requires_grad for parameter in parameters):
                raise ValueError(f"{part!r} trains nothing: the model has no such parameters, or froze them.")
            chosen.update(parameters)
    # Frozen before adapters are added, whose parameters are trained; nothing is unfrozen that the caller froze.
    for parameter in model.parameters():
        if parameter not in chosen:
            parameter.requires_grad_(False)
    for rank in ranks:
        _add_adapters(model, rank, apart=last if "last_layer" in parts.split("+") else None)
    return [name for name, p in model.named_parameters() if p.requires_grad]


def _parameters_of(part: str, model: nn.Module, last: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a part names, adapters apart."""
    named = list(model.named_parameters())
    if part == "last_layer":
        return list(last.parameters(recurse=False))
    if part == "bias":
        return [parameter for name, parameter in named if _is_bias(name)]
    if part == "norm":
        norms = [layer for layer in model.modules() if "norm" in type(layer).__name__.lower()]
        return [parameter for layer in norms for parameter in layer.parameters(recurse=False)]
    matching = [parameter for name, parameter in named if fnmatchcase(name, part)]
    if not matching:
        raise ValueError(f"no parameter has a name like {part!r} (model.named_parameters()): take {_KNOWN}.")
    return matching


def merge_adapters(model: nn.Module) -> None:
    """Put the updates of a network's adapters into its weights, and take the adapters out.

    Args:
        model: Has adapters of `train_only`, or none. Its functions stay as they are, but for rounding.
    """
    _replace(model, {layer: layer.merged() for layer in model.modules() if isinstance(layer, LoRA)})


def merged_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The `state_dict` of a network with its adapters merged, under the names that it has without them.

    Args:
        state: State of a network, with or without adapters.
    """
    merged = dict(state)
    # By the names alone: a checkpoint has no modules.
    for name in state:
        layer = name.removesuffix(".up.weight")
        down = f"{layer}.down.weight"
        base = f"{layer}.base.weight"
        if layer == name or down not in state or base not in state:
            continue  # no adapter
        up_weight = merged.pop(name)
        down_weight = merged.pop(down)
        merged[f"{layer}.weight"] = merged.pop(base) + up_weight @ down_weight
        if f"{layer}.base.bias" in state:
            merged[f"{layer}.bias"] = merged.pop(f"{layer}.base.bias")
    return merged


def _last_layer(model: nn.Module) -> nn.Module:
    for layer in reversed(list(model.modules())):
        if next(layer.parameters(recurse=False), None) is not None:
            return layer
    raise ValueError("the model has no parameters to train.")


def _is_bias(name: str) -> bool:
    """Return whether a parameter is a bias by its name: bias, bias_ih_l0, in_proj_bias."""
    parameter = name.rpartition(".")[2]
    return parameter == "bias" or parameter.startswith("bias_") or parameter.endswith("_bias")


def _rank(part: str, parts: str) -> int:
    digits = part.removeprefix("lora:")
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"{parts!r} needs a rank of at least 1: write lora:8, say.")
    return int(digits)


def _add_adapters(model: nn.Module, rank: int, apart: nn.Module | None) -> None:
    """Add an adapter to each linear layer, except one."""
    if any(isinstance(layer, LoRA) for layer in model.modules()):
        raise ValueError("the model already has adapters: dpbench.models.merge_adapters(model) removes them.")
    adapters: dict[nn.Module, nn.Module] = {}
    for layer in model.modules():
        # The exact type: a subclass may compute something else of its weight.
        if type(layer) is nn.Linear and layer is not apart:
            adapters[layer] = LoRA(layer, rank)
    if not adapters or model in adapters:
        raise ValueError("adapters need nn.Linear layers, and the model has none: use last_layer or bias.")
    _replace(model, adapters)


def _replace(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Put modules in the places of others, in all places where they stand."""
    # A shared layer stands under several names, and is replaced under each.
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if layer in replacements:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacements[layer])
