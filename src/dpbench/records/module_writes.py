"""What of a module and its optimizers has been written to: everything that is saved with it, and may be published."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dpbench.canonical import digest_of
from dpbench.data.octaves import is_checked
from dpbench.errors import UnsupportedModuleError
from dpbench.records.saved_values import SavedValues

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


class Writes:
    """Writes to a module and its optimizers: none may carry what the records of a lot say past its release.

    The contents of tensors are compared in the first lot, and in one lot of each octave.

    Args:
        module: With all that is in it.
        trainer: Its optimizers, schedules and data module.
    """

    def __init__(self, module: pl.LightningModule, trainer: Any) -> None:
        self._module, self._trainer = module, trainer
        self._lots, self._extra = 0, with_extra_state(module)
        self._before: tuple[Saved, SavedValues] | None = None  # as of when the lot was drawn
        self._updated: tuple[Saved, SavedValues] | None = None  # as of its update

    def _saved(self) -> tuple[Saved, SavedValues]:
        tensors = Saved(
            self._module,
            is_checked(self._lots),
            self._extra,
            self._trainer.optimizers,
            getattr(self._trainer, "datamodule", None),
        )
        return tensors, SavedValues(self._trainer, self._module)

    def draw_lot(self) -> None:
        """Remember the module before anything of it sees the next lot."""
        self._lots += 1
        self.remember()

    def remember(self) -> None:
        """Accept what was written up to now, by code that saw no record of the lot."""
        self._before = self._saved()

    def open_lot(self) -> None:
        """Begin a lot, whose update is still to come."""
        self._updated = None
        if self._before is None:
            self.remember()

    def update(self) -> None:
        """Remember the module after its update, with the lot still in sight."""
        self._updated = self._saved()

    def accept_values(self) -> None:
        """Accept options that were set since the update, by code in whose sight no record was."""
        if self._updated is not None:
            self._updated = self._updated[0], SavedValues(self._trainer, self._module)

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
        self.forget()

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

    def forget(self) -> None:
        """Drop what was remembered of the lot."""
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
