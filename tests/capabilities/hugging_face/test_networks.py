"""Language models on own texts: gradients of each record, tokens, and what a run and its export hold."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

from dpbench.canonical import Canonical
from dpbench.capabilities.hugging_face.networks import CausalLM, SequenceClassifier
from dpbench.capabilities.own_data.texts import Tokenizer
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import ConfigurationError
from dpbench.losses import per_record
from dpbench.strategies import ClipOnly
from tests.strategies.worlds import trainer_for
from tests.support.cli import dpbench
from tests.support.one_by_one import BOUND, Module

SMALL: dict[str, Any] = {"layers": 2, "heads": 2, "width": 8}
TEXTS = torch.tensor([[3, 1, 4, 2, 7], [5, 2, 0, 0, 0], [9, 9, 9, 0, 0], [1, 0, 0, 0, 0]])
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: CausalLM(10, **SMALL),
    "gpt2, adapters": lambda: CausalLM(10, lora_rank=2, **SMALL),
    "bert": lambda: SequenceClassifier(10, 3, **SMALL),
    "bert, adapters": lambda: SequenceClassifier(10, 3, lora_rank=2, **SMALL),
}
WORDS = ["data.options.path=texts.jsonl", "data.expected_batch_size=8", "trainer.max_steps=3", "logger=none"]
WORDS += ["model.layers=1", "model.width=8", "data.options.sequence_length=12", "strategy.secure=true"]


def loss_of(network: nn.Module, tokens: Tensor) -> Tensor:
    """Means over the records, of a label that follows from the tokens or of the next tokens."""
    if isinstance(network, CausalLM):
        return per_record(network(tokens[:, :-1]), tokens[:, 1:], 0).mean()
    return per_record(network(tokens), tokens[:, 0] % 3).mean()


@pytest.mark.parametrize("name", NETWORKS)
def test_the_update_is_that_of_clipped_gradients(name: str, tmp_path: Path) -> None:
    """By the engine, as by autograd on each record in float64; padding changes nothing."""
    torch.manual_seed(0)
    network = NETWORKS[name]()
    for parameter in network.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)  # adapters begin with zeros
    torch.testing.assert_close(loss_of(network, TEXTS[1:3]), loss_of(network, TEXTS[1:3, :4]))
    records = TensorDataset(TEXTS)
    trained = [p for p in network.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    wanted = clipped_mean(copy.deepcopy(network).double())
    strategy = ClipOnly(max_grad_norm=BOUND, gradients="engine", ledger=str(tmp_path / "ledger.jsonl"))
    loader = PrivateDataLoader(records, PrivateBatchSampler(make_sampling("full", 4, 4), None))
    module = Module(network, lambda net, batch: loss_of(net, batch[0]))
    trainer_for(tmp_path, strategy, 1).fit(module, loader)
    for old, parameter, update in zip(before, trained, wanted, strict=True):
        torch.testing.assert_close((old - parameter).double(), update, rtol=1e-3, atol=1e-6)


def clipped_mean(network: nn.Module) -> list[Tensor]:
    parameters = [p for p in network.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    for text in TEXTS.split(1):
        gradients = torch.autograd.grad(loss_of(network, text), parameters, allow_unused=True)
        dense = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        norm = float(torch.stack([g.square().sum() for g in dense]).sum().sqrt())
        for sum_, gradient in zip(total, dense, strict=True):
            sum_ += min(1.0, BOUND / max(norm, 1e-12)) * gradient / len(TEXTS)
    return total


@pytest.mark.parametrize("name", NETWORKS)
def test_a_seeded_run_can_be_repeated(name: str) -> None:
    """All of a network has bytes for the key of its noise, the same for the same weights."""
    digests = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        canonical = Canonical()
        digests.append(canonical.digest(NETWORKS[name]()))
        assert canonical.gaps == []
    assert digests[0] == digests[1] != digests[2]


def test_tokens(tmp_path: Path) -> None:
    """A text is one row: its tokenizer's numbers plus 1, an end, and padding."""
    rows = Tokenizer("bytes").rows(["ab", "", "abcdef"], 4)
    assert rows.tolist() == [[98, 99, 257, 0], [257, 0, 0, 0], [98, 99, 100, 101]] and rows.dtype == np.int32
    assert [Tokenizer("bytes").text(row) for row in rows] == ["ab", "", "abcd"]
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Words(WordLevel({"what": 0, "is": 1, "[E]": 2, "[U]": 3}, unk_token="[U]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[E]", unk_token="[U]").save_pretrained(tmp_path)
    own = Tokenizer(str(tmp_path))
    assert own.count == 5 and own.rows(["what is this"], 5).tolist() == [[1, 2, 4, 3, 0]]
    assert own.text([1, 2, 3, 0]) == "what is"
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        Tokenizer(str(tmp_path / "nothing"))


def write_texts(folder: Path) -> None:
    lines = [json.dumps({"text": f"a text of number {number}", "label": number % 2}) for number in range(60)]
    (folder / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own
def test_a_language_model_from_its_file_to_its_adapters(tmp_path: Path) -> None:
    write_texts(tmp_path)
    GPT2LMHeadModel(CausalLM(258, **SMALL).network.config).save_pretrained(tmp_path / "public")
    words = [*WORDS, "model.checkpoint=public", "callbacks.samples.length=9", "callbacks.samples.prompt=a text"]
    out, _ = dpbench(tmp_path, "train", "experiment=lm/gpt2_lora", *words, "hydra.run.dir=run")
    assert "test perplexity" in out and "8.000 at" in out
    samples = (tmp_path / "run/samples.txt").read_text(encoding="utf-8")
    assert samples.count("a text") == 5
    dpbench(tmp_path, "export", "run", "--out", "model")
    public = GPT2LMHeadModel.from_pretrained(tmp_path / "public")
    adapted = PeftModel.from_pretrained(public, tmp_path / "model/adapter")
    arguments = json.loads((tmp_path / "model/config.json").read_text())["arguments"]
    arguments["checkpoint"] = str(tmp_path / "public")
    exported = CausalLM(**arguments)
    exported.load_state_dict(load_file(tmp_path / "model/model.safetensors"))
    torch.testing.assert_close(exported(TEXTS + 1)[..., 1:], adapted.eval()(input_ids=TEXTS).logits)
    moved = [value for name, value in adapted.state_dict().items() if "lora_B" in name]
    assert all(value.abs().sum() > 0 for value in moved) and not list((tmp_path / "model/adapter").glob("*.md"))


def test_a_classifier_of_texts(tmp_path: Path) -> None:
    write_texts(tmp_path)
    words = [*WORDS, "data.options.num_classes=2", "hydra.run.dir=run"]
    out, _ = dpbench(tmp_path, "train", "experiment=lm/bert_classification", *words)
    assert "test accuracy" in out and "8.000 at" in out
    dpbench(tmp_path, "export", "run", "--out", "model")
    assert (tmp_path / "model/transformers/model.safetensors").exists()
    SequenceClassifier(258, 2, str(tmp_path / "model/transformers"))


def test_a_classifier_that_reads_a_texts_end(tmp_path: Path) -> None:
    """GPT-2's finds it by its padding token, and so do the padded rows of ours."""
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=12, pad_token_id=11, num_labels=3)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    network = SequenceClassifier(12, 3, str(tmp_path)).eval()
    torch.testing.assert_close(network(TEXTS[1:3]), network(TEXTS[1:3, :3]))
    torch.testing.assert_close(network(TEXTS)[1:2], network(TEXTS[1:2, :2]))


def test_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    GPT2LMHeadModel(CausalLM(9, **SMALL).network.config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="knows 8 tokens and the tokenizer gives 257"):
        CausalLM(258, str(tmp_path))
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        CausalLM(258, str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match="texts of 5 tokens are longer than the model's 4 positions"):
        CausalLM(10, positions=4, **SMALL)(TEXTS)
    with pytest.raises(ConfigurationError, match="no multiple of model.heads=3"):
        CausalLM(258, heads=3)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match='A tokenizer needs transformers: pip install "dpbench-lightning'):
        Tokenizer("gpt2")


def test_a_network_of_which_peft_knows_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(network: nn.Module, config: Any) -> Any:
        raise ValueError("Please specify `target_modules` in `peft_config`")

    monkeypatch.setattr("peft.get_peft_model", unknown)
    with pytest.raises(ConfigurationError, match="model.lora_rank=2: Please specify"):
        CausalLM(10, lora_rank=2, **SMALL)
