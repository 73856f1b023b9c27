"""A private step of networks as people have them, against a plain one and Opacus: `python -m benchmarks networks`.

Models of transformers and torchvision with random weights, each way in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from torchvision.models import SwinTransformer

from benchmarks import opacus_, ours
from benchmarks.orders import Orders, PeakMemory, first_steps
from benchmarks.plain import SGD, Step
from dpbench import PrivateTrainer
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.losses import next_token, per_record
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.strategies import DPSGD

WAYS = ("plain", "engine", "harness", "hooks", "ghost")
_VOCABULARY = 8000
Lot = dict[str, Tensor]


@dataclass(frozen=True)
class Network:
    """A network with a lot for it.

    Attributes:
        build: Makes it, given a rate of dropout, or of stochastic depth in networks for images; its output has the
            logits.
        lot: Arguments of its forward pass for a number of records, with a row for each, and their labels.
        loss: Losses of the records, of logits and labels.
        dropout: Its rate.
        records: In the lot.
    """

    build: Callable[[float], nn.Module]
    lot: Callable[[int], Lot]
    loss: Callable[[Tensor, Tensor], Tensor] = per_record
    dropout: float = 0.0
    records: int = 16

    def model(self) -> nn.Module:
        """The network with the same weights in every process, training."""
        torch.manual_seed(0)
        return self.build(self.dropout).train()

    def data(self) -> Lot:
        """The same lot in every process."""
        torch.manual_seed(1)
        return self.lot(self.records)

    def losses(self, net: nn.Module, lot: Lot) -> Tensor:
        """Losses (R,) of the records of a lot."""
        inputs = {name: rows for name, rows in lot.items() if name != "labels"}
        return self.loss(net(**inputs).logits, lot["labels"])


def _tokens(records: int, length: int, vocabulary: int = _VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (records, length))


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
    """Torchvision's, with the arguments and the output of that of transformers."""

    def __init__(self, dropout: float) -> None:
        settings: dict[str, Any] = {"patch_size": [4, 4], "window_size": [4, 4], "num_classes": 10}
        super().__init__(**_SWIN, **settings, stochastic_depth_prob=dropout)

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(pixel_values))


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


def _gpt(dropout: float, **settings: Any) -> nn.Module:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, **rates))  # type: ignore[arg-type]


def _gpt_with_lora(dropout: float) -> nn.Module:
    lora = peft.LoraConfig(r=8, lora_dropout=0.0, fan_in_fan_out=True, task_type="CAUSAL_LM")
    adapted: nn.Module = peft.get_peft_model(_gpt(dropout), lora)
    return adapted


def _images(records: int) -> Lot:
    return {"pixel_values": torch.randn(records, 3, 64, 64), "labels": torch.arange(records) % 10}


def _translations(records: int) -> Lot:
    labels = _tokens(records, 32)
    return {"input_ids": _tokens(records, 48), "decoder_input_ids": labels.roll(1, 1), "labels": labels}


def _texts(records: int, length: int = 64, vocabulary: int = _VOCABULARY) -> Lot:
    words = _tokens(records, length, vocabulary)
    return {"input_ids": words, "labels": words}


def _gpt_texts(records: int, vocabulary: int) -> Lot:
    """With positions, which Opacus' hooks know no other way to give each record."""
    return {"position_ids": torch.arange(128).repeat(records, 1), **_texts(records, 128, vocabulary)}


def _classified_texts(records: int) -> Lot:
    return {"input_ids": _tokens(records, 64), "labels": torch.arange(records) % 2}


_SMALL = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": _VOCABULARY}
_SMALL_TEXTS = partial(_gpt_texts, vocabulary=_VOCABULARY)
NETWORKS = {
    "GPT-2 small with LoRA": Network(
        _gpt_with_lora,
        partial(_gpt_texts, vocabulary=50257),
        next_token,
        records=4,
    ),
    "small GPT": Network(partial(_gpt, **_SMALL), _SMALL_TEXTS, next_token),
    "small GPT, untied": Network(partial(_gpt, **_SMALL, tie_word_embeddings=False), _SMALL_TEXTS, next_token),
}
_KINDS = (
    ("T5", "dropout", _t5, _translations, per_record),
    ("OPT", "dropout", _opt, _texts, next_token),
    ("Swin (transformers)", "stochastic depth", _swin, _images, per_record),
    ("Swin (torchvision)", "stochastic depth", _SwinOfTorchvision, _images, per_record),
    ("BERT with LoRA", "dropout", _bert_with_lora, _classified_texts, per_record),
)
for name, rate, build, lot, loss in _KINDS:
    NETWORKS[name] = Network(build, lot, loss)
    NETWORKS[f"{name}, {rate} 0.1"] = Network(build, lot, loss, 0.1)


def _trained(net: nn.Module) -> torch.optim.Optimizer:
    return SGD(parameter for parameter in net.parameters() if parameter.requires_grad)


def _plain(network: Network) -> Step:
    net = network.model()
    lot = network.data()
    optimizer = _trained(net)

    def step() -> None:
        optimizer.zero_grad()
        network.losses(net, lot).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _engine(network: Network) -> Step:
    net = network.model()
    lot = network.data()
    engine = PerRecordEngine(net)
    mechanism = ours.mechanism_of("flat", engine, network.records)
    return ours.private_step(
        engine,
        mechanism,
        _trained(net),
        lambda: network.losses(net, lot).mean(),
        network.records,
    )


def _opacus(network: Network, mode: str) -> Step:
    lot = network.data()
    return opacus_.private_step(network.model(), mode, lambda net: network.losses(net, lot), network.records)


class _Trainer(PrivateTrainer):  # type: ignore[misc]  # without a type to mypy
    """Takes the whole lot in each step, since times are compared."""

    def get_train_dataloader(self) -> PrivateDataLoader:
        sampling = make_sampling("full", len(self.train_dataset), len(self.train_dataset))
        return PrivateDataLoader(self.train_dataset, PrivateBatchSampler(sampling, None))


class _Conductor(transformers.TrainerCallback):
    """Makes the Trainer's loop take one step for each that is ordered, after two in which memory is measured."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._peak = PeakMemory("cpu")
        self._steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._steps += 1
        if self._steps == 2:
            self._orders.say(peak_mb=self._peak.mb())
        if self._steps >= 2:
            self._orders.advance()


def _harness(network: Network, orders: Orders) -> None:
    lot = network.data()
    lot.pop("position_ids", None)  # as collators leave them out
    records = [dict(zip(lot, record, strict=True)) for record in zip(*lot.values(), strict=True)]
    net = network.model()
    with TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, max_steps=10**6, save_strategy="no", report_to="none")
        _Trainer(
            net,
            arguments,
            train_dataset=records,
            strategy=DPSGD(noise_multiplier=1.0, delta=1e-3, gradients="engine"),
            loss=lambda net, lot: network.losses(net, lot).mean(),
            optimizers=(_trained(net), None),
            callbacks=[_Conductor(orders)],
        ).train()


def serve(orders: Orders, name: str, way: str) -> None:
    """Obey orders in the process that is measured.

    Args:
        orders: The orders.
        name: Of `NETWORKS`.
        way: Of `WAYS`.
    """
    network = NETWORKS[name]
    if way == "harness":
        _harness(network, orders)
        return
    match way:
        case "plain":
            step = _plain(network)
        case "engine":
            step = _engine(network)
        case _:
            step = _opacus(network, way)
    peak = first_steps(step, "cpu")
    orders.functions[way] = step
    orders.say(peak_mb=peak)
    orders.advance()
