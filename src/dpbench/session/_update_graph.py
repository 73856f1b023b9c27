"""The update of the weights as one CUDA graph: the fused kernels of PyTorch's SGD, Adam and AdamW.

These kernels read learning rates and numbers of steps from the device, so that one recording is for all learning rates:
a schedule moves a number that the graph reads. The gradients are copied to where the graph reads them: whoever looks at
`p.grad` between release and update, and after it, sees the released gradients.

Each update of a training is made by the fused kernels, recorded or not, which round otherwise than PyTorch's usual
ones: a resumed run rounds as the uninterrupted one does. Whether they can be used is a matter of the optimizer and its
state, never of how many steps there were.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dpbench.records.training import NotRepeatable, ReplacedMethods

_FUSED = (SGD, Adam, AdamW)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of parameters: learning rates are float32 in the kernels."""
_MOST = 16
"""Recordings; an optimizer whose options or memory move from step to step is not recorded any longer."""
_EAGER = "executor=graph: the optimizer's update is carried out eagerly, because {reason}."
_NOT_RECORDED = "executor=graph: the optimizer's update is not recorded, because {reason}."

Facts = tuple[Any, ...]
"""What a recorded update holds of its optimizer; equal ones move the same memory by the same numbers."""


class _Recording(NamedTuple):
    """An update that can be carried out on other gradients, with other learning rates.

    Attributes:
        facts: Of the optimizer.
        gradients: Tensors that gradients are copied into.
        written: Tensors that it writes to.
        replay: Carries it out.
    """

    facts: Facts
    gradients: list[Tensor]
    written: list[Tensor]
    replay: Callable[[], None]


