"""Everything that a training step may change before its backward pass, and how it is put back."""

from __future__ import annotations

import copy
import dis
import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dpbench.errors import ConfigurationError
from dpbench.privacy.record_axis.tags import is_private, tag_of
from dpbench.records.training import Training

_MOST_ENTRIES = 10_000  # of a list or dictionary that are looked into
HOOKS = ("_hooks", "_with_kwargs", "_always_called")
"""Ends of names of a module's dictionaries of hooks."""
CODE = (
    type,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
)
"""Kinds of objects that are code, and hold no values."""
PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
)
"""Kinds of values that nothing can change."""
_OPAQUE = (*CODE, Optimizer, Dataset, DataLoader)
_OPAQUE_ROOMS = (
    "builtins.",
    "torch.",
    "pytorch_lightning.",
    "lightning.",
    "lightning_fabric.",
    "numpy.",
    *("logging.", "wandb.", "mlflow.", "tensorboardX.", "comet_ml.", "neptune.", "aim."),  # only written to
    "dpbench.strategies.",
    "dpbench.callback.",
    "dpbench.session.",
    "dpbench.guards.",
    "dpbench.records.",
)
_STAND_INS = frozenset(["log", "log_dict", "manual_backward", "all_gather", "_trainer", "_current_fx_name"])
"""Attributes of a module that others put there, and take away."""
_VALUES = (float, complex, Tensor, np.ndarray, np.generic)  # that are withheld
_HOLDERS = (list, dict, set, deque)
_INDEPENDENT = "_dpbench_independent"
_ABSENT = object()

Undo = Callable[[], object]


