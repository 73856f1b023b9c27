"""Every method by name: FAMILY/KIND, with "default malloc" where our allocator setting is left out."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.plain import DrawnSizes, Step, plain
from benchmarks.workloads import Workload

MALLOC = "default malloc"
DRAWN = "plain/channels_last drawn"  # sizes of lots
_OURS = ("flat", "per_layer", "adaptive_quantile", "adaptive_mean", "discretized")
METHODS = (
    *(f"plain/{kind}" for kind in ("contiguous", "channels_last", "channels_last compiled")),
    f"plain/channels_last {MALLOC}",
    DRAWN,
    *(f"ours/{name}" for name in _OURS),
    *(f"ours/{kind}" for kind in ("flat pure", "discretized pure", f"flat {MALLOC}")),
    *(f"harness/{name}" for name in ("no privacy", "flat", "adaptive_quantile", "discretized")),
    *(f"opacus/{mode}{malloc}" for malloc in (f" {MALLOC}", "") for mode in ("hooks", "functorch", "ghost")),
    *(f"jax/{way}" for way in ("vmap", "jax_privacy")),  # with one allocator: XLA keeps its memory anyway
)
FIRST_WORKLOAD = "mnist_cnn b256"
PURE, COMPILED = "pure", "compiled"
_MICRO = ("plain/channels_last", "ours/flat")
_DENSE = (*_MICRO, "ours/flat pure", *(f"ours/{name}" for name in _OURS), "harness/flat", "plain/contiguous", DRAWN)
_PEERS = (*(f"opacus/{mode} {MALLOC}" for mode in ("functorch", "ghost")), "opacus/ghost")
_SEQUENCES = ("plain/channels_last", "ours/flat", f"ours/flat {MALLOC}", f"opacus/hooks {MALLOC}", "opacus/hooks")
_CHOSEN = {  # what takes seconds and gigabytes is measured where it says something
    "small_alexnet b1024": _MICRO,  # Opacus on such lots: `python -m benchmarks growth`
    "densenet40 b64": (*_DENSE, *_PEERS),
    "densenet40 b64, microbatches of 8": _MICRO,
    "lstm b128": _SEQUENCES,  # the only way in which Opacus runs them
    "attention b128": _SEQUENCES,
}
_FIRST_ONLY = (  # they tell little more elsewhere, and some take seconds a step
    *("harness/no privacy", "harness/adaptive_quantile", "harness/discretized"),
    *("opacus/hooks", "opacus/functorch", f"opacus/functorch {MALLOC}", "jax/jax_privacy"),
)
REFERENCE = "plain/channels_last"
_TOGETHER = (("plain/", "ours/", "harness/"), ("opacus/",), ("jax/",))


def together(methods: list[str]) -> list[list[str]]:
    """Methods that are measured at the same time: one family of peers after the other, or memory would not suffice."""
    groups = [[method for method in methods if method.startswith(families)] for families in _TOGETHER]
    return [group for group in groups if group]


def methods_for(workload: Workload) -> list[str]:
    """What is measured on a workload: the most on the first one, or it would take an hour."""
    if workload.name in _CHOSEN:
        return [method for method in METHODS if method in _CHOSEN[workload.name]]
    return [method for method in METHODS if workload.name == FIRST_WORKLOAD or method not in _FIRST_ONLY]


def wants_our_allocator(method: str) -> bool:
    """Whether the process runs with `keep_large_blocks`."""
    return MALLOC not in method


def builder(method: str, workload: Workload, device: str) -> Callable[[], Step]:
    """Makes the step; call it in the process that is measured."""
    import torch

    family, _, kind = method.removesuffix(f" {MALLOC}").partition("/")
    if family == "plain":
        layout = torch.channels_last if "channels_last" in kind else torch.contiguous_format
        if kind.endswith("drawn"):
            return lambda: DrawnSizes(workload, torch.channels_last, device)
        return lambda: plain(workload, layout, device, COMPILED in kind)
    if family == "ours":
        from benchmarks.ours import bare

        return lambda: bare(workload, kind.removesuffix(f" {PURE}"), device)
    if family == "opacus":
        from benchmarks.opacus_ import opacus

        return lambda: opacus(workload, kind, device, torch.contiguous_format)
    if family == "jax":
        from benchmarks.jax_ import jax_step

        return lambda: jax_step(workload, kind)
    raise ValueError(f"no method {method}")
