"""What of a module and its optimizers has been written to: everything that is saved with it, and may be published."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dpbench.canonical import digest_of
from dpbench.data.lots import LotLoader
from dpbench.data.octaves import is_checked
from dpbench.errors import UnsupportedModuleError
from dpbench.guards.guard import Guard
from dpbench.guards.optimizer_steps import OptimizerSteps
from dpbench.guards.saved_values import SavedValues
from dpbench.records.source import require

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes; 8 are two of 4, or sums would overflow


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
        self._module, self._extra, self._optimizers, self._datamodule = module, extra or {}, optimizers, datamodule
        self._states = _extra_states(self._extra)
        self._tensors = _tensors(module) + _tensors_of_states(optimizers)
        self._versions = _versions(self._tensors)
        self._sums = [_sum(x) for x in self._tensors] if contents else None
        self._entries = _added_entries(module, datamodule) if contents else {}

    def written(self) -> list[str]:
        """Names of what was written to, replaced or added since then."""
        now = _tensors(self._module) + _tensors_of_states(self._optimizers)
        versions = _versions(now)
        sums = None if self._sums is None else [_sum(x) for x in now]
        states = _extra_states(self._extra)
        extra = [
            f"{name}.get_extra_state()".lstrip(".") for name, state in states.items() if state != self._states[name]
        ]
        if self._sums is not None:
            entries = _added_entries(self._module, self._datamodule)
            extra += [name for name in {**self._entries, **entries} if self._entries.get(name) != entries.get(name)]
        same = len(now) == len(self._tensors) and all(map(is_, now, self._tensors))
        if same and versions == self._versions and sums == self._sums:
            return extra
        before = {id(x): (version, i) for i, (x, version) in enumerate(zip(self._tensors, self._versions, strict=True))}
        names = {id(x): name for name, x in [*_named_of_states(self._optimizers), *_named(self._module)]}
        changed = []
        for i, (x, version) in enumerate(zip(now, versions, strict=True)):
            known, place = before.get(id(x), (None, 0))
            if known != version or (sums is not None and self._sums is not None and sums[i] != self._sums[place]):
                changed.append(names.get(id(x), "a tensor"))
        return [*changed, *extra] or ["its modules"]


class Writes(Guard):
    """Compares all that is saved with a module: no write may carry what the records of a lot say past its release.

    From the moment a lot is drawn to its update, and from there to the last hook that sees it. The contents of tensors
    are compared in the first lot, and in one lot of each octave. What the private optimizer writes before it calls the
    closure follows from released gradients, and is accepted.
    """

    name = "writes"
    prevents = "buffers, hyperparameters or optimizer states keep what records say, and are saved without noise"

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._lots = 0
        self._before: tuple[Saved, SavedValues] | None = None  # as of when the lot was drawn
        self._updated: tuple[Saved, SavedValues] | None = None  # as of its update
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
        training.withhold_loss(self.accept_values)

    def on_begin(self) -> None:
        """Learn from the loader when a lot is drawn: before any hook has seen it."""
        self._loader = self.session.loader
        self._loader.before_lot = self._draw_lot

    def on_open(self, batch: Any) -> None:
        """Begin a lot, whose update is still to come."""
        self._require_steps().open_lot()
        self._updated = None
        if self._before is None:
            self.remember()

    def on_stepped(self) -> None:
        """A step that sees a lot may write nothing; the hooks before its backward pass, which see none, may."""
        if self.session.training.automatic_optimization:
            self.refuse_before_release()
        elif self.session.released and self._are_others:
            self._update()
            self._require_steps().close_lot()

    def on_release(self) -> None:
        """Nothing of the module may have kept anything of the records."""
        self._require_steps().release_lot()
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

    @property
    def _are_others(self) -> bool:
        """Whether networks follow the private one in a step, which see no record."""
        return self.session.part is not self.session.training.module

    def _require_steps(self) -> OptimizerSteps:
        return require(self._steps)

    def _draw_lot(self) -> None:
        self.session.refuse_skipped_lot()
        self._lots += 1
        self.remember()

    def _after_update(self) -> None:
        if not self._are_others:
            self._update()

    def _saved(self) -> tuple[Saved, SavedValues]:
        training = self.session.training
        tensors = Saved(
            training.module,
            is_checked(self._lots),
            self._extra,
            training.optimizers,
            training.datamodule,
        )
        return tensors, SavedValues(training)

    def remember(self) -> None:
        """Accept what was written up to now, by code that saw no record of the lot."""
        self._before = self._saved()

    def _update(self) -> None:
        """Remember the module after its update, with the lot still in sight."""
        self._updated = self._saved()

    def accept_values(self) -> None:
        """Accept options that were set since the update, by code in whose sight no record was."""
        if self._updated is not None:
            self._updated = self._updated[0], SavedValues(self.session.training)

    def end_lot(self) -> None:
        """Refuse writes after the update; the last hook that sees the lot has run.

        Raises:
            UnsupportedModuleError: The model was written to.
        """
        if self._updated is not None and (changed := _written(self._updated)):
            raise UnsupportedModuleError(
                f"{', '.join(changed)} changed after the release of a lot, where its records are still in sight (in "
                "on_train_batch_end, or after the optimizer's step in manual optimization), and would be saved without "
                "noise: what follows from released weights alone (and from nothing kept of a lot) belongs into "
                "on_before_zero_grad, on_train_epoch_end or a hook of the optimizer (register_step_post_hook); in "
                "manual optimization, name the network that sees records in private_module. A learning rate that "
                "follows from the number of steps is a schedule's (configure_optimizers)."
            )
        self._forget()

    def refuse_before_release(self) -> None:
        """Refuse writes since the lot was drawn: statistics of private records may have got into the model.

        Raises:
            UnsupportedModuleError: The model was written to.
        """
        if self._before is not None and (changed := _written(self._before)):
            raise UnsupportedModuleError(
                f"the forward pass changes {', '.join(changed)} (or a hook that sees the lot does), which would be "
                "saved with the model without noise: keep statistics of private records out of the model. What follows "
                "from released weights alone (and from nothing kept of a lot), such as a target network, belongs into "
                "on_before_zero_grad or on_train_epoch_end; a learning rate that follows from the number of steps is a "
                "schedule's (configure_optimizers), and counters are attributes. (A generator makes images for a "
                "private discriminator in evaluation mode: BatchNorm would tell how many records there were.)"
            )

    def refuse_before_update(self) -> None:
        """Refuse writes between the release and the update.

        Raises:
            UnsupportedModuleError: The model was written to.
        """
        if self._before is not None and (changed := _written(self._before)):
            raise UnsupportedModuleError(
                f"{', '.join(changed)} changed between the release of a lot and its update (in on_before_optimizer_step"
                " or configure_gradient_clipping, of the module or of a callback), where what training_step has kept "
                "of the lot is in sight, and would be saved without noise: what follows from released weights alone "
                "belongs into on_before_zero_grad or on_train_epoch_end."
            )

    def _forget(self) -> None:
        self._before = self._updated = None


def with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    """Modules in a module, by name, that put more than tensors into `state_dict`."""
    plain = nn.Module.get_extra_state
    return {name: one for name, one in module.named_modules() if type(one).get_extra_state is not plain}


def _extra_states(modules: Mapping[str, nn.Module]) -> dict[str, bytes]:
    return {name: pickle.dumps(module.get_extra_state()) for name, module in modules.items()}


def _added_entries(module: nn.Module, datamodule: Any) -> dict[str, str]:
    """Hashes of what `state_dict` saves beside parameters, buffers and extra states: by an override or a hook."""
    own = dict(_named(module))
    own |= dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    entries = {}
    try:
        state = module.state_dict(keep_vars=True)
    except TypeError:  # an override without torch's options
        state = module.state_dict()
    for name, value in state.items():
        if value is not own.get(name) and not name.endswith("_extra_state"):
            entries[f"state_dict()[{name!r}]"] = digest_of(value)
    if datamodule is not None:
        entries["the data module's state_dict()"] = digest_of(datamodule.state_dict())
    return entries


def _written(saved: tuple[Saved, SavedValues]) -> list[str]:
    tensors, values = (one.written() for one in saved)
    return [*tensors, *values]


def _tensors_of_states(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    states = [state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, dict)]
    return [x for state in states for x in state.values() if isinstance(x, Tensor)]


def _named_of_states(optimizers: Sequence[Optimizer]) -> list[tuple[str, Tensor]]:
    return [
        (f"optimizer.state[{place}].{name}", x)
        for optimizer in optimizers
        for place, state in enumerate(optimizer.state.values())
        if isinstance(state, dict)
        for name, x in state.items()
        if isinstance(x, Tensor)
    ]


def _tensors(module: nn.Module) -> list[Tensor]:
    found: list[Tensor | None] = []
    modules: list[nn.Module | None] = [module]
    while modules:  # four times in every lot
        one = modules.pop()
        if one is None:
            continue
        if one._parameters:
            found += one._parameters.values()
        if one._buffers:
            found += one._buffers.values()
        if one._modules:
            modules += one._modules.values()
        if "_persistent" in one.__dict__:  # a metric
            found += [x for _, x in _states(one)]
    return [x for x in found if x is not None]


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    named: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for prefix, one in module.named_modules():
        if "_persistent" in one.__dict__:
            named += [(f"{prefix}.{name}", x) for name, x in _states(one)]
    return named


def _states(metric: nn.Module) -> list[tuple[str, Tensor]]:
    """States of a torchmetrics metric that `state_dict` holds."""
    persistent: dict[str, bool] = metric.__dict__["_persistent"]
    values = [(name, getattr(metric, name, None)) for name, kept in persistent.items() if kept]
    flat = [(name, x) for name, value in values for x in (value if isinstance(value, list) else [value])]
    return [(name, x) for name, x in flat if isinstance(x, Tensor)]


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return [x._version for x in tensors]
    except RuntimeError:  # made in inference mode: not counted
        return [-1 if x.is_inference() else x._version for x in tensors]


def _sum(x: Tensor) -> int | None:
    """Sum of the contents' bits: exact, and so the same for any number of threads, and NaN equals itself."""
    if is_lazy(x) or x.is_meta:
        return None
    x = x.detach()
    if x.layout is not torch.strided:
        x = x.to_dense()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.is_floating_point():
        x = x.resolve_neg()
        x = x.contiguous().flatten().view(torch.int32) if x.element_size() == 8 else x.view(_INTEGERS[x.element_size()])
    return int(x.sum(dtype=torch.int64))
