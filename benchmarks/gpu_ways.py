"""Ways to make a step that a GPU offers: in a CUDA graph, in bf16, of a compiled network, of several seeds at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from benchmarks.ours import loop, mechanism_of
from benchmarks.plain import Step, laid_out
from benchmarks.workloads import SEEDS, Workload
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.mechanism.clipping import clip_factors
from dpbench.privacy.randomness import keyed_generator

_LR = 0.01
_ROOM = 4  # standard deviations of a Poisson lot's size that a graph has room for


def on_device(workload: Workload, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The network, its records and their labels."""
    layout = torch.channels_last
    model = workload.model().to(device, memory_format=layout)  # type: ignore[call-overload]
    x, y = (data.to(device) for data in workload.data())
    return model, laid_out(x, layout), y


def captured(compute: Callable[[], object], device: str, generator: torch.Generator | None = None) -> Step:
    """A CUDA graph of a function without arguments; elsewhere the function itself."""
    if device != "cuda":
        return compute
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # libraries make their plans outside of the graph
        for _ in range(3):
            compute()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        compute()

    def replay() -> None:
        _ = compute  # a graph has addresses, and what lies there belongs to the function: the model, its records
        graph.replay()

    return replay


def plain_graph(workload: Workload, device: str) -> Step:
    """The step without privacy, replayed."""
    model, x, y = on_device(workload, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)

    def compute() -> None:
        # A graph writes where the gradients were when it was recorded.
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return captured(compute, device)


def private_graph(workload: Workload, device: str) -> Step:
    """A private step of Poisson lots in two graphs; between them the host learns whether all norms are finite.

    A lot fills the first rows of a buffer with room for four standard deviations more than it has on average; the other
    rows have weight 0 in the loss, hence gradient 0. In the harness the ledger's line is written between the graphs.
    """
    room = workload.batch + math.ceil(_ROOM * math.sqrt(workload.batch) / 8) * 8
    model, x, y = on_device(workload, device)
    rows, labels, mask = (
        laid_out(x.new_zeros(room, *x.shape[1:]), torch.channels_last),
        y.new_zeros(room),
        x.new_zeros(room),
    )
    engine = PerRecordEngine(model, loss_reduction="sum")
    mechanism = mechanism_of("flat", workload, engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    # Read by the host between the graphs: a graph cannot raise.
    finite = torch.zeros((), dtype=torch.bool, device=device)
    generator = torch.Generator(device)
    for parameter, view in zip(engine.parameters, mechanism.gradients, strict=True):
        parameter.grad = view

    def sums() -> None:
        mechanism.total.zero_()
        loss = (F.cross_entropy(model(rows), labels, reduction="none") * mask).sum()
        gradients = engine.backward(loss, room)
        with torch.no_grad():
            norms = torch.stack([part.squared_norms() for part in gradients])
            finite.copy_(norms.isfinite().all())
            weights = clip_factors(norms.sum(0), 1.0) * mask
            for part, view in zip(gradients, mechanism.gradients, strict=True):
                part.add_weighted_sum(weights, view)

    def release() -> None:
        with torch.no_grad():
            mechanism.total.add_(torch.empty_like(mechanism.total).normal_(generator=generator))
            mechanism.total.div_(workload.batch)
            optimizer.step()

    first, second = captured(sums, device), captured(release, device, generator)
    sizes, number = torch.Generator().manual_seed(3), 0

    def step() -> None:
        nonlocal number
        number += 1
        size = int(torch.randn((), generator=sizes) * math.sqrt(workload.batch)) + workload.batch
        size = min(max(size, 1), workload.batch)  # of the records that there are
        rows[:size].copy_(x[:size])
        labels[:size].copy_(y[:size])
        mask.zero_()
        mask[:size] = 1
        first()
        if not bool(finite):
            raise ArithmeticError("a record's gradient is not finite")
        # The noise of a key is the same in a graph: the generator is registered, and takes its seed before each replay.
        generator.manual_seed(keyed_generator((1, number), device).initial_seed())
        second()

    return step


def plain_mixed(workload: Workload, device: str) -> Step:
    """The step without privacy in bf16, as `precision=bf16-mixed`."""
    model, x, y = on_device(workload, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def private(workload: Workload, device: str, mixed: bool = False, compiled: bool = False) -> Step:
    """The private step in bf16, or of a network that torch.compile has compiled."""
    model, x, y = on_device(workload, device)
    engine = PerRecordEngine(model)
    mechanism = mechanism_of("flat", workload, engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    network = torch.compile(model) if compiled else model
    releases = itertools.count()

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            loss = F.cross_entropy(network(x), y)
        with torch.no_grad():
            mechanism.clear()
            mechanism.accumulate(engine.backward(loss, len(x)), len(x))
            mechanism.add_noise(lambda step: (1, next(releases)))
            for parameter, gradient in zip(engine.parameters, mechanism.post_process(), strict=True):
                parameter.grad = gradient
        optimizer.step()

    return step


def seeds(workload: Workload, device: str) -> Step:
    """One private step of each of `SEEDS` networks with other weights, lots and noise, all in one call (torch.func)."""
    networks = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        networks.append(workload.build().to(device))
    parameters, buffers = stack_module_state(networks)
    weights = {name: value.detach() for name, value in parameters.items()}
    _, x, y = on_device(workload, device)
    orders = torch.stack([torch.randperm(len(x)) for _ in range(SEEDS)]).to(device)
    lots, labels = x[orders], y[orders]
    base = networks[0]

    def loss(own: dict[str, Tensor], part: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(base, own, (part[None],)), label[None])

    def release(own: dict[str, Tensor], lot: Tensor, label: Tensor) -> dict[str, Tensor]:
        rows = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(own, lot, label)
        squared = torch.stack([row.flatten(1).square().sum(1) for row in rows.values()]).sum(0)
        factors = squared.rsqrt().clamp(max=1.0)  # clip_weights works in place, which vmap does slowly
        return {name: torch.tensordot(factors, row, 1) for name, row in rows.items()}

    def step() -> None:
        sums = vmap(release, randomness="different")(weights, lots, labels)
        for name, total in sums.items():
            weights[name] = weights[name] - _LR * (total + torch.randn_like(total)) / workload.batch

    # Batch statistics of one network would be those of all.
    if buffers:
        raise ValueError("the network has buffers")
    return step


WAYS: dict[str, Callable[[Workload, str], Step]] = {
    "loop/flat": lambda workload, device: loop(workload, device, "eager")[0],
    "graph/plain": plain_graph,
    "graph/flat": private_graph,
    "bf16/plain": plain_mixed,
    "bf16/flat": lambda workload, device: private(workload, device, mixed=True),
    "compiled/flat": lambda workload, device: private(workload, device, compiled=True),
    "seeds/flat": seeds,
}