class UpdateGraphs:
    """Makes the updates of an optimizer by a graph, in the place of the body of its `step`.

    Hooks of the optimizer, its closure and its schedules are called as ever.
    """

    uses = 0
    """Updates that a recording has made, over all trainings."""
    recordings = 0
    """That were made, over all trainings."""

    def __init__(self) -> None:
        self._optimizer: Optimizer | None = None
        self._methods: ReplacedMethods | None = None
        self._rates: list[Tensor] = []
        self._begin()

    def _begin(self) -> None:
        self._recording: _Recording | None = None
        self._last: Facts = ()
        self._attempts = 0
        self._is_informed = False

    def attach(self, optimizer: Optimizer, device: torch.device, inform: Callable[[str], None]) -> None:
        """Take over the updates of an optimizer.

        Args:
            optimizer: Of the private part.
            device: Of the module.
            inform: Shows a line.
        """
        self._device = device
        self._inform = inform
        self._begin()
        if type(optimizer) not in _FUSED:
            self._say(_EAGER, f"{type(optimizer).__name__} is not SGD, Adam or AdamW of torch.optim")
            return
        if _is_replaced(optimizer):
            self._say(_EAGER, "the step of the optimizer was replaced on this object")
            return
        self._optimizer = optimizer
        self._methods = ReplacedMethods(optimizer)
        self._methods.replace("step", self._step_of(optimizer))

    def detach(self) -> None:
        """Give the optimizer back as it was, and let go of the graph."""
        if self._methods is not None:
            self._methods.restore()
        if self._optimizer is not None:
            _give_back(self._optimizer)
        self._optimizer = None
        self._methods = None
        self._rates.clear()
        self._begin()
        for name in ("_device", "_inform"):
            self.__dict__.pop(name, None)

    def _step_of(self, optimizer: Optimizer) -> MethodType:
        """A step with PyTorch's hooks, whose body is that of this class."""

        @Optimizer.profile_hook_step
        @functools.wraps(type(optimizer).step)
        def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
            # Schedules warn where no optimizer has stepped before them, by what they set on its step.
            optimizer._opt_called = True
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._update(optimizer)
            return loss

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return MethodType(step, optimizer)

    def _say(self, line: str, reason: str) -> None:
        if not self._is_informed:
            self._inform(line.format(reason=reason))
        self._is_informed = True

    # ------------------------------------------------------------------------------------- one update

    @torch.no_grad()
    def _update(self, optimizer: Optimizer) -> None:
        recording = self._recording
        facts = _facts(optimizer)
        if recording is None or recording.facts != facts:
            try:
                _refuse_unfused(optimizer, self._device)
            except NotRepeatable as error:
                self._say(_EAGER, str(error))
                _body(optimizer)
                return
            facts = _settled(optimizer)
            is_repeated = facts == self._last
            self._last = facts
            self._fill_rates(optimizer)
            gradients = _like_parameters(optimizer)
            if not is_repeated or self._attempts >= _MOST:
                self._unrecorded(optimizer, gradients)
                return
            recording = self._record(optimizer, facts, gradients)
            if recording is None:
                return
        else:
            self._fill_rates(optimizer)
            torch._foreach_copy_(recording.gradients, _gradients(optimizer))
        recording.replay()
        _count_write(recording.written)
        self.uses += 1

    def _unrecorded(self, optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
        """An update by the fused kernels."""
        with _fused(optimizer, self._rates, gradients):
            _body(optimizer)
        _count_write(_written(optimizer))

    def _record(self, optimizer: Optimizer, facts: Facts, gradients: list[Tensor]) -> _Recording | None:
        """Record the update; None: it could not be, and was made as it is.

        Args:
            optimizer: Its state is complete.
            facts: Of it.
            gradients: Of the present update, in memory of the recording's own.
        """
        self._attempts += 1
        self._recording = None  # before there is another one: memory is that of one
        try:
            replay = self._captured(optimizer, gradients)
        except RuntimeError as error:
            self._attempts = _MOST
            self._say(_NOT_RECORDED, f"it could not be captured ({str(error).splitlines()[0][:200]})")
            self._unrecorded(optimizer, gradients)
            return None
        if self._attempts == _MOST:
            self._say(_NOT_RECORDED, "options of the optimizer, or its memory, move from step to step")
        recording = _Recording(facts, gradients, _written(optimizer), replay)
        self._recording = recording
        self.recordings += 1
        return recording

    def _captured(self, optimizer: Optimizer, gradients: Sequence[Tensor]) -> Callable[[], None]:
        rates = list(self._rates)

        def compute() -> None:
            with _fused(optimizer, rates, gradients, is_captured=self._device.type == "cuda"):
                _body(optimizer)

        if self._device.type != "cuda":
            return compute
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compute()

        def replay() -> None:
            _ = rates, gradients  # a graph holds addresses, and not what lies there
            graph.replay()

        return replay

    def _fill_rates(self, optimizer: Optimizer) -> None:
        """Put the learning rate of each group where the kernels read it."""
        for position, group in enumerate(optimizer.param_groups):
            if position == len(self._rates):
                self._rates.append(torch.zeros((), dtype=torch.float32, device=self._device))
            rate = group["lr"]
            if isinstance(rate, Tensor) and rate.device == self._device:
                self._rates[position].copy_(rate.squeeze())
            else:
                self._rates[position].fill_(float(rate))


# ----------------------------------------------------------------------------------------- the optimizer


def _is_replaced(optimizer: Optimizer) -> bool:
    """Whether `step` is another one than that of the class, but for the flag that a schedule sets in it."""
    own = vars(optimizer).get("step")
    if own is None:
        return False
    return not hasattr(own, "_wrapped_by_lr_sched") or inspect.unwrap(own) is not inspect.unwrap(type(optimizer).step)


def _body(optimizer: Optimizer) -> None:
    """The step of the class without hooks."""
    inspect.unwrap(type(optimizer).step)(optimizer)


def _moved(optimizer: Optimizer) -> Iterator[tuple[Mapping[str, Any], nn.Parameter]]:
    """Parameters that have a gradient, with their groups."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    gradients = []
    for _, parameter in _moved(optimizer):
        assert parameter.grad is not None
        gradients.append(parameter.grad)
    return gradients


def _facts(optimizer: Optimizer) -> Facts:
    """Options of all groups but the learning rate, and where parameters and states lie."""
    facts: list[Any] = []
    states = optimizer.state
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name not in ("params", "lr"):
                facts.append(value)
        for parameter in group["params"]:
            if parameter.grad is None:
                facts.append(None)
                continue
            facts.append(parameter.data_ptr())
            facts.append(parameter.shape)
            for name, value in states.get(parameter, {}).items():
                facts.append(name)
                facts.append(value.data_ptr() if isinstance(value, Tensor) else value)
    return tuple(facts)


def _refuse_unfused(optimizer: Optimizer, device: torch.device) -> None:
    """Raise NotRepeatable where the fused kernels would not make this update."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise NotRepeatable("its gradients are scaled")
    for group in optimizer.param_groups:
        for name, value in group.items():
            values = value if isinstance(value, tuple) else (value,)
            if name not in ("params", "lr") and any(isinstance(x, Tensor) for x in values):
                raise NotRepeatable(f"its {name} are tensors")
        has_buffer = set()
        for parameter in group["params"]:
            if parameter.grad is not None:
                has_buffer.add("momentum_buffer" in optimizer.state.get(parameter, {}))
        if group.get("dampening") and len(has_buffer) > 1:
            raise NotRepeatable("some of its parameters have momentum, dampened, and others have none yet")
    for _, parameter in _moved(optimizer):
        if type(parameter) not in (nn.Parameter, Tensor) or parameter.layout is not torch.strided:
            raise NotRepeatable("its parameters are no plain tensors")
        if parameter.device != device:
            raise NotRepeatable("not all of its parameters are on the model's device")
        if parameter.dtype not in _DTYPES:
            raise NotRepeatable(f"it has parameters of {parameter.dtype}")
        if torch.empty_like(parameter).stride() != parameter.stride():
            raise NotRepeatable("parameters overlap in memory")


def _settled(optimizer: Optimizer) -> Facts:
    """Bring the state to where and how the kernels need it: numbers of steps on the device, in the parameters' layout.

    Returns:
        Facts about it.
    """
    groups_with_momentum = set()
    for group, parameter in _moved(optimizer):
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if name == "step":
                state[name] = value.to(parameter.device, torch.float32)
            elif value.stride() != parameter.stride() or value.device != parameter.device:
                state[name] = torch.empty_like(parameter).copy_(value)
        if isinstance(state.get("momentum_buffer"), Tensor):
            groups_with_momentum.add(id(group))
    for group, parameter in _moved(optimizer):
        state = optimizer.state.get(parameter, {})
        # Momentum begins with the first gradient, as zero momentum does that is not dampened.
        if id(group) in groups_with_momentum and state.get("momentum_buffer") is None:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return _facts(optimizer)


def _give_back(optimizer: Optimizer) -> None:
    """Put numbers of steps back to the host, where the usual kernels read them."""
    for group in optimizer.param_groups:
        if group["fused"] or group.get("capturable"):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].cpu()


