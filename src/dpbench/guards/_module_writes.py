"""What of a module and its optimizers has been written to: everything that is saved with it, and may be published."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dpbench.canonical import digest_of
from dpbench.data.lots import LotLoader
from dpbench.data.octaves import is_checked
from dpbench.errors import UnsupportedModuleError
from dpbench.guards._saved_values import SavedValues, differences
from dpbench.guards.guard import Guard
from dpbench.guards.optimizer_steps import OptimizerSteps
from dpbench.guards.withheld_loss import records_withheld
from dpbench.records.source import require

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by their bytes


_BEFORE_RELEASE = (
    "the forward pass changes {names} (or a hook that sees the batch does), which would be saved with the model "
    "without noise: keep statistics of private records out of the model. Updates that use only released weights (and "
    "nothing kept from a batch), such as a target network, belong in on_before_zero_grad or on_train_epoch_end; a "
    "learning rate that depends on the number of steps belongs in a schedule (configure_optimizers), and counters are "
    "attributes. (A generator makes images for a private discriminator in evaluation mode: BatchNorm would reveal the "
    "number of records.)"
)
_BEFORE_UPDATE = (
    "{names} changed between the release of a batch and its update (in on_before_optimizer_step or "
    "configure_gradient_clipping, of the module or of a callback), where values that training_step has kept from the "
    "batch are accessible, and would be saved without noise: updates that use only released weights belong in a hook "
    "of the optimizer (register_step_post_hook), in on_before_zero_grad (except for trained weights, which are in use "
    "there) or on_train_epoch_end."
)
_AFTER_RELEASE = (
    "{names} changed after the release of a batch, where its records are still accessible (in on_train_batch_end, or "
    "after the optimizer's step in manual optimization), and would be saved without noise: updates that use only "
    "released weights (and nothing kept from a batch) belong in a hook of the optimizer (register_step_post_hook), in "
    "on_before_zero_grad (except for trained weights, which are in use there) or on_train_epoch_end; in manual "
    "optimization, name the network that sees records in private_module. A learning rate that depends on the number "
    "of steps belongs in a schedule (configure_optimizers)."
)
_BETWEEN = (
    "{names} changed in a hook of an epoch (on_train_epoch_end, on_train_epoch_start) that uses a tensor which "
    "training_step has computed of records, such as a loss: it is exact, and would be saved or steer updates without "
    "noise. Show it there, and let released weights, the number of steps and constants decide what changes."
)


class Saved:
    """Parameters, buffers, persistent metric states and extra states of a module, as they were at one time.

    Tensors count the writes in place (`_version`), which costs microseconds; a write through `.data` is not counted,
    and shows in sums over the contents only.

    Args:
        module: With all that is in it.
        contents: Whether to compare contents, too; costs a pass over all tensors.
        extra: Those of its modules, by name, that have an extra state (`get_extra_state`).
        optimizers: The tensors of whose states are compared too.
        datamodule: Whose `state_dict` is compared with the contents.
    """

    def __init__(
        self,
        module: nn.Module,
        contents: bool = False,
        extra: Mapping[str, nn.Module] | None = None,
        optimizers: Sequence[Optimizer] = (),
        datamodule: Any = None,
    ) -> None:
        self._module = module
        self._contents = contents
        self._extra = extra or {}
        self._optimizers = optimizers
        self._datamodule = datamodule
        self._tensors = self._saved_tensors()  # alive, so that no number names two of them
        self._ids = list(map(id, self._tensors))
        self._versions = _versions(self._tensors)
        self._sums = self._sums_of(self._tensors)
        self._states = _extra_states(self._extra)
        self._entries = self._added_entries()

    def written(self) -> list[str]:
        """Names of what was written to, replaced or added since then."""
        tensors = self._saved_tensors()
        ids = list(map(id, tensors))
        versions = _versions(tensors)
        sums = self._sums_of(tensors)
        written = [
            *differences(self._states, _extra_states(self._extra)),
            *differences(self._entries, self._added_entries()),
        ]
        if ids == self._ids and versions == self._versions and sums == self._sums:
            return written
        marks = zip(self._versions, self._sums, strict=True)
        before = dict(zip(self._ids, marks, strict=True))
        named = [*_named_of_states(self._optimizers), *_named(self._module)]
        names = {id(x): name for name, x in named}
        tensors_written = []
        marks = zip(versions, sums, strict=True)
        for number, mark in zip(ids, marks, strict=True):
            if before.get(number) != mark:
                tensors_written.append(names.get(number, "a tensor"))
        return tensors_written + written or ["its modules"]

    def _saved_tensors(self) -> list[Tensor]:
        return _tensors(self._module) + _tensors_of_states(self._optimizers)

    def _sums_of(self, tensors: list[Tensor]) -> list[int | None]:
        """A sum over the contents of each tensor, None where contents are not compared."""
        if not self._contents:
            return [None] * len(tensors)
        return [sum_of_bits(x) for x in tensors]

    def _added_entries(self) -> dict[str, str]:
        if not self._contents:
            return {}
        return _added_entries(self._module, self._datamodule)


class _Snapshot(NamedTuple):
    """All that is saved with a module, as it was at one time."""

    tensors: Saved
    values: SavedValues

    def refuse_writes(self, message: str) -> None:
        """Raise UnsupportedModuleError with names in a message where something was written to since then."""
        written = [*self.tensors.written(), *self.values.written()]
        if written:
            raise UnsupportedModuleError(message.format(names=", ".join(written)))


class Writes(Guard):
    """Compares all that is saved with a module: no write may carry what the records of a lot say past its release.

    From the moment a lot is drawn to its update, and from there to the last hook that sees it. The contents of tensors
    are compared in the first lot, and in one lot of each octave. What the private optimizer writes before it calls the
    closure follows from released gradients, and is accepted.
    """

    name = "writes"
    prevents = (
        "values computed from records are kept in buffers, hyperparameters or optimizer states and saved without noise"
    )

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._lots = 0
        self._before: _Snapshot | None = None  # as of when the lot was drawn
        self._updated: _Snapshot | None = None  # as of its update
        self._steps: OptimizerSteps | None = None
        self._loader: LotLoader | None = None

    # ------------------------------------------------------------------------------------- moments

    def on_attach(self) -> None:
        """Watch the optimizers, and the module from one lot to the next."""
        training = self.session.training
        self._extra = with_extra_state(training.module)
        self._steps = OptimizerSteps(self.session.optimizer, self.session.trained.parameters)
        self._steps.watch(self, self._after_update)
        training.after_lot.append(self.end_lot)
        training.after_zero_grad.append(self.remember)
        self._steps.goes_on = training.withhold_loss(self.accept_values)
        training.watch_epochs(self._between_batches)

    def on_change(self) -> None:
        """Allow the optimizer to move the new parameters."""
        require(self._steps).follow(self.session.trained.parameters)
        self.remember()

    def on_begin(self) -> None:
        """Learn from the loader when a lot is drawn: before any hook has seen it."""
        self._loader = self.session.loader
        self._loader.before_lot = self._draw_lot

    def on_open(self, batch: Any) -> None:
        """Begin a lot, whose update is still to come."""
        require(self._steps).open_lot()
        self._updated = None
        if self._before is None:
            self.remember()

    def on_stepped(self) -> None:
        """A step that sees a lot may write nothing; the hooks before its backward pass, which see none, may."""
        if self.session.training.automatic_optimization:
            self.refuse_before_release()
        elif self.session.released and self.has_public_networks:
            self._note_update()
            require(self._steps).close_lot()

    def on_release(self) -> None:
        """Nothing of the module may have kept anything of the records."""
        require(self._steps).release_lot()
        self.refuse_before_release()

    def on_end(self) -> None:
        """Nothing is watched any longer."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        if self._loader is not None:
            self._loader.before_lot = None
            self._loader = None
        self._forget()

    # ------------------------------------------------------------------------------------- what is remembered

    def _draw_lot(self) -> None:
        self.session.refuse_skipped_lot()
        self._lots += 1
        self.remember()

    def _after_update(self) -> None:
        if not self.has_public_networks:
            self._note_update()

    def _snapshot(self) -> _Snapshot:
        training = self.session.training
        tensors = Saved(
            training.module,
            is_checked(self._lots),
            self._extra,
            training.optimizers,
            training.datamodule,
        )
        return _Snapshot(tensors, SavedValues(training))

    def remember(self) -> None:
        """Accept what was written up to now, by code that saw no record of the lot."""
        self._before = self._snapshot()

    def _note_update(self) -> None:
        """Remember the module after its update, with the lot still in sight."""
        self._updated = self._snapshot()

    @contextmanager
    def _between_batches(self) -> Iterator[None]:
        """Within, a hook may use what the step has kept of records, to show it, or write; not both."""
        before = self._snapshot()
        with records_withheld(refuses=False) as records:
            yield
        if records.has_seen:
            before.refuse_writes(_BETWEEN)

    def accept_values(self) -> None:
        """Accept options that were set since the update, by code in whose sight no record was."""
        require(self._steps).end_step()
        if self._updated is not None:
            self._updated = self._updated._replace(values=SavedValues(self.session.training))

    def end_lot(self) -> None:
        """Refuse writes after the update; the last hook that sees the lot has run.

        Raises:
            UnsupportedModuleError: The model was written to.
        """
        if self._updated is not None:
            self._updated.refuse_writes(_AFTER_RELEASE)
        self._forget()

    def refuse_before_release(self) -> None:
        """Refuse writes since the lot was drawn: statistics of private records may have got into the model.

        Raises:
            UnsupportedModuleError: The model was written to.
        """
        if self._before is not None:
            self._before.refuse_writes(_BEFORE_RELEASE)

    def refuse_before_update(self) -> None:
        """Refuse writes between the release and the update.

        Raises:
            UnsupportedModuleError: The model was written to.
        """
        if self._before is not None:
            self._before.refuse_writes(_BEFORE_UPDATE)

    def _forget(self) -> None:
        self._before = None
        self._updated = None


