"""`dpbench account` and `dpbench calibrate` on ledgers written by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.ledger import Header, Release, read_ledger
from dpbench.privacy.accounting.tradeoff import trade_off
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, Sampling, ShuffledEpochs
from tests.support.cli import dpbench
from tests.support.finished_runs import finished

DELTA = 1e-5
POISSON = PoissonSampling(1000, 0.02)
FIXED = FixedSizeSampling(1000, 20)
SHUFFLED = ShuffledEpochs(1000, 20)
ONE = Event(POISSON, (SumQuery("a", 1.0, 1.0),))
"""What a release of `write` costs."""


def write(
    path: Path,
    steps: int = 50,
    z: float = 1.0,
    sampling: Sampling = POISSON,
    unit: str = "example",
    delta: float = DELTA,
    relation: str | None = None,
) -> Path:
    """A run's folder with a ledger."""
    header = Header(unit, relation or sampling.neighboring_relation, sampling.population, delta)
    writer = LedgerWriter(path / "ledger.jsonl", header)
    for number in range(steps):
        writer.append(Release(number, sampling, (SumQuery("a", 0.6, z), SumQuery("b", 0.8, z))))
    writer.close()
    return path


def said(folder: Path, words: str) -> str:
    """Standard output of a command."""
    return dpbench(folder, *words.split())[0]


def answer(folder: Path, words: str, status: int = 0) -> dict[str, Any]:
    return json.loads(dpbench(folder, *words.split(), "--json", status=status)[0])


def refused(folder: Path, words: str) -> str:
    """The one line of an error."""
    out, err = dpbench(folder, *words.split(), status=1)
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("dpbench: error: ")
    return err


# ----------------------------------------------------------------------------------------------------- account


def test_one_run_by_every_accountant(tmp_path: Path) -> None:
    write(tmp_path / "run")
    facts = answer(tmp_path, "account run --accountant all")
    for name, accountant in ACCOUNTANTS.items():
        if "poisson" in accountant.samplings:
            assert facts["epsilons"][name] == pytest.approx(epsilon({ONE: 50}, DELTA, name), rel=1e-6)
        else:
            assert "does not cover poisson sampling" in facts["epsilons"][name]
    assert facts["epsilon"] == facts["epsilons"]["rdp"]
    assert facts["guarantee"] is False  # gdp is among them
    no_bounds = {name for name, basis in facts["bases"].items() if not basis["guarantee"]}
    assert no_bounds == {"gdp", "rdp-analytical"}


def test_a_mismatch_is_refused_or_nominal(tmp_path: Path) -> None:
    write(tmp_path / "run", sampling=FIXED)
    assert "pld does not cover fixed_size sampling: --nominal" in refused(tmp_path, "account run --accountant pld")
    facts = answer(tmp_path, "account run --accountant pld --nominal")
    assert facts["guarantee"] is False
    assert facts["epsilon"] == pytest.approx(epsilon({Event(POISSON, (SumQuery("a", 0.5, 1.0),)): 50}, DELTA, "pld"))
    assert "nominal: computed for poisson sampling" in said(tmp_path, "account run --accountant pld --nominal")


def test_membership_inference(tmp_path: Path) -> None:
    """What the releases allow a membership test, of all runs together; a looser bound where PLD does not cover them."""
    write(tmp_path / "run")
    write(tmp_path / "again")
    facts = answer(tmp_path, "account run again")["membership"]
    curve = trade_off({ONE: 100})
    assert facts["advantage"] == pytest.approx(curve.advantage, rel=1e-6)
    for false_positive_rate, rate in facts["true_positive_rates"].items():
        assert rate == pytest.approx(float(curve.max_true_positive_rate(float(false_positive_rate))), rel=1e-6)
    out = said(tmp_path, "account run")
    assert "membership inference       an attacker with a false positive rate of 1 % identifies at most " in out
    assert "loose" not in out
    write(tmp_path / "fixed", sampling=FIXED)
    assert "; a loose bound, by RDP)" in said(tmp_path, "account fixed")
    write(tmp_path / "shuffled", sampling=SHUFFLED, relation="add_or_remove_one")
    assert "; nominal)" in said(tmp_path, "account shuffled --nominal")


