"""Whether the engine knows a network: tried on a few records, before anything is released.

The engine knows layers. A network may use weights past them, differentiate within its loss or hand on what all records
share; and then the engine fails, or changes what the network computes. Such a network can be trained record by record.
Layers that see several rows of a record stay with the engine where it is certain which rows are whose.
"""

from __future__ import annotations

import functools
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpbench.data.separate_records import SeparateRecords
from dpbench.errors import UnsupportedModuleError
from dpbench.guards._folded_rows import LayerRows, RowEvidence, agreed
from dpbench.guards.step_state import StepState
from dpbench.privacy.gradients import tf32
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.folds import Fold, is_folded
from dpbench.privacy.gradients.method import GradientMethod
from dpbench.privacy.gradients.validation import TRAINED_ALONE, never_called
from dpbench.privacy.randomness import seed_global_generators
from dpbench.records.count import count_records
from dpbench.records.physical_batches import select
from dpbench.records.stopped_step import output_of, stopped
from dpbench.records.training import Training, gathered_alone, loss_of, nothing, replaced_methods

_OF_RECORDS = re.compile(r" \(off by [^)]*\)")
"""What an error tells of the records: the training goes on, and this would stay in its log."""
_SEED = 0  # of what is drawn in all trials
_SIZES = (4, 5)
"""Of the lots that are tried: two, since one could be the number of positions by chance."""
_CLOSE = 1e-3  # relative, of losses
_TIMED = 32  # records by which the slowdown is measured, whatever the lot holds
_REPEATS = 4  # of a loss that the engine seems to change
_CHANGED = (
    "it changes what the network computes (an embedding that all records share, such as positions, whose "
    "output is not simply added to each record's)"
)

_SEPARATE = (
    "the records cannot be rows of one batch (graphs, lists, constants beside the records, varying numbers of "
    "rows), so each was collated alone. To use the engine, let the collate_fn make one row of each record, or "
    "declare several with LotLoader(..., record_of_row=...)"
)


class Limit(NamedTuple):
    """Why the engine cannot be used.

    Attributes:
        reason: In words.
        is_refused: Whether the engine refuses the step in words of its own.
    """

    reason: str
    is_refused: bool


