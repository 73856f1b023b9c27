"""A private step of networks as people have them, against a plain one and Opacus: `python -m benchmarks networks`.

Small models of transformers and torchvision with random weights, by `PrivateLoop` (lots, guards, ledger and noise).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import SwinTransformer

from benchmarks import pages, rows
from benchmarks.machine import processor, wait_until_quiet
from benchmarks.orders import one_line
from benchmarks.timing import Say
from dpbench.callback.loop import PrivateLoop
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.strategies import DPSGD

RECORDS = 16
_VOCABULARY = 8000
_WARM = 3  # steps before the clocks run
Lot = dict[str, Tensor]


@dataclass(frozen=True)
class Network:
    """A network with a lot for it.

    Attributes:
        build: Makes it, given a rate of dropout, or of stochastic depth in networks for images; its output is the loss
            or has it.
        lot: Arguments of its forward pass, with a row for each record.
        dropout: Its rate.
    """

    build: Callable[[float], nn.Module]
    lot: Callable[[], Lot]
    dropout: float = 0.0


def _tokens(length: int) -> Tensor:
    return torch.randint(_VOCABULARY, (RECORDS, length))


def _t5(dropout: float) -> nn.Module:
    settings: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "d_model": 256,
        "d_kv": 32,
        "d_ff": 1024,
        "num_layers": 3,
        "num_heads": 8,
        "decoder_start_token_id": 0,
        "dropout_rate": dropout,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))


def _opt(dropout: float) -> nn.Module:
    settings: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 256,
        "word_embed_proj_dim": 256,
        "ffn_dim": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "dropout": dropout,
    }
    return transformers.OPTForCausalLM(transformers.OPTConfig(**settings))


_SWIN: dict[str, Any] = {"embed_dim": 48, "depths": [2, 2, 2], "num_heads": [3, 6, 12]}


def _swin(dropout: float) -> nn.Module:
    settings: dict[str, Any] = {"image_size": 64, "patch_size": 4, "window_size": 4, "num_labels": 10}
    config = transformers.SwinConfig(**_SWIN, **settings, drop_path_rate=dropout)
    return transformers.SwinForImageClassification(config)


class _SwinOfTorchvision(SwinTransformer):  # type: ignore[misc]  # torchvision has no types
    """Torchvision's, with the arguments and the loss of that of transformers."""

    def __init__(self, dropout: float) -> None:
        settings: dict[str, Any] = {"patch_size": [4, 4], "window_size": [4, 4], "num_classes": 10}
        super().__init__(**_SWIN, **settings, stochastic_depth_prob=dropout)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(pixel_values), labels)


def _bert_with_lora(dropout: float) -> nn.Module:
    settings: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    net = transformers.BertForSequenceClassification(transformers.BertConfig(**settings))
    lora = peft.LoraConfig(r=8, target_modules=["query", "value"], lora_dropout=0.0, task_type="SEQ_CLS")
    adapted: nn.Module = peft.get_peft_model(net, lora)
    return adapted


def _images() -> Lot:
    return {"pixel_values": torch.randn(RECORDS, 3, 64, 64), "labels": torch.arange(RECORDS) % 10}


def _translations() -> Lot:
    return {"input_ids": _tokens(48), "labels": _tokens(32)}


def _texts() -> Lot:
    words = _tokens(64)
    return {"input_ids": words, "labels": words}


def _classified_texts() -> Lot:
    return {"input_ids": _tokens(64), "labels": torch.arange(RECORDS) % 2}


_KINDS = (
    ("T5", "dropout", _t5, _translations),
    ("OPT", "dropout", _opt, _texts),
    ("Swin (transformers)", "stochastic depth", _swin, _images),
    ("Swin (torchvision)", "stochastic depth", _SwinOfTorchvision, _images),
    ("BERT with LoRA", "dropout", _bert_with_lora, _classified_texts),
)
NETWORKS: dict[str, Network] = {}
for name, rate, build, lot in _KINDS:
    NETWORKS[name] = Network(build, lot)
    NETWORKS[f"{name}, {rate} 0.1"] = Network(build, lot, 0.1)


def _step(net: nn.Module, lot: Any) -> Tensor:
    output = net(**lot)
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.0)


def _plain(net: nn.Module, optimizer: torch.optim.Optimizer, lot: Lot) -> Iterator[None]:
    while True:
        optimizer.zero_grad()
        _step(net, lot).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def _opacus(net: nn.Module, lot: Lot) -> Iterator[None]:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    sampled = GradSampleModule(net)
    optimizer = DPOptimizer(_sgd(sampled), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=RECORDS)
    yield from _plain(sampled, optimizer, lot)


def _ours(net: nn.Module, lot: Lot, folder: str) -> PrivateLoop:
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, gradients="engine", ledger=f"{folder}/ledger.jsonl")
    records: Any = [dict(zip(lot, record, strict=True)) for record in zip(*lot.values(), strict=True)]
    loader = PrivateDataLoader(records, PrivateBatchSampler(make_sampling("full", RECORDS, RECORDS), None))
    return PrivateLoop(net, _sgd(net), loader, strategy, _step, steps=10**6)


def measure_network(name: str, turns: int) -> dict[str, Any]:
    """Median seconds of a step in each way, in alternation; the message of an error where a way fails.

    Args:
        name: Of `NETWORKS`.
        turns: Of each way.
    """
    network = NETWORKS[name]
    # All ways train the same weights on the same lot.
    torch.manual_seed(1)
    lot = network.lot()

    def built() -> nn.Module:
        torch.manual_seed(0)
        return network.build(network.dropout).train()

    outcome: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        net = built()
        ways = {
            "plain": _plain(net, _sgd(net), lot),
            "ours": iter(_ours(built(), lot, folder)),
            "opacus": _opacus(built(), lot),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(_WARM + turns):
            for way, steps in ways.items():
                if way in outcome:
                    continue
                start = time.perf_counter()
                try:
                    next(steps)
                except Exception as error:  # of a peer that does not know the network
                    outcome[way] = one_line(error)[:120]
                seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(values[_WARM:]) for way, values in seconds.items() if way not in outcome} | outcome


def write_page(path: Path, turns: int, patience: float, say: Say) -> Path:
    """Measure all networks on one thread and write a page, when all of them are measured.

    Args:
        path: Of the page.
        turns: Of each way.
        patience: Seconds to wait for a quiet machine.
        say: Told what is being done.
    """
    torch.set_num_threads(1)
    is_quiet = wait_until_quiet(patience)
    outcomes = {}
    for name in NETWORKS:
        say(name)
        outcomes[name] = measure_network(name, turns)
    return pages.render(
        "networks",
        path,
        origin=rows.origin(),
        processor=processor(),
        quiet=is_quiet,
        records=RECORDS,
        turns=turns,
        outcomes=outcomes,
    )