def test_several_runs_compose(tmp_path: Path) -> None:
    for name, steps in (("a", 50), ("b", 30), ("c/deep", 20)):
        write(tmp_path / "sweep" / name, steps)
    facts = answer(tmp_path, "account sweep")
    assert [run["steps"] for run in facts["runs"]] == [50, 30, 20]
    assert facts["epsilon"] == pytest.approx(epsilon({ONE: 100}, DELTA), rel=1e-6)
    assert "given twice" in refused(tmp_path, "account sweep sweep/a")
    (tmp_path / "sweep" / "none").mkdir()
    (tmp_path / "sweep" / "none" / "result.json").write_text("{}")
    facts = answer(tmp_path, "account sweep --selection geometric --mean-trials 3")
    assert facts["without_privacy"] == ["sweep/none"]
    assert facts["epsilon"] is facts["selection"]["epsilons"]["rdp"] is None  # infinite
    out = said(tmp_path, "account sweep")
    assert "all 4 published (composition) | 100 | – | inf |" in out
    assert "A run without privacy has no epsilon" in out


def test_nothing_below_a_folder_is_left_out(tmp_path: Path) -> None:
    """Links are followed, once and in no circle; so are runs below a run, but not copies of its ledger."""
    write(tmp_path / "sweep" / "a", 10)
    write(tmp_path / "disk" / "b", 20)
    (tmp_path / "sweep" / "b").symlink_to(tmp_path / "disk" / "b")
    (tmp_path / "sweep" / "b too").symlink_to(tmp_path / "disk" / "b")
    (tmp_path / "disk" / "b" / "circle").symlink_to(tmp_path / "sweep")
    assert answer(tmp_path, "account sweep")["steps"] == 30
    run = write(tmp_path / "run", 5)
    write(run / "again", 7)
    (run / "exported").mkdir()
    shutil.copy(run / "ledger.jsonl", run / "exported")
    assert answer(tmp_path, "account run")["steps"] == 12


def test_a_run_that_was_stopped_before_it_began_costs_nothing(tmp_path: Path) -> None:
    """It has an empty folder for checkpoints, and is not one that trained without privacy."""
    write(tmp_path / "sweep" / "a", 10)
    checkpoints = tmp_path / "sweep" / "b" / "checkpoints"
    checkpoints.mkdir(parents=True)
    assert answer(tmp_path, "account sweep")["steps"] == 10
    (checkpoints / "last.ckpt").write_bytes(b"trained")
    assert answer(tmp_path, "account sweep")["epsilon"] is None


def test_selection(tmp_path: Path) -> None:
    for name in "abcdefgh":
        write(tmp_path / "sweep" / name)
    facts = answer(tmp_path, "account sweep --mean-trials 8 --selection geometric")
    assert facts["runs"][0]["epsilons"]["rdp"] < facts["selection"]["epsilons"]["rdp"] < facts["epsilon"]
    out = said(tmp_path, "account sweep --mean-trials 8 --selection poisson")
    assert "only the best published, 8 trials on average" in out
    assert "drawn from that distribution before any result" in out
    for words, message in {
        "--selection geometric": "both --selection and --mean-trials",
        "--selection best --mean-trials 8": "--selection must be geometric",
        "--selection geometric --mean-trials 0.5": "mean number of trials of at least 1",
        "--selection geometric --mean-trials 8 --accountant pld": "known for Rényi accountants",
    }.items():
        assert message in refused(tmp_path, f"account sweep {words}")


def test_contradictory_runs_do_not_compose(tmp_path: Path) -> None:
    write(tmp_path / "run")
    write(tmp_path / "population", sampling=PoissonSampling(2000, 0.02))
    write(tmp_path / "unit", unit="user")
    write(tmp_path / "relation", sampling=FIXED)
    write(tmp_path / "delta", delta=1e-6)
    for other, message in {
        "population": "population 2000",
        "unit": "unit 'user'",
        "relation": "neighboring_relation 'replace_one'",
        "delta": "different deltas (1e-06, 1e-05): give --delta",
    }.items():
        assert message in refused(tmp_path, f"account run {other}")
    assert answer(tmp_path, "account run delta --delta 1e-7")["delta"] == 1e-7
    write(tmp_path / "item", unit="item", sampling=PoissonSampling(1000, 0.02, unit="item"))  # an example as given
    assert answer(tmp_path, "account run item")["epsilon"] > answer(tmp_path, "account run")["epsilon"]