def with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    """Modules in a module, by name, that put more than tensors into `state_dict`."""
    default = nn.Module.get_extra_state
    modules = {}
    for name, submodule in module.named_modules():
        if type(submodule).get_extra_state is not default:
            modules[name] = submodule
    return modules


def _extra_states(modules: Mapping[str, nn.Module]) -> dict[str, bytes]:
    """The extra state of each module, by how it is written."""
    states = {}
    for name, module in modules.items():
        call = f"{name}.get_extra_state()".lstrip(".")
        states[call] = pickle.dumps(module.get_extra_state())
    return states


def _added_entries(module: nn.Module, datamodule: Any) -> dict[str, str]:
    """Hashes of what `state_dict` saves beside parameters, buffers and extra states: by an override or a hook."""
    tensors = dict(_named(module))
    tensors |= module.named_parameters(remove_duplicate=False)
    tensors |= module.named_buffers(remove_duplicate=False)
    try:
        state = module.state_dict(keep_vars=True)
    except TypeError:  # an override without torch's options
        state = module.state_dict()
    entries = {}
    for name, value in state.items():
        if value is not tensors.get(name) and not name.endswith("_extra_state"):
            entries[f"state_dict()[{name!r}]"] = digest_of(value)
    if datamodule is not None:
        entries["the data module's state_dict()"] = digest_of(datamodule.state_dict())
    return entries