class EngineTrial:
    """Runs the step with and without the engine. It changes nothing of a training.

    Args:
        training: Its step is tried.
        engine: Attached to the module or its private part.
    """

    def __init__(self, training: Training, engine: GradientMethod) -> None:
        self._training = training
        self._engine = engine
        self._bare: list[str] = []  # parameters of the LightningModule itself that no layer uses

    def limit(self, batch: Any) -> Limit | None:
        """Why the engine cannot be used; None: it can, or the step itself is wrong, or there are no records.

        Args:
            batch: Of a lot, on the device.
        """
        if isinstance(batch, SeparateRecords):
            return Limit(_SEPARATE, is_refused=True)
        rows = count_records(batch)
        if not rows:
            return None
        # What a step draws for a lot may decide which layers it calls: drawn alike in a run that is resumed.
        with isolate_rng():
            seed_global_generators([_SEED], self._training.device)
            return self._limit_of(batch, rows)

    def _limit_of(self, batch: Any, rows: int) -> Limit | None:
        # Twice: which arguments of a module are no rows of records, a lot of the other size may have shown.
        limit = self._limit(batch, rows) and self._limit(batch, rows)
        engine = self._engine
        if limit is None or not isinstance(engine, PerRecordEngine):
            return limit
        for lifted in (self._lifted(batch, rows), {}):
            engine.lift(lifted, with_functions=True)
            engine.folds = self._folds(batch, rows)
            if not (self._limit(batch, rows) and self._limit(batch, rows)):
                return None
        engine.lift({})
        engine.folds = {}
        if self._bare:  # the first failure may be another one, which is mended: rows that are folded, say
            return Limit(never_called(self._bare), is_refused=True)
        return limit

    def is_agreed(self) -> bool:
        """Whether all processes have found the same of the layers; each has to ask."""
        engine = self._engine
        layers = []
        if isinstance(engine, PerRecordEngine):
            for name, module in self._training.module.named_modules():
                layers.append((name, engine.folds.get(module), module in engine.lifted, engine.with_functions))
        code = zlib.crc32(repr(layers).encode())
        return self._training.largest(code) == -self._training.largest(-code)

    def _limit(self, batch: Any, rows: int) -> Limit | None:
        limits = []
        for size in _SIZES:
            limit = self._limit_on(select(batch, rows, _index(rows, size)), size)
            if limit is not None:
                limits.append(limit)
        for limit in limits:
            if not limit.is_refused:
                return limit
        return limits[0] if limits else None

    def slowdown(self, batch: Any, most: int | None) -> float | None:
        """How much longer records take one by one than in one plain step; None: it cannot be measured.

        Args:
            batch: Of a lot; of its size, which is private, nothing is told.
            most: Records that fit into memory; None: any number.
        """
        rows = count_records(batch)
        if not rows or isinstance(batch, SeparateRecords):
            return None
        size = min(_TIMED, most or _TIMED)
        with self._without_traces(), suppress(Exception):
            several = select(batch, rows, np.resize(np.arange(min(rows, size)), size))
            single = select(batch, rows, np.arange(1))
            self._seconds(several)  # the first time takes longer
            self._seconds(single)
            return size * self._seconds(single) / self._seconds(several)
        return None

    def _lifted(self, batch: Any, rows: int) -> dict[nn.Module, nn.Module]:
        """Layers whose parameters lines of a module above use, each with the nearest one that has rows of the records.

        These are layers on what all records share, and those that are never called since a function takes their
        weights. Nothing is taken for granted of them: the lines are run for each record alone, and compared.
        """
        shared: set[str] = set()
        with_rows: list[dict[str, bool]] = []
        names = {module: name for name, module in self._training.module.named_modules()}
        for size in _SIZES:
            lot = select(batch, rows, _index(rows, size))
            with _watched_outputs(self._training.module, size) as outputs, self._without_traces() as rewind:
                rewind()
                try:
                    seen = self._seen(lot, size)
                    rewind()
                    unseen = self._unseen(lot, size)
                except Exception:
                    return {}
            with_rows.append(outputs)
            for layer, tensors in seen:
                if not all(len(x) == size or is_folded(x, size) for x in tensors if x.dim()):
                    shared.add(names[layer])
            for module, name in names.items():
                if any(parameter in unseen for parameter in module.parameters(recurse=False)):
                    shared.add(name)
            own_parameters = self._training.module.named_parameters(recurse=False)
            self._bare = [name for name, parameter in own_parameters if parameter in unseen]
        module = self._training.module
        lifted = {}
        for name in shared:
            above = name.rpartition(".")[0]
            while above and not all(outputs.get(above, False) for outputs in with_rows):
                above = above.rpartition(".")[0]
            if not above:
                return {}
            lifted[module.get_submodule(name)] = module.get_submodule(above)
        return lifted

    def _folds(self, batch: Any, rows: int) -> dict[nn.Module, Fold]:
        """Which rows are a record's, of layers that see several of each; empty where that is not certain."""
        lots = []
        for size in _SIZES:
            try:
                lots.append(self._evidence(batch, rows, size).folds())
            except Exception:
                return {}
        return agreed(lots)

    def _evidence(self, batch: Any, rows: int, size: int) -> RowEvidence:
        """What changes in the layers of a lot with which of its records."""
        index = _index(rows, size)
        with self._without_traces() as rewind:

            def seen(index: NDArray[np.int64]) -> list[LayerRows]:
                rewind()
                return self._seen(select(batch, rows, index), size)

            evidence = RowEvidence(seen(index), size)
            evidence.add(seen(index), None)
            for record in range(size):
                for distance in (1, size):
                    changed = index.copy()
                    changed[record] = (index[record] + distance) % rows
                    evidence.add(seen(changed), record)
        return evidence

    def _seen(self, lot: Any, size: int) -> list[LayerRows]:
        """What each layer sees of a lot, in the network as it is."""
        with self._unchanged(size) as engine:
            return engine.seen(self._loss(lot))

    def _unseen(self, lot: Any, size: int) -> set[nn.Parameter]:
        """Parameters that no layer uses in a lot, in the network as it is."""
        with self._unchanged(size) as engine:
            return set(engine.unseen(self._loss(lot)))

    @contextmanager
    def _unchanged(self, size: int) -> Iterator[PerRecordEngine]:
        """Within, the engine looks at a lot of `size` records, and hands on what layers return as it is."""
        engine = self._engine
        assert isinstance(engine, PerRecordEngine)
        engine.expect(size)
        engine.expands = False
        try:
            yield engine
        finally:
            engine.expands = True

    def _limit_on(self, lot: Any, size: int) -> Limit | None:
        engine = self._engine
        with self._without_traces() as rewind:
            try:
                plain = self._loss(lot)
            except Exception:
                return None  # its own step says what is wrong
            if not isinstance(plain, Tensor) or plain.numel() != 1 or not plain.requires_grad:
                return None
            rewind()
            engine.expect(size)
            try:
                loss = self._loss(lot)
                gradients = engine.backward(loss, size, verify=True)
                with torch.no_grad():
                    for gradient in gradients:
                        gradient.squared_norms()
            except UnsupportedModuleError as error:
                return Limit(reason_of(error), is_refused=True)
            except Exception as error:  # in somebody else's words, which may tell of the records
                reason = f"with it the step ends in a {type(error).__name__}"
                return Limit(reason, is_refused=False)
            if _are_close(plain, loss) or not self._is_lasting(plain, loss, lot, size, rewind):
                return None
            return Limit(_CHANGED, is_refused=False)

    def _is_lasting(self, plain: Tensor, changed: Tensor, lot: Any, size: int, rewind: Callable[[], None]) -> bool:
        """Whether both losses stay as they are: of a step that is random beyond its seeds nothing can be said."""
        engine = self._engine
        for _ in range(_REPEATS):
            rewind()
            engine.expect(size)
            if not _are_close(changed, self._loss(lot)):
                return False
            rewind()
            engine.discard()
            engine.recording = False
            if not _are_close(plain, self._loss(lot)):
                return False
        return True

    def _loss(self, lot: Any) -> Any:
        training = self._training
        with training.autocast(), torch.enable_grad(), stopped(training):
            return loss_of(output_of(training.own_step, lot, *training.index_of_step()))

    def _seconds(self, lot: Any) -> float:
        start = time.perf_counter()
        loss = self._loss(lot)
        trainable = [parameter for parameter in self._engine.parameters if parameter.requires_grad]
        torch.autograd.grad(loss, trainable, allow_unused=True)
        if self._training.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    @contextmanager
    def _without_traces(self) -> Iterator[Callable[[], None]]:
        """Within, the engine does not look, and nothing is logged; a function puts back what was changed so far."""
        training = self._training
        engine = self._engine
        recording = engine.recording
        records = engine.records
        silent = replaced_methods(training.module, **_stand_ins(training))
        exact = tf32.refused(training.device.type)
        with warnings.catch_warnings(), training.without_loggers(), silent, exact:
            warnings.simplefilter("ignore")  # of a network that the engine changes
            state = StepState(training)
            weights = [(p, p.data, p.data.clone()) for p in training.module.parameters()]
            engine.recording = False

            def rewind() -> None:
                state.restore()
                torch.clear_autocast_cache()

            try:
                yield rewind
            finally:
                state.finish()
                _put_back(weights)
                torch.clear_autocast_cache()
                engine.discard()
                engine.recording = recording
                engine.records = records