def _like_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Copies of the gradients, in the layouts of their parameters."""
    copies = []
    for _, parameter in _moved(optimizer):
        copies.append(torch.empty_like(parameter))
    if copies:
        torch._foreach_copy_(copies, _gradients(optimizer))
    return copies


def _written(optimizer: Optimizer) -> list[Tensor]:
    """Parameters and states that an update writes to; held, so that no other memory comes to lie there."""
    written: list[Tensor] = []
    for _, parameter in _moved(optimizer):
        written.append(parameter.detach())
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                written.append(value)
    return written


def _count_write(written: Sequence[Tensor]) -> None:
    """Count a write to tensors, which neither a graph nor the fused kernels do: guards look at the counts."""
    torch.autograd.graph.increment_version(written)


@contextmanager
def _fused(
    optimizer: Optimizer,
    rates: Sequence[Tensor],
    gradients: Sequence[Tensor],
    is_captured: bool = False,
) -> Iterator[None]:
    """Within, the step of an optimizer is made by the fused kernels.

    Args:
        optimizer: Its options are as before behind it.
        rates: Learning rate of each group.
        gradients: Of the parameters that have one.
        is_captured: Whether a graph is being recorded, which PyTorch asks for in an option.
    """
    before = []
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        options = {"lr": rate, "fused": True, "foreach": False}
        if "capturable" in group:
            options["capturable"] = is_captured
        before.append({name: group[name] for name in options})
        group.update(options)
    moved = [parameter for _, parameter in _moved(optimizer)]
    own_gradients = _gradients(optimizer)
    for parameter, gradient in zip(moved, gradients, strict=True):
        parameter.grad = gradient
    try:
        yield
    finally:
        for group, options in zip(optimizer.param_groups, before, strict=False):
            group.update(options)
        for parameter, gradient in zip(moved, own_gradients, strict=True):
            parameter.grad = gradient