def _tensors_of_states(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    states: list[Any] = []
    for optimizer in optimizers:
        states += optimizer.state.values()
    # One comprehension, since this runs four times in every lot.
    return [x for state in states if isinstance(state, dict) for x in state.values() if isinstance(x, Tensor)]


def _named_of_states(optimizers: Sequence[Optimizer]) -> list[tuple[str, Tensor]]:
    """The tensors of `_tensors_of_states`, with names."""
    named: list[tuple[str, Tensor]] = []
    for optimizer in optimizers:
        for place, state in enumerate(optimizer.state.values()):
            if isinstance(state, dict):
                for name, x in state.items():
                    if isinstance(x, Tensor):
                        named.append((f"optimizer.state[{place}].{name}", x))
    return named


def _tensors(module: nn.Module) -> list[Tensor]:
    tensors: list[Tensor | None] = []
    modules: list[nn.Module | None] = [module]
    while modules:  # four times in every lot
        submodule = modules.pop()
        if submodule is None:
            continue
        if submodule._parameters:
            tensors += submodule._parameters.values()
        if submodule._buffers:
            tensors += submodule._buffers.values()
        if submodule._modules:
            modules += submodule._modules.values()
        if "_persistent" in submodule.__dict__:  # a metric
            tensors += [x for _, x in _states(submodule)]
    return [x for x in tensors if x is not None]


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors of `_tensors`, each once, with names."""
    named: list[tuple[str, Tensor]] = []
    named += module.named_parameters()
    named += module.named_buffers()
    for prefix, submodule in module.named_modules():
        if "_persistent" in submodule.__dict__:  # a metric
            for name, x in _states(submodule):
                named.append((f"{prefix}.{name}", x))
    return named


def _states(metric: nn.Module) -> list[tuple[str, Tensor]]:
    """States of a torchmetrics metric that `state_dict` holds."""
    is_persistent: dict[str, bool] = metric.__dict__["_persistent"]
    states: list[tuple[str, Tensor]] = []
    for name, is_saved in is_persistent.items():
        if is_saved:
            value = getattr(metric, name, None)
            for x in value if isinstance(value, list) else [value]:
                if isinstance(x, Tensor):
                    states.append((name, x))
    return states


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return [x._version for x in tensors]
    except RuntimeError:  # made in inference mode: not counted
        return [-1 if x.is_inference() else x._version for x in tensors]


def sum_of_bits(x: Tensor) -> int | None:
    """Sum of the contents' bits: exact, and so the same for any number of threads, and NaN equals itself."""
    if is_lazy(x) or x.is_meta:
        return None
    x = x.detach()
    if x.layout is not torch.strided:
        x = x.to_dense()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.is_floating_point():
        x = _bits(x.resolve_neg())
    return int(x.sum(dtype=torch.int64))


def _bits(x: Tensor) -> Tensor:
    """A floating-point tensor as whole numbers."""
    size = x.element_size()
    if size == 8:  # as two numbers of 4 bytes, or sums would overflow
        return x.contiguous().flatten().view(torch.int32)
    return x.view(_INTEGERS[size])