def _stand_ins(training: Training) -> dict[str, Callable[..., Any]]:
    """Methods that log, or wait for other processes, which may have no records to try."""
    methods: dict[str, Callable[..., Any]] = {"log": nothing, "log_dict": nothing}
    if training.world_size > 1:
        methods["all_gather"] = functools.partial(gathered_alone, training.world_size)
    return methods


@torch.no_grad()
def _put_back(weights: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Undo what the step itself wrote to parameters (a first value from the first lot): for the lot it is refused."""
    for parameter, data, before in weights:
        if parameter.data_ptr() != data.data_ptr():
            parameter.data = data
        if not torch.equal(data, before):
            data.copy_(before)


@contextmanager
def _watched_outputs(module: nn.Module, records: int) -> Iterator[dict[str, bool]]:
    """Within, whether each module that is called returns the records in dimension 0 of all that has a gradient."""
    outputs: dict[str, bool] = {}

    def hook(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        have_rows = [x.dim() > 0 and (len(x) == records or is_folded(x, records)) for x in tensors]
        outputs[name] = outputs.get(name, True) and bool(tensors) and all(have_rows)

    handles = [layer.register_forward_hook(partial(hook, name)) for name, layer in module.named_modules()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _index(rows: int, size: int) -> NDArray[np.int64]:
    """Rows of a lot of `size`: the first, from the beginning again where there are fewer."""
    return np.resize(np.arange(min(rows, size)), size)


def reason_of(error: UnsupportedModuleError) -> str:
    """What an error says, without figures of the records and without the remedy that is about to be taken."""
    reason = _OF_RECORDS.sub("", " ".join(str(error).split()))
    return reason.replace(f"; {TRAINED_ALONE}.", "")


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.detach().double(), other.detach().double(), rtol=_CLOSE, atol=1e-6, equal_nan=True)
