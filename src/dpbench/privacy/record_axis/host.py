"""Events that PyTorch's dispatcher does not see: values that leave tensors by pointer, and hooks on tensors.

`watched` replaces a few functions of torch while a step runs. Each of them calls the original.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _checkpoint_hook

from dpbench.privacy.record_axis.mode import SEEDED, RecordAxis
from dpbench.privacy.record_axis.rules.losses import counts_alike
from dpbench.privacy.record_axis.tags import (
    Axis,
    Exchangeable,
    Local,
    Lone,
    Mixed,
    Over,
    Rows,
    Total,
    calling_line,
    has_plain_memory,
    is_private,
    set_tag,
    tag_of,
    tag_of_storage,
)

_POINTERS = (
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "data_ptr",
    "__reduce_ex__",
    "storage",
    "tensor_split",
    "apply_",
    "map_",
    "map2_",
)
"""Methods of tensors that hand values, or their address, to code that is not seen."""
_WRITABLE = frozenset(["numpy", "__array__", "__dlpack__", "data_ptr", "storage", "apply_", "map_", "map2_"])
"""Those by which such code may write."""
_MAKERS = ("tensor", "as_tensor", "asarray", "tensor_split")
"""Functions that read tensors within lists."""
_OF_STORAGES = ("tolist", "__getitem__", "copy_", "clone", "data_ptr")
_OF_CROSS_ENTROPY = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


class _Axes(threading.local):
    """The modes of the steps that run in this thread, innermost last."""

    def __init__(self) -> None:
        self.running: list[RecordAxis] = []


Look = Callable[[RecordAxis, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(mode, name, function of torch, its arguments) → its result."""


class _Replacements:
    """Functions of torch that are replaced while any step runs, in any thread.

    Args:
        places: Returns owners, names and replacements.
    """

    def __init__(self, places: Callable[[], list[tuple[Any, str, Look]]]) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._steps = 0
        self._originals: list[tuple[Any, str, Any]] = []  # owner, name, the owner's own attribute

    def begin(self) -> None:
        """Replace them, unless another step has."""
        with self._lock:
            self._steps += 1
            if self._steps > 1:
                return
            for owner, name, look in self._places():
                self._originals.append((owner, name, vars(owner).get(name)))
                setattr(owner, name, _replacement(name, look, getattr(owner, name)))

    def end(self) -> None:
        """Put them back after the last step."""
        with self._lock:
            self._steps -= 1
            while self._originals and not self._steps:
                owner, name, original = self._originals.pop()
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def running_axis() -> RecordAxis | None:
    """The mode of the step that runs in this thread, if it is looked at."""
    axis = axis_of_step()
    return None if axis is None or (axis.is_over and axis.refusal is None) else axis


def axis_of_step() -> RecordAxis | None:
    """The mode of the step that runs in this thread, also where it is no longer looked at."""
    return _axes.running[-1] if _axes.running else None


@contextmanager
def watched(axis: RecordAxis) -> Iterator[None]:
    """Within, note reads of values past the dispatcher, and refuse the engine to hooks on gradients.

    Functions of torch belong to all threads: they are replaced while any step runs, and others call them as they are.

    Args:
        axis: The mode of the step, in this thread.
    """
    _of_tensors.begin()
    _of_modules.begin()
    _axes.running.append(axis)
    try:
        yield
    finally:
        _axes.running.pop()
        _of_modules.end()
        _of_tensors.end()


def _methods() -> list[tuple[Any, str, Look]]:
    """List methods of tensors and their memory."""
    places: list[tuple[Any, str, Look]] = [(Tensor, name, _read) for name in _POINTERS]
    places += [(torch.UntypedStorage, name, _read_storage) for name in _OF_STORAGES]
    places += [
        (Tensor, "__deepcopy__", _deepcopy),
        (Tensor, "__repr__", _quietly),
        (Tensor, "register_hook", _hook),
        (Tensor, "register_post_accumulate_grad_hook", _hook_of_gradients),
    ]
    return places


def _functions() -> list[tuple[Any, str, Look]]:
    """List functions, which are pickled by their names, so that they are replaced as shortly as possible."""
    places: list[tuple[Any, str, Look]] = [(torch, name, _read_parts) for name in _MAKERS]
    places += [(module, "to_dlpack", _read) for module in (torch, torch.utils.dlpack)]
    places += [(module, name, _seed) for module in (torch, torch.random) for name in ("manual_seed", "set_rng_state")]
    places += [
        (threading.Thread, "start", _start),
        (torch.autograd.graph.saved_tensors_hooks, "__enter__", _hooks_of_saved_tensors),
        (torch.nn.functional, "one_hot", _one_hot),
        (torch.nn.functional, "cross_entropy", _cross_entropy),
    ]
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None:
        places.append((torchmetrics.Metric, "forward", _metric))
    return places


_axes = _Axes()
_of_tensors = _Replacements(_methods)
_of_modules = _Replacements(_functions)

begin_training = _of_tensors.begin
"""Replace methods of tensors until `end_training`: each step would have Python look all of them up anew."""
end_training = _of_tensors.end


