"""Hydra schemas of the strategies, made from the classes themselves, so that a typo is refused before training."""

from __future__ import annotations

import inspect
from dataclasses import field, make_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore

from dpbench.strategies import (
    DPSGD,
    AdaptiveMeanClipping,
    AdaptiveQuantileClipping,
    AutomaticClipping,
    ClipOnly,
    DiscretizedDPSGD,
    NoiseOnly,
    PrivateStrategy,
    VectorGroups,
)

_FROM_THE_RUN = ("seed", "ledger", "fingerprint", "loss_reduction")
STRATEGIES: dict[str, type[PrivateStrategy]] = {
    "dpsgd": DPSGD,
    "discretized": DiscretizedDPSGD,
    "adaptive_mean": AdaptiveMeanClipping,
    "adaptive_quantile": AdaptiveQuantileClipping,
    "vector_groups": VectorGroups,
    "automatic": AutomaticClipping,
    "clip_only": ClipOnly,
    "noise_only": NoiseOnly,
}


def _omegaconf_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is dict:
        return Any  # a dictionary from the command line cannot be merged into a typed node that is None
    if get_origin(hint) in (Union, UnionType):
        inner = [_omegaconf_type(part) for part in get_args(hint) if part is not NoneType]
        return Optional[inner[0]] if len(inner) == 1 and inner[0] is not Any else Any  # noqa: UP045 (built at run time)
    return hint


def options_of(strategy: type[PrivateStrategy]) -> dict[str, tuple[Any, Any]]:
    """Name → (type, default) of a strategy's options that a user sets, those of its bases included."""
    options: dict[str, tuple[Any, Any]] = {}
    for cls in strategy.__mro__:
        if not issubclass(cls, PrivateStrategy):
            break
        hints = get_type_hints(cls.__init__)
        for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
            if parameter.kind is not parameter.VAR_KEYWORD and name not in _FROM_THE_RUN:
                options.setdefault(name, (_omegaconf_type(hints[name]), parameter.default))
    return options


def register_schemas() -> None:
    """Put a dataclass for each strategy into Hydra's config store, in a group that no `strategy=glob(*)` finds."""
    for name, strategy in STRATEGIES.items():
        fields: list[Any] = [("_target_", str, field(default=f"{strategy.__module__}.{strategy.__name__}"))]
        fields += [(key, hint, field(default=value)) for key, (hint, value) in options_of(strategy).items()]
        fields += [("secure", bool, field(default=False))]
        ConfigStore.instance().store(group="schema/strategy", name=name, node=make_dataclass(name, fields))
