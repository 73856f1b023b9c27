"""Every method by name: FAMILY/KIND, with "default malloc" where our allocator setting is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.plain import DrawnSizes, Step, plain
from benchmarks.workloads import FIRST_WORKLOAD, LARGE_WORKLOADS, WORKLOADS, Workload, of_full_size, workload_named

MALLOC = "default malloc"
PURE = "pure"
COMPILED = "compiled"
TRITON = "triton"
REFERENCE = "plain/channels_last"
DRAWN = "plain/channels_last drawn"  # sizes of lots
GPU_WAYS = ("one after the other", "10 at once", "50 at once")  # to make a round of users
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
GROWTH = (REFERENCE, "ours/flat", "ours/flat pure", f"opacus/hooks {MALLOC}", f"opacus/ghost {MALLOC}")
GPU_METHODS = (
    "plain/channels_last",
    "plain/contiguous",
    "plain/channels_last compiled",
    "ours/flat",
    "ours/per_layer",
    "ours/adaptive_quantile",
    "ours/adaptive_mean",
    "ours/discretized",
    "ours/flat triton",
    "ours/discretized triton",
    "opacus/hooks",
    "opacus/functorch",
    "opacus/ghost",
    "harness/no privacy",
    "harness/flat",
    "harness/flat graph",
    "loop/flat",
    "graph/plain",
    "graph/flat",
    "bf16/plain",
    "bf16/flat",
    "compiled/flat",
    "seeds/flat",
)
_MICROBATCHES = (REFERENCE, "ours/flat")
_SEQUENCES = (REFERENCE, "ours/flat", f"ours/flat {MALLOC}", f"opacus/hooks {MALLOC}", "opacus/hooks")
_CHOSEN = {  # what takes seconds and gigabytes is measured where it says something
    "small_alexnet b1024": _MICROBATCHES,  # Opacus on such lots: `python -m benchmarks growth`
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
_COMPILED_ON_GPU = ("mnist_cnn b256", "small_alexnet b128")  # minutes of compilation elsewhere
_MICROBATCHES_ON_GPU = (REFERENCE, "ours/flat", "ours/discretized", "graph/plain", "bf16/plain")
_LARGE_ON_GPU = (
    REFERENCE,
    "ours/flat",
    "opacus/hooks",
    "opacus/functorch",
    "opacus/ghost",
    "harness/flat",
    "harness/flat graph",
    "graph/plain",
    "graph/flat",
    "bf16/plain",
    "bf16/flat",
)
_ROWS_ARE_RECORDS = ("opacus/hooks", "opacus/functorch", "opacus/ghost", "graph/flat", "bf16/flat")
_TRITON_ON_GPU = ("mnist_cnn b256", "mlp b256", "small_alexnet b128", "densenet40 b64")
_SEEDS_ON_GPU = ("mnist_cnn b256", "mnist_cnn b2048", "mlp b256")  # networks that vmap can stack
_NOT_FOR_SEQUENCES = ("opacus/functorch", "opacus/ghost")
_TEN_GIGABYTES = ("small_alexnet lot 4096", "mlp width 4000")


def methods_for(name: str) -> list[str]:
    """What is measured on a workload: the most on the first one, or it would take an hour."""
    if name not in WORKLOADS:  # a point of the growth curves
        return [method for method in GROWTH if name not in _TEN_GIGABYTES or not method.startswith("opacus/hooks")]
    if name in _CHOSEN:
        return [method for method in METHODS if method in _CHOSEN[name]]
    return [method for method in METHODS if name == FIRST_WORKLOAD or method not in _FIRST_WORKLOAD_ONLY]


def methods_on_gpu(name: str) -> list[str]:
    """What is measured on a workload by `python -m benchmarks gpu`."""
    workload = workload_named(name)
    name = of_full_size(name)
    if workload.microbatch_size > 1:
        return list(_MICROBATCHES_ON_GPU)
    if name in LARGE_WORKLOADS:
        return [method for method in _LARGE_ON_GPU if workload.views == 1 or method not in _ROWS_ARE_RECORDS]
    methods = []
    for method in GPU_METHODS:
        family = method.partition("/")[0]
        if TRITON in method and name not in _TRITON_ON_GPU:
            continue
        if COMPILED in method and name not in _COMPILED_ON_GPU:
            continue
        if family == "harness" and (not workload.harness or name not in WORKLOADS):
            continue
        if family == "seeds" and name not in _SEEDS_ON_GPU:
            continue
        if family == "loop" and not name.startswith(("mnist", "mlp", "small")):
            continue
        if workload.is_sequence and method in _NOT_FOR_SEQUENCES:
            continue
        methods.append(method)
    return methods


def together(methods: Sequence[str], device: str) -> list[list[str]]:
    """Methods that are measured at the same time.

    On a CPU, one family of peers after the other, or memory would not suffice; on a GPU those with graphs apart, since
    what fails in one leaves the other processes' device as it was.
    """

    def key(method: str) -> str:
        if device == "cuda":
            if TRITON in method:  # chosen for a process
                return TRITON
            return "graphs" if "graph" in method else ""
        return method.partition("/")[0] if method.startswith(("opacus/", "jax/")) else ""

    groups: dict[str, list[str]] = {}
    for method in methods:
        groups.setdefault(key(method), []).append(method)
    return list(groups.values())


def wants_our_allocator(method: str) -> bool:
    """Whether the process runs with `keep_large_blocks`."""
    return MALLOC not in method


def builder(method: str, workload: Workload, device: str) -> Callable[[], Step]:
    """Makes the step; call it in the process that is measured.

    Raises:
        ValueError: There is no such method.
    """
    import torch

    family, _, kind = method.removesuffix(f" {MALLOC}").partition("/")
    match family:
        case "plain" if kind.endswith("drawn"):
            return lambda: DrawnSizes(workload, torch.channels_last, device)
        case "plain":
            layout = torch.channels_last if "channels_last" in kind else torch.contiguous_format
            return lambda: plain(workload, layout, device, COMPILED in kind)
        case "ours":
            from benchmarks.ours import bare

            return lambda: bare(workload, kind.removesuffix(f" {PURE}").removesuffix(f" {TRITON}"), device)
        case "opacus":
            from benchmarks.opacus_ import opacus

            return lambda: opacus(workload, kind, device, torch.contiguous_format)
        case "jax":
            from benchmarks.jax_ import jax_step

            return lambda: jax_step(workload, kind)
        case _:
            from benchmarks.gpu_ways import WAYS

            return lambda: WAYS[method](workload, device)