@functools.lru_cache(maxsize=256)
def _replacement(name: str, look: Look, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def function(*args: Any, **kwargs: Any) -> Any:
        axis = running_axis()
        if axis is None:
            return own(*args, **kwargs)
        return look(axis, name, own, args, kwargs)

    return function


def _has_records(axis: RecordAxis, t: Any) -> bool:
    return isinstance(t, Tensor) and (not has_plain_memory(t) or axis.place_of(t) is not None)


def _is_kept(axis: RecordAxis, t: Any) -> bool:
    """True for records of an earlier batch."""
    if not isinstance(t, Tensor):
        return False
    place = axis.place_of(t)
    return isinstance(place, Mixed) and place.is_kept


def _read(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    t = args[0]
    read = [*args, *kwargs.values()]
    read = read[1:] if name == "tensor_split" else read
    if any(_has_records(axis, x) for x in read):
        axis.note_read(name, is_kept=any(_is_kept(axis, x) for x in read))
    elif name in _WRITABLE and has_plain_memory(t) and isinstance(tag_of(t), (Exchangeable, Rows)):
        set_tag(t, Local(axis.batch))  # numbers by place, for all that is known
    return own(*args, **kwargs)


def _read_storage(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    tags = [tag_of_storage(x) for x in (*args, *kwargs.values())]
    if any(is_private(tag) for tag in tags) or (name == "copy_" and tags[0] is not None):
        axis.note_read(name)
    return own(*args, **kwargs)


def _read_parts(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    given = [*args, *kwargs.values()]
    if isinstance(given[0], Tensor):
        given = given[1:]
    if any(_has_records(axis, x) for x in tree_leaves(given)):
        axis.note_read(name)
    made = own(*args, **kwargs)
    if axis.reads and isinstance(made, Tensor) and axis.place_of(made) is None:  # perhaps of a value that was read
        reason = "a Python number, after a value was read"
        set_tag(made, Lone(axis.batch) if axis.records == 1 else Mixed(axis.batch, calling_line(), name, reason))
    return made


def _deepcopy(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Copy records by an operator, which is seen: PyTorch copies their storage."""
    t, memo = args
    if id(t) in memo or not _has_records(axis, t) or not has_plain_memory(t) or not t.is_leaf:
        return own(*args, **kwargs)
    copied = t.detach().clone().requires_grad_(t.requires_grad)
    copied.__dict__.update(copy.deepcopy(t.__dict__, memo))
    memo[id(t)] = copied
    return copied


def _quietly(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with axis.quiet():
        return own(*args, **kwargs)


def _start(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    axis.note_read("Thread.start", "a thread starts, which cannot be followed")
    return own(*args, **kwargs)


def _seed(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # These two go back to a state that was left.
    caller = sys._getframe(2).f_code.co_filename.replace(os.sep, "/")
    if not caller.endswith(("torch/utils/checkpoint.py", "torch/random.py")):
        axis.note_read(name, SEEDED)
    return own(*args, **kwargs)


def _hook(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    axis.has_hooks = True
    return own(*args, **kwargs)


def _hook_of_gradients(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    axis.note_read(name, "a custom function receives the gradient of all records")
    return own(*args, **kwargs)


def _hooks_of_saved_tensors(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # Checkpoints compute the same once more, and copies to the host are copies.
    if not isinstance(args[0], (_checkpoint_hook, torch.autograd.graph.save_on_cpu)):
        axis.has_hooks = True
    return own(*args, **kwargs)


def _metric(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A metric of a batch is of all its records, however it was computed."""
    value = own(*args, **kwargs)
    if not any(_has_records(axis, x) for x in tree_leaves((args[1:], kwargs))):
        return value
    for x in tree_leaves(value):
        if isinstance(x, Tensor) and axis.place_of(x) is None:
            set_tag(x, Mixed(axis.batch, calling_line(), name, "a metric of all records"))
        elif isinstance(x, (bool, int, float)):
            axis.note_read(name, "a metric is a Python number")
    return value


def _one_hot(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Classes that are given are only compared with the largest number."""
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    with axis.quiet() if classes > 0 else nullcontext():
        return own(*args, **kwargs)


def _cross_entropy(axis: RecordAxis, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """With label smoothing a mean is a quotient of two sums; it is one over records where each has as many targets."""
    loss = own(*args, **kwargs)
    given = dict(zip(_OF_CROSS_ENTROPY, args, strict=False)) | kwargs
    scores, target = given["input"], given["target"]
    is_plain_mean = given.get("reduction", "mean") == "mean"
    is_plain_mean &= all(given.get(option) is None for option in ("weight", "reduce", "size_average"))
    if not given.get("label_smoothing") or not is_plain_mean or scores.dim() < 2:
        return loss
    place = axis.place_of(scores)
    if not isinstance(place, Axis) or place.dim or place != axis.place_of(target):
        return loss
    with _disable_current_modes():
        alike = counts_alike(target, given.get("ignore_index", -100), place, axis.records)
    if alike:
        set_tag(loss, Total(axis.batch, Over.MEAN))
    return loss
