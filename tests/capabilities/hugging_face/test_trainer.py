"""`PrivateTrainer`: exact gradients, sensitivity, noise, ε, logs, checkpoints."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

from dpbench import DPSGD, ClipOnly, PrivateDataLoader, PrivateLoop
from dpbench.capabilities.hugging_face.model_losses import causal
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import read_ledger
from tests.capabilities.hugging_face.worlds import TOKENS, Items, collate, gpt2, texts, trainer_of, weights_of
from tests.support.checks import accepts_scale

BOUND = 0.5
EVERYBODY = {"per_device_train_batch_size": 12, "max_steps": 1}


def released_sum(folder: Path, strategy: Any, records: Items | None = None) -> Tensor:
    """Sum that one step on all records has released."""
    records = records or texts()
    options = EVERYBODY | {"per_device_train_batch_size": len(records)}
    trainer = trainer_of(folder, strategy, parts={"train_dataset": records}, **options)
    before = weights_of(trainer.model)
    trainer.train()
    assert strategy._source.method == "engine"
    return (before - weights_of(trainer.model)) * len(records)


def clipped_sum(records: Items) -> Tensor:
    """Sum of the clipped gradients of each text alone, in float64."""
    model = gpt2().double()
    parameters = list(model.parameters())
    total = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.double)
    for item in records.items:
        tokens = torch.tensor(item["input_ids"])
        if len(tokens) > 1:
            loss = F.cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:])
            gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])
            total += gradient * (BOUND / gradient.norm()).clamp(max=1)
    return total


def test_it_releases_the_clipped_gradients_of_each_text(tmp_path: Path) -> None:
    total = released_sum(tmp_path, ClipOnly(max_grad_norm=BOUND))
    torch.testing.assert_close(total.double(), clipped_sum(texts()), rtol=1e-3, atol=2e-5)


def test_the_ledger_states_the_unit_that_it_is_told(tmp_path: Path) -> None:
    trainer_of(tmp_path, parts={"unit": "block"}, max_steps=1).train()
    assert read_ledger(tmp_path / "ledger.jsonl").header.unit == "block"


def test_a_neighbor_moves_the_sum_by_the_sensitivity_at_most(tmp_path: Path) -> None:
    """Also by the longest text, to whose length the others are padded."""
    records = texts()
    total = released_sum(tmp_path / "all", ClipOnly(max_grad_norm=BOUND))
    longest = max(range(len(records)), key=lambda number: len(records.items[number]["input_ids"]))
    fewer = Items([item for number, item in enumerate(records.items) if number != longest])
    change = total - released_sum(tmp_path / "fewer", ClipOnly(max_grad_norm=BOUND), fewer)
    assert BOUND * 0.9 < float(change.norm()) < BOUND * (1 + 1e-4)


def test_the_noise_has_the_declared_scale(tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=2.0, max_grad_norm=BOUND, delta=1e-3)
    noise = (released_sum(tmp_path, strategy).double() - clipped_sum(texts())).numpy()
    assert accepts_scale(noise, 2.0 * BOUND)
    assert not accepts_scale(noise, 2.0 * BOUND * 2 / 3) and not accepts_scale(noise, 2.0 * BOUND * 3 / 2)


def test_epsilon_is_that_of_a_loop_and_of_dp_accounting(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=-1, num_train_epochs=2)
    output = trainer.train()
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, ledger=str(tmp_path / "loop.jsonl"))
    model = gpt2()
    loader = PrivateDataLoader.poisson(texts(), 4, collate_fn=lambda items: collate(items))
    loop = PrivateLoop(model, torch.optim.SGD(model.parameters(), 1.0), loader, strategy, causal, steps=6)
    list(loop)
    event = dp_accounting.PoissonSampledDpEvent(4 / 12, dp_accounting.GaussianDpEvent(1.0))
    accountant = dp_accounting.rdp.RdpAccountant().compose(event, 6)
    assert trainer.strategy.epsilon() == loop.epsilon() == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-3)
    assert output.metrics["epsilon"] == loop.epsilon() and output.global_step == 6
    releases = read_ledger(tmp_path / "ledger.jsonl").releases
    assert len(releases) == 6 and read_ledger(tmp_path / "ledger.jsonl").header.unit == "item"


# ------------------------------------------------------------------------------------------------- models


def bert(kind: Any, **options: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return kind(BertConfig(vocab_size=TOKENS, max_position_embeddings=16, **sizes, **options))


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=TOKENS, decoder_start_token_id=0, **sizes))


def classified(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = collate(items)
    return batch | {"labels": batch["input_ids"][:, 0] % 3}


def own_loss(model: Any, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return (logits[:, 0] - batch["labels"]).square().mean()


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "masked": (lambda: bert(BertForMaskedLM), {}),
    "classes": (lambda: bert(BertForSequenceClassification, num_labels=3), {"data_collator": classified}),
    "translation": (t5, {}),
    "own loss": (
        lambda: bert(BertForSequenceClassification, num_labels=1),
        {"data_collator": classified, "loss": own_loss},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_a_loss_of_each_record_train_by_the_engine(name: str, tmp_path: Path) -> None:
    make, parts = MODELS[name]
    trainer = trainer_of(tmp_path, model=make(), parts=parts)
    assert trainer.train().global_step == 3
    assert trainer.strategy._source.method == "engine"  # type: ignore[attr-defined]


def padded_in_front(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: values.flip(1) for name, values in collate(items).items()}


def test_records_that_make_no_rows_of_a_batch_train_one_by_one(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, parts={"data_collator": padded_in_front})
    assert trainer.train().global_step == 3
    assert trainer.strategy._source.method == "one_by_one"  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
def test_adapters_alone_are_trained_and_saved(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(gpt2(), config)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = trainer_of(tmp_path, model=model, save_strategy="steps", save_steps=3)
    trainer.train()
    moved = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved and all("lora_" in name for name in moved)
    assert (tmp_path / "checkpoint-3" / "adapter_config.json").is_file()


# ------------------------------------------------------------------------------------------------- logs


class Seen(TrainerCallback):
    """Notes what callbacks are given; it changes nothing."""

    observes_only = True

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_nothing_exact_of_training_records_is_logged_or_saved(tmp_path: Path) -> None:
    seen = Seen()
    parts = {"callbacks": [seen], "eval_dataset": Items(texts(20).items[12:])}
    trainer = trainer_of(
        tmp_path, parts=parts, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=3
    )
    output = trainer.train()
    assert math.isnan(output.training_loss)
    for logs in (*seen.logs, *trainer.state.log_history, output.metrics):
        assert not {"loss", "train_loss", "total_flos", "num_input_tokens_seen"} & set(logs)
    epsilons = [logs["epsilon"] for logs in seen.logs if "epsilon" in logs]
    assert epsilons == sorted(epsilons) and epsilons[-1] == trainer.strategy.epsilon() and len(epsilons) == 4
    assert sum("eval_loss" in logs for logs in seen.logs) == 3
    checkpoint = tmp_path / "checkpoint-3"
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["total_flos"] == 0 and not state["num_input_tokens_seen"]
    assert not list(checkpoint.glob("rng_state*"))


def test_it_trains_with_dropout_also_after_an_evaluation(tmp_path: Path) -> None:
    modes = []

    def loss(model: Any, batch: Any) -> Tensor:
        modes.append(model.training)
        return causal(model, batch)

    parts = {"eval_dataset": texts(), "loss": loss}
    trainer_of(tmp_path, model=gpt2(attn_pdrop=0.5), parts=parts, eval_strategy="steps", eval_steps=1).train()
    assert modes and all(modes)


def test_it_stops_where_the_budget_is_spent(tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=1.0, target_epsilon=4.0, delta=1e-3)
    trainer = trainer_of(tmp_path, strategy, max_steps=50, save_strategy="steps")
    with pytest.warns(UserWarning, match=r"stopped after \d+ of 50 steps"):
        output = trainer.train()
    assert 1 <= output.global_step == strategy.releases < 50 and strategy.epsilon() <= 4.0
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{output.global_step}"]


# ------------------------------------------------------------------------------------------------- checkpoints


class Interrupted(TrainerCallback):
    """Ctrl-C after a step."""

    observes_only = True

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


SAVED: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize("seed", [None, 5])
def test_a_resumed_training_goes_on_in_its_ledger(seed: int | None, tmp_path: Path) -> None:
    """Without a seed, releases after the checkpoint count twice; with one they are repeated."""

    def strategy() -> DPSGD:
        return DPSGD(noise_multiplier=1.0, delta=1e-3, seed=seed)

    interrupted = trainer_of(tmp_path, strategy(), parts={"callbacks": [Interrupted(5)]}, **SAVED)
    warned = nullcontext() if seed is None else pytest.warns(UserWarning, match="can be resumed")
    with pytest.raises(KeyboardInterrupt), warned:
        interrupted.train()
    assert not any(module._forward_hooks for module in interrupted.model.modules())
    resumed = trainer_of(tmp_path, strategy(), **SAVED)
    output = resumed.train(resume_from_checkpoint=True)
    assert output.global_step == 8 and resumed.state.epoch == pytest.approx(8 / 3)
    releases = 9 if seed is None else 8
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == releases
    event = dp_accounting.PoissonSampledDpEvent(4 / 12, dp_accounting.GaussianDpEvent(1.0))
    expected = dp_accounting.rdp.RdpAccountant().compose(event, releases).get_epsilon(1e-3)
    assert resumed.strategy.epsilon() == pytest.approx(expected, rel=1e-3)
    with pytest.raises(ConfigurationError, match="has already trained"):
        resumed.train()
    with pytest.raises(ConfigurationError, match="has made all 8 steps"):
        trainer_of(tmp_path, strategy(), **SAVED).train(str(tmp_path / "checkpoint-8"))


def test_a_checkpoint_of_another_trainer_is_no_past(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ConfigurationError, match=r"has no private_strategy\.pt"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2/private_strategy.pt").write_bytes(b"torn")
    with pytest.raises(ConfigurationError, match=r"private_strategy\.pt is damaged .* an earlier checkpoint"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)


def test_a_second_run_in_a_folder_has_a_ledger_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        trainer_of(tmp_path).train()
    for ledger in (tmp_path / "ledger.jsonl", tmp_path / "run-2" / "ledger.jsonl"):
        assert len(read_ledger(ledger).releases) == 3
