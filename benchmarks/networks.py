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

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks import pages, rows
from benchmarks.machine import processor, wait_until_quiet
from benchmarks.timing import Say
from dpbench.callback.loop import PrivateLoop
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.strategies import DPSGD

RECORDS = 16
_VOCABULARY = 8000
_WARM = 3  # steps before the clocks run
Step = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Network:
    """A network with a lot for it.

    Attributes:
        build: Makes it, given a rate of dropout.
        lot: Tensors with a row for each record.
        step: (network, lot) → loss.
        dropout: Its rate; that of stochastic depth in networks for images.
    """

    build: Callable[[float], nn.Module]
    lot: Callable[[], tuple[Tensor, ...]]
    step: Step
    dropout: float = 0.0


def _tokens(length: int) -> Tensor:
    return torch.randint(_VOCABULARY, (RECORDS, length))


def _t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

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
    return T5ForConditionalGeneration(T5Config(**settings))


def _opt(dropout: float) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 256,
        "word_embed_proj_dim": 256,
        "ffn_dim": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "dropout": dropout,
    }
    return OPTForCausalLM(OPTConfig(**settings))


def _swin(dropout: float) -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    settings: dict[str, Any] = {
        "image_size": 64,
        "patch_size": 4,
        "embed_dim": 48,
        "depths": [2, 2, 2],
        "num_heads": [3, 6, 12],
        "window_size": 4,
        "num_labels": 10,
        "drop_path_rate": dropout,
    }
    return SwinForImageClassification(SwinConfig(**settings))


def _swin_of_torchvision(dropout: float) -> nn.Module:
    from torchvision.models import SwinTransformer

    net: nn.Module = SwinTransformer(
        patch_size=[4, 4],
        embed_dim=48,
        depths=[2, 2, 2],
        num_heads=[3, 6, 12],
        window_size=[4, 4],
        stochastic_depth_prob=dropout,
        num_classes=10,
    )
    return net


def _bert_with_lora(dropout: float) -> nn.Module:
    import peft
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    rates: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    net = BertForSequenceClassification(BertConfig(vocab_size=_VOCABULARY, **sizes, **rates))
    lora = peft.LoraConfig(r=8, target_modules=["query", "value"], lora_dropout=0.0, task_type="SEQ_CLS")
    adapted: nn.Module = peft.get_peft_model(net, lora)
    return adapted


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(RECORDS, 3, 64, 64), torch.arange(RECORDS) % 10


def _texts() -> tuple[Tensor, Tensor]:
    return _tokens(48), _tokens(32)


def _translation(net: nn.Module, lot: Any) -> Tensor:
    loss: Tensor = net(input_ids=lot[0], labels=lot[1]).loss
    return loss


def _language(net: nn.Module, lot: Any) -> Tensor:
    loss: Tensor = net(input_ids=lot[0], labels=lot[0]).loss
    return loss


def _pixels(net: nn.Module, lot: Any) -> Tensor:
    loss: Tensor = net(pixel_values=lot[0], labels=lot[1]).loss
    return loss


def _logits(net: nn.Module, lot: Any) -> Tensor:
    return F.cross_entropy(net(lot[0]), lot[1])


NETWORKS = {
    "T5": Network(_t5, _texts, _translation),
    "T5, dropout 0.1": Network(_t5, _texts, _translation, 0.1),
    "OPT": Network(_opt, lambda: (_tokens(64),), _language),
    "OPT, dropout 0.1": Network(_opt, lambda: (_tokens(64),), _language, 0.1),
    "Swin (transformers)": Network(_swin, _images, _pixels),
    "Swin (transformers), stochastic depth 0.1": Network(_swin, _images, _pixels, 0.1),
    "Swin (torchvision)": Network(_swin_of_torchvision, _images, _logits),
    "Swin (torchvision), stochastic depth 0.1": Network(_swin_of_torchvision, _images, _logits, 0.1),
    "BERT with LoRA": Network(_bert_with_lora, lambda: (_tokens(64), torch.arange(RECORDS) % 2), _translation),
    "BERT with LoRA, dropout 0.1": Network(
        _bert_with_lora, lambda: (_tokens(64), torch.arange(RECORDS) % 2), _translation, 0.1
    ),
}


def _plain(net: nn.Module, step: Step, lot: tuple[Tensor, ...]) -> Iterator[None]:
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.0)
    while True:
        optimizer.zero_grad()
        step(net, lot).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def _opacus(net: nn.Module, step: Step, lot: tuple[Tensor, ...]) -> Iterator[None]:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    sampled = GradSampleModule(net)
    inner = torch.optim.SGD([p for p in sampled.parameters() if p.requires_grad], lr=0.0)
    optimizer = DPOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=RECORDS)
    while True:
        optimizer.zero_grad()
        step(sampled, lot).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


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

    with TemporaryDirectory() as folder:
        strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, gradients="engine", ledger=f"{folder}/ledger.jsonl")
        net = built()
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.0)
        loader = LotLoader(TensorDataset(*lot), Lots(make_sampling("full", RECORDS, RECORDS), None))
        ours = PrivateLoop(net, optimizer, loader, strategy, network.step, steps=_WARM + turns)
        ways: dict[str, Iterator[Any]] = {
            "plain": _plain(built(), network.step, lot),
            "ours": iter(ours),
            "opacus": _opacus(built(), network.step, lot),
        }
        outcome: dict[str, Any] = {}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(_WARM + turns):
            for way, steps in ways.items():
                if way in outcome:
                    continue
                start = time.perf_counter()
                try:
                    next(steps)
                except Exception as error:  # of a peer that does not know the network
                    outcome[way] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]
                    continue
                if turn >= _WARM:
                    seconds[way].append(time.perf_counter() - start)
    return outcome | {way: statistics.median(values) for way, values in seconds.items() if values}


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