class StepState:
    """Random numbers and all that can be reached from a module: attributes, buffers, metric states, gradients.

    The user's own classes and functions are followed, with their defaults, closures and the global variables that they
    name; of the trainer and optimizers, numbers. Not reached are iterators, files, slots of objects without a
    dictionary, code of installed packages, and objects that only a data set holds. Parameters are not copied: a step
    that writes to one is refused anyway.

    Args:
        training: Its module; its flags, schedules and the options of its optimizers are kept too.
    """

    def __init__(self, training: Training) -> None:
        self._undo: list[Undo] = []
        self._undo_draws: list[Undo] = []
        self._containers: list[tuple[Any, int]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._alive: list[object] = []  # so that no number names two objects
        self._keep_global_generators(training.device)
        self._keep_flags(training)
        self._keep_reachable(training)
        for parameter, _ in self._gradients:
            parameter.grad = None  # a step that zeroes them in place must not reach them

    def restore(self) -> None:
        """Put everything back but gradients, which are cleared."""
        for undo in self._undo:
            undo()
        self.rewind()

    def rewind(self) -> None:
        """Put random numbers back and clear gradients; all else that a step has left behind stays."""
        for undo in self._undo_draws:
            undo()
        for parameter, _ in self._gradients:
            parameter.grad = None

    def tensors(self) -> list[Tensor]:
        """All tensors that were reached, parameters included."""
        return [x for x in self._alive if isinstance(x, Tensor)]

    def finish(self) -> None:
        """Put everything back, gradients included."""
        self.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def _keep_flags(self, training: Training) -> None:
        should_stop = training.should_stop
        self._undo.append(lambda: setattr(training, "should_stop", should_stop))

    def _keep_global_generators(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._keep_generator(
                lambda: torch.cuda.get_rng_state(device),
                lambda state: torch.cuda.set_rng_state(state, device),
            )
        self._keep_generator(torch.get_rng_state, torch.set_rng_state)
        self._keep_generator(np.random.get_state, np.random.set_state)
        self._keep_generator(random.getstate, random.setstate)

    def _keep_generator(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        state = copy.deepcopy(get())
        self._undo_draws.append(lambda: put(state))

    def _roots(self, training: Training) -> list[Any]:
        """Objects that a step can write to."""
        schedules = [scheduler.__dict__ for scheduler in training.schedulers]
        options = [optimizer.param_groups for optimizer in training.optimizers]
        return [training.module, *schedules, *options]

    def _keep_reachable(self, training: Training) -> None:
        """Remember the roots and all that they hold, each object once."""
        for owner in (getattr(training.module, "_trainer", None), *training.optimizers):
            self._keep_numbers(owner)
        pending = self._roots(training)
        seen: set[int] = set()
        while pending:
            x = pending.pop()
            if isinstance(x, PLAIN) or id(x) in seen:
                continue
            seen.add(id(x))
            self._alive.append(x)
            pending += self._keep(x)

    def _keep(self, x: Any) -> Iterable[Any]:
        """Remember one object, and return its parts."""
        if isinstance(x, Tensor):
            self._keep_tensor(x)
            self._keep_numbers(x)
        elif isinstance(x, (type, FunctionType, MethodType, functools.partial)):
            return self._keep_code(x)
        elif isinstance(x, np.ndarray):
            self._keep_array(x)
        elif isinstance(x, torch.Generator | np.random.RandomState):
            self._keep_generator(x.get_state, x.set_state)
        elif isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
            self._keep_generator(x.getstate, x.setstate)
        elif isinstance(x, np.random.Generator):
            bits = x.bit_generator

            def put(state: Any) -> None:
                bits.state = copy.deepcopy(state)

            self._keep_generator(lambda: bits.state, put)
        elif isinstance(x, dict):
            entries = self._keep_dict(x)
            return entries.values() if len(entries) <= _MOST_ENTRIES else ()
        elif isinstance(x, list | set | deque | tuple):
            return self._keep_container(x)
        elif isinstance(x, nn.Module) or (isinstance(getattr(x, "__dict__", None), dict) and not is_opaque(x)):
            stays = self._stays(x)
            attributes = self._keep_dict(x.__dict__, stays)
            # Not what hooks hold; but a hook that the step registers would be there once for each of its runs.
            for name in attributes:
                if name.endswith(HOOKS) and isinstance(attributes[name], dict):
                    self._keep_dict(attributes[name])
            stays |= {name for name in attributes if name.endswith(HOOKS)}
            return [type(x), *(value for name, value in attributes.items() if name not in stays)]
        return ()

    def _stays(self, x: object) -> Set[str]:
        """Attributes of an object that are not put back."""
        return _STAND_INS if isinstance(x, nn.Module) else frozenset()

    def _keep_code(self, x: Any) -> Iterable[Any]:
        """Remember the values in classes and functions of the user, and return the parts that can hold more."""
        if isinstance(x, functools.partial):
            return (x.func, *x.args, *x.keywords.values())
        if isinstance(x, MethodType):
            return (x.__self__, x.__func__)
        if _is_of_library(x) or _is_installed(_module_of(x)):
            return ()
        self._keep_numbers(x)
        if isinstance(x, type):
            held = [value for value in vars(x).values() if isinstance(value, (FunctionType, *_HOLDERS))]
            return (*x.__bases__, *held)
        defaults = (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
        cells = map(self._keep_cell, x.__closure__ or ())
        return (*self._keep_dict(x.__dict__).values(), *defaults, *cells, *self._keep_globals(x))

    def _keep_numbers(self, x: Any) -> None:
        """Remember numbers and arrays among attributes of an object that is not looked into."""
        before = dict(getattr(x, "__dict__", ()))
        kind = x if isinstance(x, type) else type(x)
        stays = {"should_stop", *getattr(kind, _INDEPENDENT, ())}

        def undo() -> None:
            for name, value in list(vars(x).items()) if hasattr(x, "__dict__") else ():
                if value is before.get(name, _ABSENT) or name in stays or not isinstance(value, (int, *_VALUES)):
                    continue
                if name in before:
                    setattr(x, name, before[name])
                else:
                    delattr(x, name)

        self._undo.append(undo)

    def _keep_globals(self, function: FunctionType) -> list[Any]:
        """Remember numbers among global variables that a function names, and return the ones that may hold others."""
        variables = function.__globals__
        holders = []
        for name in _global_names(function.__code__):
            value = variables.get(name)
            if isinstance(value, (int, *_VALUES)):
                self._undo.append(functools.partial(variables.__setitem__, name, value))
            elif isinstance(value, _HOLDERS) or (hasattr(value, "__dict__") and not is_opaque(value)):
                holders.append(value)
        return holders

    def _keep_cell(self, cell: Any) -> Any:
        """Remember a number that a function keeps in an outer variable, and return an object that may hold others."""
        try:
            before = cell.cell_contents
        except ValueError:  # assigned later
            return None
        if isinstance(before, (int, *_VALUES)):
            self._undo.append(lambda: setattr(cell, "cell_contents", before))
        return before

    def _keep_tensor(self, x: Tensor) -> None:
        if x.is_leaf:
            requires_grad = x.requires_grad

            def undo() -> None:
                if x.requires_grad != requires_grad:
                    x.requires_grad_(requires_grad)

            self._undo.append(undo)
            self._gradients.append((x, x.grad))
        if isinstance(x, nn.Parameter) or x.is_inference() or x.is_meta:
            return
        data = x.data  # to which no write is counted
        before = x.detach().clone()
        self._undo.append(lambda: _is_equal(data, before) or data.copy_(before))

    def _keep_array(self, x: NDArray[Any]) -> None:
        if not x.flags.writeable or x.dtype.hasobject:
            return
        before = x.copy()
        self._undo.append(lambda: np.copyto(x, before))

    def _keep_dict(self, x: dict[Any, Any], stays: Set[Any] = frozenset()) -> dict[Any, Any]:
        """Remember a dictionary, but for entries that stay as they are; a copy is returned."""
        before = dict(dict.items(x))  # as it is stored: some make their entries when they are asked
        self._undo.append(lambda: _refill(x, before, stays))
        return before

    def _keep_container(self, x: Any) -> Iterable[Any]:
        """Remember the entries of a list, set, queue or tuple, and return the ones that can hold more."""
        if isinstance(x, set):
            members = set(x)
            self._undo += [x.clear, lambda: x.update(members)]
            return ()
        entries = list(x)
        self._containers.append((x, len(x)))
        if isinstance(x, list):
            self._undo.append(lambda: x.__setitem__(slice(None), entries))
        elif isinstance(x, deque):
            self._undo += [x.clear, lambda: x.extend(entries)]
        return entries if len(entries) <= _MOST_ENTRIES else ()


class PublicState(StepState):
    """State of a step at the moment when Python first gets to know a value of records.

    Guarantee: until then nothing in it depends on values of records but tensors, which are tagged. Put back after the
    step, nothing that `StepState` reaches carries values that were read into another record's step, into the next batch
    or into an update. Schedules and options of optimizers are compared in each batch by the guard `writes`.
    Metrics of torchmetrics stay, as their states are tagged; so do attributes that `independent` names.

    Args:
        training: The training.
    """

    def __init__(self, training: Training) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._changed: dict[tuple[int, str], tuple[dict[str, Any], dict[str, Any]]] = {}
        super().__init__(training)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # of the step that goes on

    def put_back(self) -> None:
        """Put everything back but gradients and random numbers: those that follow are drawn anew."""
        for attributes, before in self._attributes:
            for name, value in attributes.items():
                if value is not before.get(name) and isinstance(value, _VALUES):
                    self._changed[id(attributes), name] = (attributes, before)
        for undo in self._undo:
            undo()

    def withhold(self) -> None:
        """Have attributes that were put back raise an error where they are used, up to `give_back`."""
        for (_, name), (attributes, _) in self._changed.items():
            attributes[name] = WithheldValue(name)

    def give_back(self) -> None:
        """Give withheld attributes their earlier values; values that others have set meanwhile stay."""
        for (_, name), (attributes, before) in self._changed.items():
            if isinstance(attributes.get(name), WithheldValue):
                del attributes[name]
                attributes.update({name: before[name]} if name in before else {})

    def _roots(self, training: Training) -> list[Any]:
        """The module: schedules and options may move, in manual optimization within the step."""
        return [training.module]

    def _keep_flags(self, training: Training) -> None:
        """Nothing: a step that stops the training is refused by name."""

    def _keep(self, x: Any) -> Iterable[Any]:
        if _is_metric(type(x)):
            for part in x.modules() if isinstance(x, nn.Module) else ():  # a collection holds several
                self._keep_metric(part)
            return ()
        if isinstance(x, nn.Module) or (hasattr(x, "__dict__") and not is_opaque(x)):
            self._attributes.append((x.__dict__, dict(x.__dict__)))
        return super()._keep(x)

    def _keep_globals(self, function: FunctionType) -> list[Any]:
        """Remember bindings of global variables, those of inner functions too, and follow functions and classes."""
        variables = function.__globals__
        holders = super()._keep_globals(function)
        for name in _names_within(function.__code__):
            before = variables.get(name, _ABSENT)
            self._undo.append(functools.partial(_bind, variables, name, before))
            if isinstance(before, (type, FunctionType)):
                holders.append(before)
        return holders

    def _keep_cell(self, cell: Any) -> Any:
        with suppress(ValueError):  # assigned later
            self._undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
        return super()._keep_cell(cell)

    def _keep_code(self, x: Any) -> Iterable[Any]:
        if isinstance(x, type) and not _is_of_library(x) and not _is_installed(_module_of(x)):
            before = dict(vars(x))
            stays: frozenset[str] = getattr(x, _INDEPENDENT, frozenset())
            self._undo.append(functools.partial(_rebind_attributes, x, before, stays))
        return super()._keep_code(x)

    def _keep_tensor(self, x: Tensor) -> None:
        if not isinstance(x, nn.Parameter) and not x.is_inference() and not x.is_meta and x.layout is torch.strided:
            data = x.data
            self._undo.append(functools.partial(_back_in_memory, x, data))
        super()._keep_tensor(x)

    def _keep_metric(self, metric: Any) -> None:
        """Remember a metric with public states: numbers that a step has read go into them without a tag."""
        states = {name: getattr(metric, name) for name in getattr(metric, "_defaults", ())}
        before = {name: value.clone() for name, value in states.items() if isinstance(value, Tensor)}

        def undo() -> None:
            now = {name: getattr(metric, name) for name in before}
            if not any(isinstance(value, Tensor) and is_private(tag_of(value)) for value in now.values()):
                for name, value in before.items():
                    setattr(metric, name, value.clone())

        self._undo.append(undo)

    def _stays(self, x: object) -> Set[str]:
        return super()._stays(x) | getattr(type(x), _INDEPENDENT, frozenset())


class WithheldValue:
    """Stands in for a value of records between the release of a batch and its update. Any use of it is refused.

    Args:
        name: The attribute's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # as copying and pickling ask
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise ConfigurationError(
            f"the optimizer, a schedule or a hook uses {self._name}, which training_step set after reading values of "
            "records: it is exact, and would steer the update without noise. Use released weights, the number of steps "
            f"or constants, or, if it does not depend on records, decorate the module's class with "
            f'@dpbench.independent("{self._name}").'
        )


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "radd", "rsub", "rmul", "rtruediv", "rpow"),
    *("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "round", "bool", "int", "float", "index", "hash"),
    *("str", "repr", "format", "len", "iter", "getitem", "call", "array"),
):
    setattr(WithheldValue, f"__{_name}__", WithheldValue._refuse)


def independent(*names: str) -> Callable[[Any], Any]:
    """Declare attributes that training_step writes to be independent of records; a decorator of the module's class.

    Where `training_step` reads values of records into Python (`loss.item()`), its changes of attributes from there on
    are undone after each batch. Declared ones are kept, such as a counter of batches:

        @dpbench.independent("num_batches")
        class Classifier(pl.LightningModule): ...

    Nothing checks the declaration: an attribute that does depend on records voids the guarantee.

    Args:
        names: Names of attributes.

    Raises:
        ConfigurationError: A name is no string.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigurationError('independent takes names of attributes, such as @dpbench.independent("num_batches").')

    def declared(kind: Any) -> Any:
        setattr(kind, _INDEPENDENT, frozenset(names) | getattr(kind, _INDEPENDENT, frozenset()))
        return kind

    return declared


def _back_in_memory(x: Tensor, data: Tensor) -> None:
    """Give a tensor the memory that it had."""
    if x.data_ptr() != data.data_ptr():
        x.data = data


def _bind(variables: dict[str, Any], name: str, before: Any) -> None:
    """Bind a global variable as before."""
    if variables.get(name, _ABSENT) is before:
        return
    if before is _ABSENT:
        del variables[name]
    else:
        variables[name] = before


def _rebind_attributes(kind: type, before: dict[str, Any], stays: Set[str]) -> None:
    """Give a class the attributes that it had, but for those of Python itself."""
    for name, value in dict(vars(kind)).items():
        if value is before.get(name, _ABSENT) or name in stays or name.startswith("__"):
            continue
        if name in before:
            setattr(kind, name, before[name])
        else:
            delattr(kind, name)


@functools.lru_cache(maxsize=4096)
def _names_within(code: CodeType) -> frozenset[str]:
    """Names of global variables that a function and those within it read or bind."""
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_within(constant)
    return frozenset(names)


def _refill(x: dict[Any, Any], before: dict[Any, Any], stays: Set[Any]) -> None:
    """Give a dictionary its entries back; it is never empty meanwhile, since other threads may read it."""
    for name in x.keys() - before.keys() - stays:
        del x[name]
    for name, value in before.items():
        if name not in stays and x.get(name, _ABSENT) is not value:
            x[name] = value
    if list(x) != list(before) and x.keys() == before.keys():  # an entry was taken out and put in again
        entries = {name: x[name] for name in before}
        x.clear()
        x.update(entries)


def _is_metric(kind: type) -> bool:
    return any(base.__module__.startswith("torchmetrics.") for base in kind.__mro__)


def _is_equal(x: Tensor, other: Tensor) -> bool:
    if x.layout == torch.strided:
        return torch.equal(x, other)
    # torch compares no sparse tensors, such as the adjacency of a graph.
    x = x.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    other = other.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    is_same_shape = x.shape == other.shape and x.values().shape == other.values().shape
    return is_same_shape and torch.equal(x.indices(), other.indices()) and torch.equal(x.values(), other.values())


def is_opaque(x: object) -> bool:
    """Return whether an object is not looked into: it is code, or a library's."""
    return isinstance(x, _OPAQUE) or _is_of_library(type(x))


@functools.cache
def _opaque_rooms() -> tuple[str, ...]:
    """Packages of which no state is kept: those of executors and of sources of records among them."""
    entries = [*entry_points(group="dpbench.executors"), *entry_points(group="dpbench.records")]
    rooms = [entry.module.rpartition(".")[0] for entry in entries]
    return (*_OPAQUE_ROOMS, *(f"{room}." for room in rooms if room))


@functools.lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> frozenset[str]:
    """Names of global variables that a function reads; attributes of the same name are others."""
    return frozenset(str(i.argval) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")


@functools.cache
def _is_installed(module: str) -> bool:
    """True for modules of installed packages."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _is_of_library(x: type | FunctionType) -> bool:
    return f"{_module_of(x)}.".startswith(_opaque_rooms())


def _module_of(x: type | FunctionType) -> str:
    """Module of the code; a function that wraps another one has the name of that one's."""
    return str(x.__module__ if isinstance(x, type) else x.__globals__.get("__name__"))
