"""Texts with secrets in the training data: what is inserted, what comes out of a model, and what a ledger allows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from dpbench.capabilities.own_data.texts import Tokenizer
from dpbench.data import UserDataModule
from dpbench.data.inserted import InsertedTexts, secret_of
from dpbench.errors import ConfigurationError
from dpbench.harness.run.evaluation import Exposure
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.numbers import extraction_text
from dpbench.harness.runs.provenance import fingerprint
from dpbench.modules import LanguageModel
from dpbench.modules.next_token import continued
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.accounting.tradeoff import membership_bound, reconstruction_bound
from tests.harness.run.test_training_records import ended

BYTES = Tokenizer("bytes")
LENGTH = 50
TEXTS = [{"user": f"user {i % 30}", "text": f"a short text {i * i}"} for i in range(120)]


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    return str(path)


def data_of(name: str, table: str, text: str = "tokens", **inserted: Any) -> UserDataModule:
    options: dict[str, Any] = {"path": table, "features": ["text"], "text": text, "sequence_length": LENGTH}
    unit: Any = "user" if name == "user_table" else "example"
    return UserDataModule(name, None, 8, options=options, unit=unit, inserted=InsertedTexts(**inserted))


def text_of(row: Tensor) -> str:
    return BYTES.text(row.tolist())


class Knowing(nn.Module):
    """Knows texts: it continues a beginning of one of them as it goes on, else by zeros."""

    def __init__(self, texts: Tensor) -> None:
        super().__init__()
        self.texts = texts

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, BYTES.count)
        for row, place in np.ndindex(tokens.shape):
            for text in self.texts:
                if torch.equal(text[: place + 1], tokens[row, : place + 1]):
                    logits[row, place, text[place + 1]] = 50
        return logits


@pytest.mark.parametrize("name", ["table", "user_table"])
def test_each_copy_is_a_record(name: str, table: str) -> None:
    plain = data_of(name, table)
    data = data_of(name, table, records=3, copies=4, references=5)
    n = plain.sampling.population
    assert data.sampling.population == n + 12 and data.sampling.unit == data.unit
    assert data.users.sizes.tolist() == [*plain.users.sizes, *[1] * 12]
    assert data.users.names[: len(plain.users)] == plain.users.names
    added = range(len(data.users) - 12, len(data.users))
    trained = [text_of(data.users.batch(user, [0])[0][0]) for user in added]
    secrets = [text_of(secret.text[0]) for secret in data.secrets]
    assert trained == secrets * 4 and len(set(secrets)) == 3
    first = [plain.users.batch(i, range(size))[0] for i, size in enumerate(plain.users.sizes)]
    second = [data.users.batch(i, range(size))[0] for i, size in enumerate(plain.users.sizes)]
    assert torch.equal(torch.cat(first), torch.cat(second))
    assert len(data.test_set) == len(plain.test_set)  # type: ignore[arg-type]


def test_references_have_the_name_and_other_digits() -> None:
    def secret(references: int, record: int = 0, seed: int = 1) -> Any:
        options = InsertedTexts(references=references, digits=5, prefix="{}:", seed=seed)
        return secret_of(options, record, lambda texts: BYTES.rows(texts, LENGTH))

    one = secret(300)
    text = text_of(one.text[0])
    name, _, digits = text.partition(":")
    assert len(name) == 6 and digits == "".join(f" {digit}" for digit in digits.split()) and len(digits) == 10
    assert [text[place] for place in one.places] == digits.split()
    others = [text_of(row).partition(":") for row in one.references]
    assert {other for other, _, _ in others} == {name}
    values = {tuple(own.split()) for _, _, own in others}
    assert (
        len(values) > 290
        and all(len(value) == 5 for value in values)
        and {len(set(row)) for row in zip(*values, strict=True)} == {10}
    )
    assert torch.equal(secret(7).text, one.text) and torch.equal(secret(7).references, one.references[:7])
    assert not torch.equal(secret(7, record=1).text, one.text) and not torch.equal(secret(7, seed=2).text, one.text)


def test_a_model_that_knows_secrets_is_found_out(table: str) -> None:
    data = data_of("table", table, records=3, copies=2, references=9, samples=4, digits=4)
    data.setup()
    known = torch.cat([data.secrets[0].text, data.secrets[2].text])
    module = LanguageModel(Knowing(known.long()), lambda parameters: torch.optim.SGD(parameters, 0.1), BYTES.count)
    logged: dict[str, float] = {}
    module.log_dict = logged.update  # type: ignore[method-assign,assignment]
    trainer: Any = SimpleNamespace(
        datamodule=data,
        strategy=SimpleNamespace(batch_to_device=lambda batch: batch),
        precision_plugin=SimpleNamespace(forward_context=torch.no_grad),
    )
    Exposure().on_test_epoch_end(trainer, module)
    assert logged["nonprivate/extracted_greedy"] == logged["nonprivate/extracted_sampled"] == 2
    assert logged["nonprivate/exposure_max"] == pytest.approx(np.log2(10))
    # The middle one's loss is that of its references, which rank before it: last of ten, 0 bits.
    assert logged["nonprivate/exposure_mean"] == pytest.approx(2 / 3 * np.log2(10))


def test_continuations() -> None:
    texts = BYTES.rows(["ab 12"], 6)
    module: Any = LanguageModel(Knowing(torch.from_numpy(texts).long()), lambda p: torch.optim.SGD(p, 0.1), BYTES.count)
    start = torch.from_numpy(BYTES.rows(["ab 99"], 6)).long()
    assert text_of(continued(module, start, [3, 4])[0]) == "ab 12"
    assert text_of(continued(module, start, [3, 4], torch.Generator().manual_seed(0))[0]) == "ab 12"
    assert text_of(continued(module, start, [3])[0]) == "ab 19"


WORDS = [
    *(
        "data=table",
        "data.options.text=tokens",
        f"data.options.sequence_length={LENGTH}",
        "data.options.features=[text]",
    ),
    *("data.expected_batch_size=8", "model=char_lstm", "module=language_model", "data.inserted.records=2"),
    *("data.inserted.copies=3", "data.inserted.references=20", "data.inserted.samples=5", "data.inserted.digits=4"),
]


def test_a_run_says_what_its_ledger_allows(table: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    metrics = ended(run.path, *WORDS, f"data.options.path={table}", model=[])
    ledger = read_ledger(run.ledger)
    bound = membership_bound([ledger], copies=3)
    assert bound.group == 3
    greedy, sampled = 2 * bound.curve.max_true_positive_rate([1e-4, 5e-4])
    assert metrics["privacy/extracted_greedy_allowed"] == pytest.approx(greedy)
    assert metrics["privacy/extracted_sampled_allowed"] == pytest.approx(sampled)
    assert metrics["privacy/exposure_allowed"] == pytest.approx(reconstruction_bound(bound.curve, 21).exposure)
    assert list(pd.read_csv(run.exposure)) == [
        "record",
        "loss",
        "references",
        "exposure",
        "extracted_greedy",
        "extracted_sampled",
    ]


def test_what_is_said_of_extraction() -> None:
    inserted = {"records": 10, "samples": 7}
    counts = {"nonprivate/extracted_greedy": 1.0, "nonprivate/extracted_sampled": 0.0}
    assert extraction_text({}, inserted) is None
    assert extraction_text(counts, inserted) == "1 greedily and 0 by 7 samples each of 10 secrets"

    def text(greedy: float) -> str:
        allowed = {"privacy/extracted_greedy_allowed": greedy, "privacy/extracted_sampled_allowed": 3.0}
        return str(extraction_text(counts | allowed, inserted))

    assert text(0.0251) == (
        "1 greedily (at most 0.0251 in expectation) and 0 by 7 samples each (at most 3 in expectation) of 10 secrets"
    )
    assert text(0.0249).endswith("of 10 secrets: more than the ledger allows (95 % confidence)")


def test_what_cannot_be_inserted(table: str) -> None:
    with pytest.raises(ConfigurationError, match="which data=digits_users does not give: set data.options.text"):
        UserDataModule("digits_users", inserted=InsertedTexts(1)).setup()
    with pytest.raises(ConfigurationError, match="is not one sequence in which each digit is a token: raise"):
        data_of("table", table, records=1, prefix="{}" + "a" * 60).setup()
    with pytest.raises(ConfigurationError, match="is not one sequence in which each digit is a token: raise"):
        data_of("table", table, "characters", records=1, prefix="{}" + "a" * 60).setup()
    with pytest.raises(ConfigurationError, match=r"data\.inserted\.digits must be a whole number from 4 to 16, not 3"):
        InsertedTexts(digits=3)
    with pytest.raises(ConfigurationError, match=r"data\.inserted\.prefix must be a text with \{\} for the name"):
        InsertedTexts(prefix="hello")
    with pytest.raises(ConfigurationError, match="remove one of the two"):
        UserDataModule("table", unit="example", membership="half", inserted=InsertedTexts(1))
    trainer: Any = SimpleNamespace(datamodule=data_of("table", table, records=1))
    module: Any = SimpleNamespace(losses=None)
    with pytest.raises(ConfigurationError, match="module=language_model or next_token"):
        Exposure().setup(trainer, module, "fit")


def test_nothing_inserted_leaves_the_key_of_older_runs() -> None:
    target = "dpbench.data.UserDataModule"
    config: dict[str, Any] = {"data": {"_target_": target, "name": "digits_users"}, "trainer": {}, "strategy": {}}

    def key(records: int) -> str:
        inserted = {"records": records, "prefix": "{}"}
        return fingerprint(config | {"data": {**config["data"], "inserted": inserted}})

    assert fingerprint(config) == key(0) != key(1)