def test_a_ledger_that_contradicts_itself(tmp_path: Path) -> None:
    write(tmp_path / "relation", relation="replace_one")
    ledger = write(tmp_path / "population") / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"population":1000,"unit"', '"population":9,"unit"'))
    write(tmp_path / "unit", unit="user")
    for run, message in {
        "relation": "contradicts itself",
        "population": "contradicts itself",
        "unit": "users, a release poisson sampling among",
    }.items():
        assert message in refused(tmp_path, f"account {run}")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "run")
    write(tmp_path / "begun", steps=0)
    damaged = write(tmp_path / "damaged", steps=0) / "ledger.jsonl"
    damaged.write_text(damaged.read_text() + '{"record": "release"\n' * 3)
    (tmp_path / "nothing").touch()
    (tmp_path / "bare").mkdir()
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "result.json").write_text("{}")
    newer = write(tmp_path / "newer") / "ledger.jsonl"
    newer.write_text(newer.read_text().replace('"schema":1', '"schema":7'))
    for words, message in {
        "begun": "no release is recorded",
        "damaged": "line 2 is damaged",
        "nothing": "it is empty",
        "bare": "there is no ledger.jsonl in or below",
        "public": "trained without privacy",
        "newer": "written with ledger schema 7, and this version of dpbench reads schemas up to 3",
        "run --delta 0": "delta must lie strictly between 0 and 1",
        "run --accountant rdp,magic": "unknown accountant 'magic'; known are rdp, pld",
    }.items():
        assert message in refused(tmp_path, f"account {words}")


def test_a_ledger_that_is_gone(tmp_path: Path) -> None:
    """It is no run without privacy, whose epsilon would be infinite, nor one that costs nothing."""
    write(tmp_path / "b")
    finished(tmp_path / "a", 0.9, 1.5)
    result = tmp_path / "a" / "result.json"
    record = json.loads(result.read_text())
    record["privacy"] |= {"delta": DELTA, "releases": 50}
    result.write_text(json.dumps(record))
    for path in ("a", "."):
        told = refused(tmp_path, f"account {path}")
        assert (
            "a: ledger.jsonl is missing, although result.json refers to it. Restore it: epsilon cannot be computed"
            in told
        )


def test_adaptive_releases_are_one_cost(tmp_path: Path) -> None:
    """Groups whose bounds all change: equal costs are counted together (so that accountants need moments)."""
    writer = LedgerWriter(tmp_path / "ledger.jsonl", Header("example", "add_or_remove_one", 1000, DELTA))
    for number in range(1000):
        std = 2.0 + number
        queries = (SumQuery("a", 0.3 * std, 2.0 * std), SumQuery("b", 0.4 * std, 2.0 * std))
        writer.append(Release(number, POISSON, queries))
    writer.close()
    assert list(read_ledger(tmp_path / "ledger.jsonl").events.values()) == [1000]


def test_the_first_releases_only(tmp_path: Path) -> None:
    """As if the run had ended there."""
    write(tmp_path / "run")
    write(tmp_path / "short", steps=20)
    assert answer(tmp_path, "account run --releases 20") == answer(tmp_path, "account short")
    told = refused(tmp_path, "account run short --releases 30")
    assert "short has 20; give that number or a smaller one" in told
    assert "must be a number of releases of at least 1" in refused(tmp_path, "account run --releases=0")


# --------------------------------------------------------------------------------------------------- calibrate

KNOWN = {
    "--noise-multiplier": 1.1,
    "--sample-rate": 0.0042667,
    "--steps": 14_062,
    "--delta": 1e-5,
}


def without(*flags: str) -> str:
    """`dpbench calibrate` with all that is known but these flags."""
    return " ".join(["calibrate", *(f"{flag} {value}" for flag, value in KNOWN.items() if flag not in flags)])


def test_each_flag_can_be_left_out(tmp_path: Path) -> None:
    epsilons = {}
    for flag, name in zip(KNOWN, ("rdp", "rdp-classic", "rdp-continuous", "gdp"), strict=True):
        epsilons[name] = answer(tmp_path, f"{without()} --accountant {name}")["epsilon"]
        facts = answer(tmp_path, f"{without(flag)} --epsilon {epsilons[name]} --accountant {name}")
        key = flag.removeprefix("--").replace("-", "_")
        assert facts[key] == pytest.approx(KNOWN[flag], rel=1e-3)
        assert facts["solved_for"] == key
    assert epsilons["rdp-classic"] == pytest.approx(3.0091, abs=1e-4)


