"""Layers that can be trained privately, each tried: docs/layers.md."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dpbench.errors import DPBenchError
from dpbench.harness.reports.markdown import markdown_rows
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.layers import INTERCEPTED, rule_of
from dpbench.records.tagging import under_tags

_RECORDS = 4
_RULE = "rule"
_PARTS = "rule, computed from its parts"
_VMAP = "`vmap`"
_CHILDREN = "its layers"
_REFUSED = "refused"


@dataclass(frozen=True)
class Case:
    """A layer, its inputs, and remarks.

    Attributes:
        name: Name on the page, without its package.
        make: Makes the layer.
        shape: Shape of one record's input.
        remark: Remark on the page.
        tokens: Whether the input is integers.
        times: Number of arguments that get the input: attention takes it as query, key and value.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3,)
    remark: str = ""
    tokens: bool = False
    times: int = 1


class _Alone(nn.Module):
    """A network of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        return self.layer(*inputs)


_SEQUENCE = (5, 4)
_RECURRENT = "any option but `proj_size`; records in dimension 1 with `batch_first=False`"
_ATTENTION = "any mask, dropout; no `kdim`, `vdim`, `add_bias_kv`, `add_zero_attn`; also with `batch_first=False`"
_RUNNING = "as in a pretrained network: `.eval()` before `fit`, which Lightning keeps"
_PIXELS = ((3, 7), (3, 7, 7), (3, 7, 7, 7))
_OPTIONS: dict[str, Any] = {"batch_first": True, "dropout": 0.1}


def _in_every_dimension(
    name: str, *arguments: Any, evaluation: bool = False, remark: str = "", **options: Any
) -> list[Case]:
    def make(kind: type[nn.Module]) -> nn.Module:
        return kind(*arguments, **options).train(not evaluation)

    suffix = ", evaluation mode" if evaluation else ""
    cases = []
    for dimension, shape in enumerate(_PIXELS, start=1):
        layer = name.format(dimension)
        cases.append(Case(f"{layer}{suffix}", partial(make, getattr(nn, layer)), shape, remark))
    return cases


def cases() -> list[Case]:
    """All layers of torch that have parameters, and some of other packages."""
    return [*_maps(), *_norms(), *_sequences(), *_others()]


def _maps() -> list[Case]:
    return [
        Case("Linear", lambda: nn.Linear(3, 2), remark="any number of positions"),
        Case("Bilinear", lambda: nn.Bilinear(3, 3, 2), times=2),
        *_in_every_dimension("Conv{}d", 3, 2, 3, remark="any option"),
        *_in_every_dimension("ConvTranspose{}d", 3, 2, 3),
        Case("Embedding", lambda: nn.Embedding(9, 3), (5,), "also of positions that all records share", True),
        Case("EmbeddingBag", lambda: nn.EmbeddingBag(9, 3), (5,), "no offsets", True),
        Case("EmbeddingBag, mode='max'", lambda: nn.EmbeddingBag(9, 3, mode="max"), (5,), tokens=True),
        Case("Embedding, max_norm", lambda: nn.Embedding(9, 3, max_norm=1.0), (5,), tokens=True),
    ]


def _norms() -> list[Case]:
    return [
        Case("GroupNorm", lambda: nn.GroupNorm(1, 3), _PIXELS[1]),
        Case("LayerNorm", lambda: nn.LayerNorm(3)),
        Case("RMSNorm", lambda: nn.RMSNorm(3)),
        *_in_every_dimension("InstanceNorm{}d", 3, affine=True),
        Case("InstanceNorm2d, track_running_stats", lambda: nn.InstanceNorm2d(3, track_running_stats=True), _PIXELS[1]),
        *_in_every_dimension("BatchNorm{}d", 3, evaluation=True, remark=_RUNNING),
        Case("SyncBatchNorm, evaluation mode", lambda: nn.SyncBatchNorm(3).eval(), _PIXELS[1], _RUNNING),
        Case("BatchNorm2d, training mode", lambda: nn.BatchNorm2d(3), _PIXELS[1]),
    ]


def _sequences() -> list[Case]:
    encoder = nn.TransformerEncoderLayer(4, 2, 6, **_OPTIONS)
    decoder = nn.TransformerDecoderLayer(4, 2, 6, **_OPTIONS)
    recurrent = {"LSTM": nn.LSTM, "GRU": nn.GRU}
    cells = {"LSTMCell": nn.LSTMCell, "GRUCell": nn.GRUCell, "RNNCell": nn.RNNCell}
    either = "also with `batch_first=False`"
    return [
        *(Case(name, partial(kind, 4, 3, 2, **_OPTIONS), _SEQUENCE, _RECURRENT) for name, kind in recurrent.items()),
        Case("RNN", partial(nn.RNN, 4, 3, 2, **_OPTIONS), _SEQUENCE),
        *(Case(name, partial(kind, 4, 3), (4,), "any number of steps") for name, kind in cells.items()),
        Case("MultiheadAttention", lambda: nn.MultiheadAttention(4, 2, **_OPTIONS), _SEQUENCE, _ATTENTION, times=3),
        Case("TransformerEncoderLayer", lambda: encoder, _SEQUENCE, either),
        Case("TransformerDecoderLayer", lambda: decoder, _SEQUENCE, either, times=2),
        Case("TransformerEncoder", lambda: nn.TransformerEncoder(encoder, 2), _SEQUENCE, either),
        Case("TransformerDecoder", lambda: nn.TransformerDecoder(decoder, 2), _SEQUENCE, either, times=2),
        Case("Transformer", lambda: nn.Transformer(4, 2, 1, 1, 6, **_OPTIONS), _SEQUENCE, either, times=2),
    ]


def _others() -> list[Case]:
    return [
        Case("PReLU", nn.PReLU),
        Case("LazyLinear", lambda: nn.LazyLinear(2)),
        Case("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(3, 2))),
        Case("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(3, 2))),
    ]


def attempt(case: Case) -> tuple[str, str]:
    """Compute per-record gradients of a batch, and compare their sum with the ordinary gradient.

    Returns:
        The route to the layer's per-record gradients and "", or "refused" and the reason.
    """
    torch.manual_seed(0)
    x = torch.randn(_RECORDS, *case.shape)
    if case.tokens:
        x = torch.randint(0, 9, x.shape)
    engine = None
    try:
        model = _Alone(case.make())
        engine = PerRecordEngine(model)
        if isinstance(model.layer, nn.RNNCellBase):
            engine.follow_tags()
        engine.expect(_RECORDS)
        loss = under_tags(engine, lambda x: _loss(model(*[x] * case.times)), x, _RECORDS)
        engine.backward(loss, _RECORDS, verify=True)
    except DPBenchError as error:
        return _REFUSED, str(error)
    finally:
        if engine is not None:
            engine.close()
    return _route(model.layer), ""


def _loss(output: Any) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    loss: Tensor = output.sin().mean()
    return loss


def _route(layer: nn.Module) -> str:
    if type(layer) in INTERCEPTED:
        return _PARTS
    if any(True for _ in layer.children()):
        return _CHILDREN
    return _VMAP if rule_of(layer) is None else _RULE


def page() -> str:
    """The page: how many layers have per-record gradients by what, then collapsed tables with remarks and refusals."""
    supported: dict[tuple[str, str], list[str]] = {}
    refused = [["layer", "reason and remedy"]]
    for case in cases():
        name = _shown_name(case)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            route, reason = attempt(case)
        if route == _REFUSED:
            reason = reason.removeprefix("this model cannot be trained privately: ")
            refused.append([name, reason.replace("layer (", "(")])
        else:
            supported.setdefault((route, case.remark), []).append(name)
    rows = [["layers", "per-record gradients by", "remarks"]]
    rows += [[", ".join(names), route, remark] for (route, remark), names in supported.items()]
    return _PAGE.format(
        supported=sum(map(len, supported.values())),
        table=markdown_rows(rows, text=range(3)),
        refused=len(refused) - 1,
        refusals=markdown_rows(refused, text=range(2)),
    )


def _shown_name(case: Case) -> str:
    name, _, options = case.name.partition(", ")
    is_of_torch = not name.islower()  # weight_norm is a function
    return (f"nn.{name}" if is_of_torch else name) + (f" ({options})" if options else "")


_PAGE = """\
# Layers

Of torch's layers with parameters, {supported} train with the engine, {refused} are refused (`make layers`). Modules
without parameters need nothing, as long as they treat records independently. Per-record gradients come from:

* **rule**: exact formulas ([cost](engine.md)); some are computed from linear maps instead of one call of torch.
* **`vmap`**: `torch.func.vmap` of the backward pass, for any other layer, your own and subclasses: exact, but with a
  second forward pass and memory for the gradients of all records. The layer must return one tensor and use no
  randomness. **`vmap` of functions**: the same where a module combines its own parameters with records.
* **its layers**: the layers that it consists of.

On the first batch of each run, the sum over records is compared with the ordinary gradient; layers that cannot be
exact are refused by name.

<details>
<summary>Layers that train ({supported})</summary>

{table}

</details>

<details>
<summary>Refused layers ({refused})</summary>

{refusals}

</details>

For several learning rates, use one optimizer with parameter groups. `torch.compile` works on the network or the module,
but a step on several records runs uncompiled, since [each operator](guards.md#the-record-axis) is followed. Gradient
checkpointing requires `use_reentrant=False`.
"""
