"""Per-record gradients of a whole model from one backward pass that computes no weight gradient.

Forward hooks keep each layer's input and the gradient edge of its output; one `torch.autograd.grad` gives the gradients
of those outputs; `_uses` turns the two into per-record gradients, lazily, by the rules in `layers`. Recurrent layers
and attention are computed from their parts while they run (`_interception`). Nothing is monkeypatched, and no model is
wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.privacy.gradients import tf32
from dpbench.privacy.gradients._calls import backward, positional, refuse_reentrant
from dpbench.privacy.gradients._interception import Arguments, Interception
from dpbench.privacy.gradients._parametrized import is_parametrized
from dpbench.privacy.gradients._places import Places
from dpbench.privacy.gradients._shared import SharedCall, SharedCalls, parameter_gradients
from dpbench.privacy.gradients._uses import Use, gradients_of, is_coarse, summable
from dpbench.privacy.gradients.layers import (
    INTERCEPTED,
    OF_INPUTS,
    Rule,
    instantiated,
    rule_of,
)
from dpbench.privacy.gradients.parameter import ParameterGradients, zero_gradients
from dpbench.privacy.gradients.validation import (
    check_sums,
    guard_training_mode,
    has_trainable,
    refuse_unsupported,
    trainable_of,
)
from dpbench.privacy.record_axis.host import running_axis, watched
from dpbench.privacy.record_axis.mode import RecordAxis
from dpbench.privacy.record_axis.verdict import has_own_nodes

LossReduction = Literal["mean", "sum"]
_Call = TypeVar("_Call", Use, SharedCall)

_NO_GRADIENT = (
    "the loss has no gradient: return it undetached, computed from trained parameters outside torch.no_grad() and "
    "torch.inference_mode()."
)


class PerRecordEngine:
    """Watches a model's layers and answers a loss with the per-record gradients of its trainable parameters.

    Args:
        model: Its layers must treat records independently and carry them in dimension 0.
        loss_reduction: How the loss combines the records of a batch: their "mean" or their "sum".

    Attributes:
        loss_reduction: How the loss combines the records.
        names: Names of the trainable parameters, tied ones once.
        parameters: The parameters, in the same order.
        verified: True once a call of `backward` with `verify` could compare, and agreed.
        recording: True while forward passes are kept for the next call of `backward`.
        records: Number of records in the forward passes that follow, where that is known.
        needs_tags: True if a module that has children owns parameters: gradients then come from calls of functions with
            shared tensors, too, and forward passes have to run under tags.
        at_once: Any number of rows goes into one forward pass.
        axis: The mode that the forward passes ran under, and how many neighboring rows make a record; None: none.

    Raises:
        UnsupportedModuleError: A layer mixes records (BatchNorm and the like) or cannot be handled; a parameter is
            complex.
        ConfigurationError: There is nothing to train, or `loss_reduction` is unknown.
    """

    at_once: int | None = None

    def __init__(self, model: nn.Module, loss_reduction: LossReduction = "mean") -> None:
        refuse_unsupported(model)
        trainable = trainable_of(model, loss_reduction)
        self.names = list(trainable)
        self.parameters = list(trainable.values())
        self.loss_reduction = loss_reduction
        self._uses: list[Use] = []
        self._is_going_back = False
        self.recording = True
        self.verified = False
        self.records: int | None = None
        self._counted: Tensor | None = None
        self.axis: tuple[RecordAxis, int] | None = None
        self._open: list[Interception] = []  # of layers that run now
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._watch(any(_has_own_code(module) for module in model.modules()))

    def follow_tags(self, follows: bool = True) -> None:
        """Take the layout of records, and the tensors that they share, from tags.

        Args:
            follows: False: the engine takes one row of each record for granted again.
        """
        self.close()
        self._watch(follows)

    def _watch(self, needs_tags: bool) -> None:
        """Attach the engine's hooks."""
        self.needs_tags = needs_tags
        self._handles = guard_training_mode(self._model, lambda: self.recording)
        known: set[nn.Module] = set()
        self._shared_calls = SharedCalls(lambda: self.recording and not self._is_going_back, known)
        if needs_tags:
            known.update(module for module in self._model.modules() if _is_known(module))
            for module in self._model.modules():
                self._handles += [
                    module.register_forward_pre_hook(self._shared_calls.before),
                    module.register_forward_hook(self._shared_calls.after, always_call=True),
                ]
        self._attach(self._model)

    def within(self, step: Callable[[Any], Any]) -> Callable[..., Any]:
        """Wrap a step so that its computations outside of modules count, if forward passes run under tags."""

        @functools.wraps(step)
        def within(*args: Any, **kwargs: Any) -> Any:
            with self._shared_calls.within() if self.needs_tags else nullcontext():
                return step(*args, **kwargs)

        return within

    @property
    def plain_layers(self) -> Mapping[str, nn.Module] | None:
        """Layers by name, where the gradients of all are functions of their inputs and output gradients alone.

        None where others have trainable parameters, or carry the records in another way than one row each.
        """
        if self._others or self.needs_tags:
            return None
        return {name: layer for name, (layer, _) in self._plain.items()}

    def keep(self, name: str, inputs: Arguments, output: Tensor) -> None:
        """Keep a call of one of `plain_layers` that was carried out elsewhere, for the next call of `backward`.

        Args:
            name: Name of the layer.
            inputs: Arguments of the call, with a row for each record.
            output: The gradient of the loss with respect to it is taken for that of the layer's output.
        """
        layer, record = self._plain[name]
        record(layer, inputs, {}, output)

    def _attach(self, model: nn.Module) -> None:
        """Register the hooks of every layer with trainable parameters."""
        self._plain: dict[str, tuple[nn.Module, Any]] = {}
        self._others: list[str] = []
        apart: set[nn.Module] = set()
        for layer in filter(is_parametrized, model.modules()):  # includes the tensors behind its weight
            apart.update(layer.parametrizations.modules())  # type: ignore[union-attr]
        for name, module in model.named_modules():
            if module in apart or (self.needs_tags and not _is_known(module)):
                continue
            if type(module) in INTERCEPTED:
                if has_trainable(module, recurse=True):
                    self._attach_interception(name, module)
                    self._others.append(name)
            elif has_trainable(module, recurse=is_parametrized(module)):
                rule = rule_of(module)
                hook = self._hook(name, rule)
                if rule not in OF_INPUTS:
                    self._others.append(name)
                else:
                    self._plain[name] = (module, hook)
                handle = module.register_forward_hook(hook, with_kwargs=True)
                self._handles.append(handle)

    def close(self) -> None:
        """Remove the hooks; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.discard()
        while self._open:  # of an interrupted pass
            self._open.pop().close()

    def discard(self) -> None:
        """Forget forward passes that no backward pass followed."""
        self._uses.clear()
        self._shared_calls.clear()

    def expect(self, records: int, counted: Tensor | None = None) -> None:
        """Forget forward passes that no backward pass followed, and keep those that follow, of so many records.

        Args:
            records: Rows of the forward passes.
            counted: Number of records that the loss is a mean of, shape (), on the device; None: all. The others pad.
        """
        self.discard()
        self.axis = None
        self.recording = True
        self.records = records
        self._counted = counted

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes inside are not recorded."""
        previous = self.recording
        self.recording = False
        try:
            yield
        finally:
            self.recording = previous

    def _is_recording(self) -> bool:
        return self.recording and torch.is_grad_enabled()

    def _keep(self, use: Use) -> None:
        """Keep a layer's call in the forward pass; calls that a checkpoint repeats in the backward pass are ignored.

        Hooks run there as in the forward pass, since it must compute the same; their edges lead nowhere.
        """
        if not self._is_going_back:
            self._uses.append(use)

    def _back(
        self,
        loss: Tensor,
        targets: Sequence[Any],
        scale: Tensor,
        retain: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of a loss times `scale`; see `_calls.backward`."""
        self._is_going_back = True
        try:
            return backward(loss, targets, scale, self.parameters, retain)
        finally:
            self._is_going_back = False

    def _hook(self, name: str, rule: Rule | None) -> Any:
        """Make a forward hook that keeps a layer's input and the gradient edge of its output."""

        def record(
            layer: nn.Module,
            args: Arguments,
            kwargs: dict[str, Any],
            output: Any,
        ) -> None:
            if not self._is_recording():
                return
            if not isinstance(output, Tensor):
                raise UnsupportedModuleError(
                    f"{name} ({type(layer).__name__}) has parameters and does not return a single tensor, which the "
                    "engine does not support: move its parameters into submodules that do, or set gradients=auto or "
                    "one_by_one."
                )
            if not output.requires_grad:
                return
            if kwargs:
                args = positional(layer, args, kwargs)
            places: tuple[Any, ...] = ()
            axis = running_axis() if self.needs_tags else None
            if axis is not None:
                places = tuple(axis.place_of(x) for x in (output, *args) if isinstance(x, Tensor))
                if places[0] is None:
                    return  # all records share it: see `_shared`
            use = Use(
                name,
                layer,
                inputs=tuple(args),
                versions=tuple(x._version for x in args if isinstance(x, Tensor)),
                edges=(get_gradient_edge(output),),
                rule=rule,
                output=output.detach() if rule is None else None,  # with which `fallback` compares
                places=places,
                tagged=0 if axis is None else axis.records,
            )
            self._keep(use)

        return record

    def _attach_interception(self, name: str, module: nn.Module) -> None:
        """Register hooks that compute a layer from its parts, and keep these."""

        def before(layer: nn.Module, args: Arguments) -> None:
            if not self._is_recording():
                return
            interception = INTERCEPTED[type(layer)](layer)
            interception.open()
            self._open.append(interception)

        def after(layer: nn.Module, args: Arguments, output: Any) -> None:
            if not self._open or self._open[-1].layer is not layer:
                return
            interception = self._open.pop()
            interception.close()
            if output is None:  # forward failed
                return
            if not interception.parts:
                raise UnsupportedModuleError(
                    f"{name} ({type(layer).__name__}) ran where per-record gradients cannot be computed: call it in "
                    "training mode, outside torch.compile and torch.jit."
                )
            for part in interception.parts:
                edges = tuple(edge for edge in part.edges if edge is not None)
                use = Use(
                    name,
                    layer,
                    part.inputs,
                    part.versions,
                    edges,
                    part=part,
                )
                self._keep(use)

        self._handles += [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after, always_call=True),
        ]

    def backward(self, loss: Tensor, records: int, verify: bool = False) -> list[ParameterGradients]:
        """Gradients of each record's own loss.

        Args:
            loss: Scalar, the mean or the sum (see `loss_reduction`) of the losses of `records` records.
            records: R, the number of records in the forward passes since the last call.
            verify: Compare the sum over records with an ordinary backward pass (costs one); do so on a first batch.

        Returns:
            One `ParameterGradients` over R records for each of `parameters`.

        Raises:
            UnsupportedModuleError: A layer saw another number of rows than R, changed its input in place, has no
                per-record gradients, or (with `verify`) a parameter is used where no hook can see it.
            ConfigurationError: The loss has no gradient.
        """
        if records and not loss.requires_grad:
            raise ConfigurationError(_NO_GRADIENT)
        uses = self._uses
        self._uses = []
        shared_calls = self._shared_calls.take() if records else []
        # Of each record's own loss, of which a mean holds only one part in R.
        if self.loss_reduction == "sum":
            scale = torch.ones_like(loss)
        elif self._counted is None:
            scale = torch.full_like(loss, float(records))
        else:
            scale = self._counted.to(loss).expand_as(loss)
        edges: list[Any] = [edge for use in uses for edge in use.edges]
        of_layers = len(edges)
        edges += [edge for call in shared_calls for edge in call.edges]
        compared: list[int] = []  # positions of the parameters with checked sums
        if verify:
            refuse_reentrant(loss)
            # A hook may have frozen some since the batch was opened.
            compared += [position for position, parameter in enumerate(self.parameters) if parameter.requires_grad]
        # One pass, with the reference for the sums: a compiled network has only one backward pass.
        targets = [*edges, *(self.parameters[position] for position in compared)]
        results = self._back_in_place(uses, shared_calls, loss, targets, scale) if targets else ()
        count = len(edges)
        grads = results[:of_layers]
        expected = results[count:]
        with torch.no_grad(), self.paused(), torch.autocast(loss.device.type, enabled=False):
            shared = self._shared_gradients(shared_calls, results[of_layers:count], records)
            if verify:
                # On gradients of its own, which keep what they compute: the release must come about as in every other
                # batch, to the last bit, or a run that goes on here would make another one.
                computed = self._gradients(uses, grads, shared, records)
                named = {self.names[position]: self.parameters[position] for position in compared}
                coarse = any(is_coarse(grad) for grad in grads if grad is not None)
                tolerance = 5e-2 if coarse or tf32.is_allowed(loss.device.type) else 1e-3
                self.verified |= check_sums(
                    named,
                    [computed[position] for position in compared],
                    expected,
                    records,
                    tolerance,
                )
            return self._gradients(uses, grads, shared, records)

    def _shared_gradients(
        self,
        calls: Sequence[SharedCall],
        grads: Sequence[Tensor | None],
        records: int,
    ) -> dict[Tensor, ParameterGradients]:
        """Gradients of parameters through calls with shared tensors."""
        ends: list[tuple[Tensor, Tensor]] = []
        for call, of_call in _by_call(calls, grads):
            if any(grad is not None for grad in of_call):
                ends += call.gradients([summable(grad) for grad in of_call], records)
        if not ends:
            return {}
        trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        rows = parameter_gradients(ends, trainable)
        return {p: instantiated(row) for p, row in zip(trainable, rows, strict=True) if row is not None}

    def _back_in_place(
        self,
        uses: Sequence[Use],
        shared_calls: Sequence[SharedCall],
        loss: Tensor,
        targets: Sequence[Any],
        scale: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Gradients as of `_back`, once the layout of the records is checked.

        Raises:
            UnsupportedModuleError: A layer has its rows in another arrangement.
        """
        axis, self.axis = self.axis, None
        if axis is None:
            return self._back(loss, targets, scale, retain=bool(shared_calls))
        mode, rows_of_record = axis
        places = Places(mode, rows_of_record)
        # Python may mix in the backward pass; and for a public input only the gradient shows the records of the rows.
        is_judged = places.are_public(uses) or mode.has_hooks or has_own_nodes(loss)
        with ExitStack() as looks:
            if is_judged:
                looks.enter_context(watched(mode))
                looks.enter_context(mode.in_backward())
            grads = self._back(loss, targets, scale, retain=bool(shared_calls))
        if mode.reads:  # of the backward pass: before it, the step is refused
            raise UnsupportedModuleError(f"{mode.reads[0]}, in the backward pass")
        places.refuse_others(_by_call(uses, grads))
        places.refuse_other_outputs(_by_call(shared_calls, grads[sum(len(use.edges) for use in uses) :]))
        return grads

    def seen(self, loss: Tensor) -> list[tuple[nn.Module, list[Tensor]]]:
        """Inputs and output gradients of each layer in the forward passes since the last call, in order.

        Args:
            loss: Loss of these forward passes.

        Returns:
            Layers, with their inputs and the gradients of their outputs; no tensors where rows cannot be several of a
            record.
        """
        uses = self._uses
        self._uses = []
        edges: list[Any] = [edge for use in uses for edge in use.edges]
        grads_of_edges = self._back(loss, edges, torch.ones_like(loss)) if edges else ()
        seen: list[tuple[nn.Module, list[Tensor]]] = []
        for use, grads in _by_call(uses, grads_of_edges):
            tensors = []
            if use.part is None:
                tensors += use.with_rows()
                tensors += [grad for grad in grads if grad is not None]
            seen.append((use.layer, tensors))
        return seen

    def _gradients(
        self,
        uses: Sequence[Use],
        grads: Sequence[Tensor | None],
        shared: Mapping[Tensor, ParameterGradients],
        records: int,
    ) -> list[ParameterGradients]:
        """Gradients of each of `parameters`, summed over its uses.

        Args:
            uses: Calls of layers, in the order of the forward pass.
            grads: Gradients of all edges of all uses, in order.
            shared: Gradients through shared tensors.
            records: R.
        """
        by_parameter: dict[Tensor, list[ParameterGradients]] = {parameter: [] for parameter in self.parameters}
        for parameter, gradients in shared.items():
            by_parameter[parameter].append(gradients)
        for use, use_grads in _by_call(uses, grads):
            if all(grad is None for grad in use_grads):
                continue  # the loss does not depend on this call
            for name, gradients in gradients_of(use, use_grads, records).items():
                parameter = use.parameter(name)
                if parameter in by_parameter:  # it is trained
                    by_parameter[parameter].append(gradients)
        return [_combine(parameter, parts, records) for parameter, parts in by_parameter.items()]


def _is_known(module: nn.Module) -> bool:
    """Return whether a module is a layer that the engine knows, or PyTorch's own."""
    is_of_torch = type(module).__module__.startswith("torch.nn.modules.") and not any(module.children())
    is_cell = isinstance(module, nn.RNNCellBase)  # one function of its weights
    return type(module) in INTERCEPTED or rule_of(module) is not None or (is_of_torch and not is_cell)


def _has_own_code(module: nn.Module) -> bool:
    """Return whether a module that has children owns parameters."""
    if type(module) in INTERCEPTED or rule_of(module) is not None or not any(True for _ in module.children()):
        return False
    return has_trainable(module, recurse=False)


def _by_call(calls: Sequence[_Call], grads: Sequence[Tensor | None]) -> Iterator[tuple[_Call, list[Tensor | None]]]:
    """Each use of a layer, or call of a function, with the gradients of its edges.

    Args:
        calls: The calls, in the order of the forward pass.
        grads: Gradients of all edges of all calls, in order.
    """
    remaining = iter(grads)
    for call in calls:
        yield call, list(islice(remaining, len(call.edges)))


def _combine(
    parameter: Tensor,
    parts: list[ParameterGradients],
    records: int,
) -> ParameterGradients:
    """Gradients of a parameter, summed over its uses."""
    if not parts:
        return zero_gradients(parameter, records)
    first, *others = parts
    if not others:
        return first
    return first.plus(others)