@pytest.mark.slow
def test_batches_epochs_and_fixed_lots(tmp_path: Path) -> None:
    words = "calibrate --population 60000 --delta 1e-5 --epochs 60 --batch-size 256 --noise-multiplier 1.1"
    facts = answer(tmp_path, words)
    assert (facts["steps"], facts["batch_size"]) == (14_040, 256)
    fixed = f"calibrate --sampling fixed --population 1000000 --delta {10**-6.6} --steps 1500 --noise-multiplier 1.396"
    facts = answer(tmp_path, f"{fixed} --batch-size 13958")
    assert facts["epsilon"] == pytest.approx(5.0, rel=0.01)
    assert facts["neighbouring_relation"] == "replace_one"
    assert facts["noise_std_over_max_grad_norm"] == pytest.approx(2 * 1.396)
    assert answer(tmp_path, f"{fixed} --epsilon {facts['epsilon']}")["batch_size"] == 13_958


def test_going_on_with_a_ledger(tmp_path: Path) -> None:
    write(tmp_path / "run", steps=200)
    facts = answer(tmp_path, "calibrate --continue-from run --epsilon 3")
    assert facts["steps_before"] == 200
    assert epsilon({ONE: 200 + facts["steps"]}, DELTA) <= 3 < epsilon({ONE: 201 + facts["steps"]}, DELTA)
    more = answer(tmp_path, "calibrate --continue-from run --steps 100")
    assert more["epsilon"] == pytest.approx(epsilon({ONE: 300}, DELTA), rel=1e-6)
    write(tmp_path / "two" / "a", steps=1)
    broken = write(tmp_path / "two" / "b", steps=1) / "ledger.jsonl"
    broken.write_bytes(broken.read_bytes()[:-3])
    for words, message in {
        "run --epsilon 0.5": "is out of reach: with steps=1 it is",
        "run": "missing: ",
        "run --epsilon 3 --sampling fixed": "has sampling poisson, not fixed_size",
        "two --epsilon 1": "holds 2 ledgers: name one run",
        "two/b --epsilon 3": "only a lower bound",
    }.items():
        assert message in refused(tmp_path, f"calibrate --continue-from {words}")


def test_a_membership_risk_as_the_budget(tmp_path: Path) -> None:
    facts = answer(tmp_path, "calibrate --sample-rate 0.01 --steps 500 --advantage 0.1")
    assert facts["solved_for"] == "noise_multiplier"
    assert 0.0999 <= facts["membership"]["advantage"] <= 0.1
    write(tmp_path / "run", delta=1e-6)
    facts = answer(tmp_path, "calibrate --continue-from run --tpr 0.1@0.01")
    assert facts["solved_for"] == "steps"
    assert facts["delta"] == 1e-6
    assert 0.099 < facts["membership"]["true_positive_rates"]["0.01"] <= 0.1


def test_wrong_words(tmp_path: Path) -> None:
    for words, message in {
        "--advantage 1.5": "advantage must lie strictly between 0 and 1, not 1.5",
        "--advantage 0.1 --epsilon 1": "give epsilon=1 or advantage=0.1, not both",
        "--advantage 0.1 --tpr 0.05@0.01": "give --advantage or --tpr, not both",
        "--tpr 0.01@0.05": "the true positive rate must lie strictly between the false positive rate",
        "--tpr 0.05": "--tpr must be a true positive rate at a false positive rate, TPR@FPR",
        "--epochs 5": "--steps or --epochs, not both",
        "--epsilon 1": "none is missing",
        "--accountant rdp-analytical": "does not cover 'poisson' sampling",
        "--sampling fixed": "need the population",
        "--sampling shuffled": "cannot calibrate shuffled_epochs batches",
        "--noise-multiplier -1": "noise_multiplier must be a number from 1e-12",
        "--sample-rate 2": "sample_rate must be a number from 1e-12 to 1, not 2",
        "--microbatch-size -3": "microbatch_size must be at least 1",
    }.items():
        assert message in refused(tmp_path, f"{without()} {words}")
    for words, message in {
        "--batch-size 5": "--batch-size requires --population",
        "--batch-size 50 --population 5": "--batch-size must lie between 1",
        "--sampling fixed --population 1000 --batch-size 2.7": "a whole number of records, not 2.7",
    }.items():
        assert message in refused(tmp_path, f"{without('--sample-rate')} {words}")


def test_noise_to_type(tmp_path: Path) -> None:
    """Where neighbors move a clipped sum by two bounds, strategy.noise_multiplier is twice noise over sensitivity."""
    assert answer(tmp_path, without())["noise_std_over_max_grad_norm"] == 1.1
    assert answer(tmp_path, f"{without()} --microbatch-size 8")["noise_std_over_max_grad_norm"] == 2.2
    assert "strategy.noise_multiplier" in said(tmp_path, f"{without()} --microbatch-size 8")
