"""Every method by name: FAMILY/KIND, with "default malloc" where our allocator setting is left out."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.plain import DrawnSizes, Step, plain
from benchmarks.workloads import FIRST_WORKLOAD, GPU_WORKLOADS, Workload

MALLOC = "default malloc"
PURE = "pure"
COMPILED = "compiled"
TRITON = "triton"
REFERENCE = "plain/channels_last"
DRAWN = "plain/channels_last drawn"  # sizes of lots
METHODS = (
    "plain/contiguous",
    "plain/channels_last",
    "plain/channels_last compiled",
    f"plain/channels_last {MALLOC}",
    DRAWN,
    "ours/flat",
    "ours/per_layer",
    "ours/adaptive_quantile",
    "ours/adaptive_mean",
    "ours/discretized",
    "ours/flat pure",
    "ours/discretized pure",
    f"ours/flat {MALLOC}",
    "harness/no privacy",
    "harness/flat",
    "harness/adaptive_quantile",
    "harness/discretized",
    f"opacus/hooks {MALLOC}",
    f"opacus/functorch {MALLOC}",
    f"opacus/ghost {MALLOC}",
    "opacus/hooks",
    "opacus/functorch",
    "opacus/ghost",
    "jax/vmap",  # with one allocator: XLA keeps its memory anyway
    "jax/jax_privacy",
)
QUICK = (
    REFERENCE,
    DRAWN,
    "ours/flat",
    "ours/adaptive_quantile",
    "ours/discretized",
    "harness/no privacy",
    "harness/flat",
    f"opacus/hooks {MALLOC}",  # its best mode there, as it comes
)
GPU_METHODS = (
    "plain/channels_last",
    "plain/contiguous",
    "ours/flat",
    "ours/per_layer",
    "ours/adaptive_quantile",
    "ours/adaptive_mean",
    "ours/discretized",
    f"ours/flat {TRITON}",
    f"ours/discretized {TRITON}",
    "harness/no privacy",
    "harness/flat",
    "harness/flat graph",
    f"opacus/hooks {MALLOC}",
    f"opacus/functorch {MALLOC}",
    f"opacus/ghost {MALLOC}",
)
_MICROBATCHES = (REFERENCE, "ours/flat")
_SEQUENCES = (REFERENCE, "ours/flat", f"ours/flat {MALLOC}", f"opacus/hooks {MALLOC}", "opacus/hooks")
_CHOSEN = {  # what takes seconds and gigabytes is measured where it says something
    "small_alexnet b1024": _MICROBATCHES,
    "densenet40 b64": (
        "plain/contiguous",
        "plain/channels_last",
        DRAWN,
        "ours/flat",
        "ours/per_layer",
        "ours/adaptive_quantile",
        "ours/adaptive_mean",
        "ours/discretized",
        "ours/flat pure",
        "harness/flat",
        f"opacus/functorch {MALLOC}",
        f"opacus/ghost {MALLOC}",
        "opacus/ghost",
    ),
    "densenet40 b64, microbatches of 8": _MICROBATCHES,
    "lstm b128": _SEQUENCES,  # the only way in which Opacus runs them
    "attention b128": _SEQUENCES,
}
_FIRST_WORKLOAD_ONLY = (  # they tell little more elsewhere, and some take seconds a step
    "harness/no privacy",
    "harness/adaptive_quantile",
    "harness/discretized",
    "opacus/hooks",
    "opacus/functorch",
    f"opacus/functorch {MALLOC}",
    "jax/jax_privacy",
)
_NOT_FOR_SEQUENCES = ("opacus/functorch", "opacus/ghost", "harness/")


def methods_for(name: str, device: str = "cpu") -> list[str]:
    """What is measured on a workload: on a CPU the most on the first one, or it would take an hour."""
    workload = GPU_WORKLOADS[name]
    if device == "cuda":
        if workload.microbatch_size > 1:
            return [REFERENCE, "ours/flat", "ours/discretized"]
        is_sequence = len(workload.input_shape) == 2
        return [method for method in GPU_METHODS if not (is_sequence and method.startswith(_NOT_FOR_SEQUENCES))]
    if name in _CHOSEN:
        return [method for method in METHODS if method in _CHOSEN[name]]
    return [method for method in METHODS if name == FIRST_WORKLOAD or method not in _FIRST_WORKLOAD_ONLY]


def together(methods: Sequence[str]) -> list[list[str]]:
    """Methods that are measured at the same time: one family of peers after the other, or memory would not suffice."""
    groups: dict[str, list[str]] = {}
    for method in methods:
        family = method.partition("/")[0]
        groups.setdefault(family if family in ("opacus", "jax") else "", []).append(method)
    return list(groups.values())


def step_of(method: str, workload: Workload, device: str) -> Step:
    """Make the step; call it in the process that is measured.

    Raises:
        ValueError: There is no such method.
    """
    import torch

    family, _, kind = method.removesuffix(f" {MALLOC}").partition("/")
    match family:
        case "plain" if kind.endswith("drawn"):
            return DrawnSizes(workload, torch.channels_last, device)
        case "plain":
            layout = torch.channels_last if "channels_last" in kind else torch.contiguous_format
            return plain(workload, layout, device, COMPILED in kind)
        case "ours":
            from benchmarks.ours import bare

            return bare(workload, kind.removesuffix(f" {PURE}").removesuffix(f" {TRITON}"), device)
        case "opacus":
            from benchmarks.opacus_ import opacus

            return opacus(workload, kind, device, torch.contiguous_format)
        case "jax":
            from benchmarks.jax_ import jax_step

            return jax_step(workload, kind)
        case _:
            raise ValueError(f"there is no method {method!r}")
