"""`dpbench account` and `dpbench calibrate` on ledgers written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dpbench.cli import main
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.ledger import Header, Release, read_ledger
from dpbench.privacy.accounting.tradeoff import trade_off
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, Sampling, ShuffledEpochs
from tests.support.finished_runs import finished

DELTA = 1e-5
POISSON = PoissonSampling(1000, 0.02)
FIXED = FixedSizeSampling(1000, 20)


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


def answer(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> dict[str, object]:
    assert main([*map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of an error."""
    assert main([*map(str, words)]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("dpbench: error: ")
    return err


# ----------------------------------------------------------------------------------------------------- account


def test_one_run_by_every_accountant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run")
    facts = answer(capsys, "account", run, "--accountant", "all")
    events = {Event(POISSON, (SumQuery("a", 1.0, 1.0),)): 50}
    for name, accountant in ACCOUNTANTS.items():
        if "poisson" in accountant.samplings:
            assert facts["epsilons"][name] == pytest.approx(epsilon(events, DELTA, name), rel=1e-6)
        else:
            assert "does not cover poisson sampling" in facts["epsilons"][name]
    assert facts["epsilon"] == facts["epsilons"]["rdp"]
    assert facts["guarantee"] is False  # gdp is among them
    assert {name for name, basis in facts["bases"].items() if basis["guarantee"]} == set(ACCOUNTANTS) - {
        "gdp",
        "rdp-analytical",
    }
    assert answer(capsys, "account", run, "--accountant", "rdp,pld")["guarantee"] is True
    assert answer(capsys, "account", run, "--accountant", "gdp")["guarantee"] is False
    main(["account", str(run), "--accountant", "all"])
    assert "an approximation, no bound" in capsys.readouterr().out


def test_a_mismatch_is_refused_or_nominal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", sampling=FIXED)
    assert "pld does not cover fixed_size sampling: --nominal" in refused(capsys, "account", run, "--accountant", "pld")
    facts = answer(capsys, "account", run, "--accountant", "pld", "--nominal")
    assert facts["guarantee"] is False
    assert facts["epsilon"] == pytest.approx(epsilon({Event(POISSON, (SumQuery("a", 0.5, 1.0),)): 50}, DELTA, "pld"))
    main(["account", str(run), "--accountant", "pld", "--nominal"])
    assert "nominal: computed for poisson sampling" in capsys.readouterr().out
    shuffled = write(tmp_path / "shuffled", sampling=ShuffledEpochs(1000, 20), relation="add_or_remove_one")
    assert "does not cover shuffled_epochs sampling" in refused(capsys, "account", shuffled)
    assert answer(capsys, "account", shuffled, "--nominal")["guarantee"] is False


def test_membership_inference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the releases allow a membership test, of all runs together; a looser bound where PLD does not cover them."""
    run = write(tmp_path / "run")
    facts = answer(capsys, "account", run)["membership"]
    curve = trade_off({Event(POISSON, (SumQuery("a", 1.0, 1.0),)): 50})
    assert facts["advantage"] == pytest.approx(curve.advantage, rel=1e-6)
    for false_positive_rate, rate in facts["true_positive_rates"].items():
        bound = curve.max_true_positive_rate(float(false_positive_rate))
        assert rate == pytest.approx(float(bound), rel=1e-6)
    assert main(["account", str(run)]) == 0
    out = capsys.readouterr().out
    assert "membership inference       an attacker with a false positive rate of 1 % identifies at most " in out
    assert "loose" not in out
    again = write(tmp_path / "again", steps=50)
    both = answer(capsys, "account", run, again)["membership"]
    twice = trade_off({Event(POISSON, (SumQuery("a", 1.0, 1.0),)): 100})
    assert both["advantage"] == pytest.approx(twice.advantage, rel=1e-6)
    assert answer(capsys, "account", run, "--population", 10**6)["membership"]["nominal"] is True
    fixed = write(tmp_path / "fixed", sampling=FIXED)
    assert answer(capsys, "account", fixed)["membership"]["accountant"] == "rdp"
    main(["account", str(fixed)])
    assert "; a loose bound, by RDP)" in capsys.readouterr().out
    shuffled = write(tmp_path / "shuffled", sampling=ShuffledEpochs(1000, 20), relation="add_or_remove_one")
    main(["account", str(shuffled), "--nominal"])
    assert "; nominal)" in capsys.readouterr().out


def test_several_runs_compose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps in (("a", 50), ("b", 30), ("c/deep", 20)):
        write(tmp_path / "sweep" / name, steps)
    facts = answer(capsys, "account", tmp_path / "sweep", "--accountant", "rdp,pld")
    assert [run["steps"] for run in facts["runs"]] == [50, 30, 20]
    together = {Event(POISSON, (SumQuery("a", 1.0, 1.0),)): 100}
    for name in ("rdp", "pld"):
        assert facts["epsilons"][name] == pytest.approx(epsilon(together, DELTA, name), rel=1e-6)
    assert facts["charged_by"] == "composition"
    named = answer(capsys, "account", *(tmp_path / "sweep" / name for name in ("a", "b", "c/deep")))
    assert named["epsilon"] == pytest.approx(facts["epsilon"])
    (tmp_path / "sweep" / "none").mkdir()
    (tmp_path / "sweep" / "none" / "result.json").write_text("{}")
    facts = answer(capsys, "account", tmp_path / "sweep", "--selection", "geometric", "--mean-trials", 3)
    assert facts["without_privacy"] == [str(tmp_path / "sweep" / "none")]
    assert facts["epsilon"] is facts["selection"]["epsilons"]["rdp"] is None  # infinite
    main(["account", str(tmp_path / "sweep")])
    out = capsys.readouterr().out
    assert "all 4 published (composition) | 100 | – | inf |" in out
    assert "A run that trained without privacy has no epsilon" in out
    assert "named twice" in refused(capsys, "account", tmp_path / "sweep", tmp_path / "sweep" / "a")


def test_nothing_below_a_folder_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Links are followed, once and in no circle; so are runs below a run, but not copies of its ledger."""
    write(tmp_path / "sweep" / "a", 10)
    write(tmp_path / "disk" / "b", 20)
    (tmp_path / "sweep" / "b").symlink_to(tmp_path / "disk" / "b")
    (tmp_path / "sweep" / "b too").symlink_to(tmp_path / "disk" / "b")
    (tmp_path / "disk" / "b" / "circle").symlink_to(tmp_path / "sweep")
    assert answer(capsys, "account", tmp_path / "sweep")["steps"] == 30
    run = write(tmp_path / "run", 5)
    write(run / "again", 7)
    (run / "exported").mkdir()
    (run / "exported" / "ledger.jsonl").write_bytes((run / "ledger.jsonl").read_bytes())
    assert answer(capsys, "account", run)["steps"] == 12


def test_a_run_that_was_stopped_before_it_began_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has an empty folder for checkpoints, and is not one that trained without privacy."""
    write(tmp_path / "sweep" / "a", 10)
    (tmp_path / "sweep" / "b" / "checkpoints").mkdir(parents=True)
    assert answer(capsys, "account", tmp_path / "sweep")["steps"] == 10
    (tmp_path / "sweep" / "b" / "checkpoints" / "last.ckpt").write_bytes(b"trained")
    assert answer(capsys, "account", tmp_path / "sweep")["epsilon"] is None


def test_selection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abcdefgh":
        write(tmp_path / "sweep" / name)
    words = ("account", tmp_path / "sweep", "--selection", "geometric", "--mean-trials", 8)
    facts = answer(capsys, *words)
    one = facts["runs"][0]["epsilons"]["rdp"]
    assert one < facts["selection"]["epsilons"]["rdp"] < facts["epsilon"]
    main([*map(str, words)])
    out = capsys.readouterr().out
    assert "all 8 published (composition)" in out
    assert "only the best published, 8 trials on average (negative binomial, shape 1)" in out
    assert "drawn from that distribution before anything" in out
    assert answer(capsys, *words[:-3], 0.5, "--mean-trials", 8)["selection"]["shape"] == 0.5
    assert answer(capsys, *words[:-3], "poisson", "--mean-trials", 8)["selection"]["shape"] == "poisson"
    assert "both --selection and --mean-trials" in refused(capsys, *words[:-2])
    assert "--selection must be geometric" in refused(capsys, *words[:-3], "best", "--mean-trials", 8)
    assert "mean number of trials of at least 1" in refused(capsys, *words[:-1], 0.5)
    assert "known for Rényi accountants" in refused(capsys, *words, "--accountant", "pld")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"sampling": PoissonSampling(2000, 0.02)}, "population 2000"),
        ({"unit": "user"}, "unit 'user'"),
        ({"sampling": FIXED}, "neighboring_relation 'replace_one'"),
        ({"delta": 1e-6}, "different deltas (1e-06, 1e-05): give --delta"),
    ],
)
def test_contradictory_runs_do_not_compose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, object], message: str
) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", **other)  # type: ignore[arg-type]
    assert message in refused(capsys, "account", a, b)
    if "delta" in other:
        assert answer(capsys, "account", a, b, "--delta", 1e-7)["delta"] == 1e-7


def test_a_ledger_that_contradicts_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", relation="replace_one")
    assert "contradicts itself" in refused(capsys, "account", run)
    run = write(tmp_path / "other")
    text = (run / "ledger.jsonl").read_text().replace('"population":1000,"unit"', '"population":9,"unit"')
    (run / "ledger.jsonl").write_text(text)
    assert "contradicts itself" in refused(capsys, "account", run)
    run = write(tmp_path / "third", unit="user")
    assert "users, a release poisson sampling among" in refused(capsys, "account", run)


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write(tmp_path / "empty", steps=0)
    assert "no release is recorded" in refused(capsys, "account", empty)
    (empty / "ledger.jsonl").write_text((empty / "ledger.jsonl").read_text() + '{"record": "release"\n' * 3)
    assert "line 2 is damaged" in (error := refused(capsys, "account", empty)) and "is unknown" in error
    (tmp_path / "nothing").write_text("")
    assert "it is empty" in refused(capsys, "account", tmp_path / "nothing")
    (tmp_path / "bare").mkdir()
    assert "there is no ledger.jsonl in or below" in refused(capsys, "account", tmp_path / "bare")
    (tmp_path / "bare" / "result.json").write_text("{}")
    assert "trained without privacy" in refused(capsys, "account", tmp_path / "bare")
    old = write(tmp_path / "old")
    text = (old / "ledger.jsonl").read_text()
    (old / "ledger.jsonl").write_text(text.replace('"schema":1', '"schema":7'))
    words = "written with ledger schema 7, and this version of dpbench reads schemas up to 3"
    assert words in refused(capsys, "account", old)
    run = write(tmp_path / "run")
    for delta in ("0", "1", "-1", "nan"):
        assert "delta must lie strictly between 0 and 1" in refused(capsys, "account", run, "--delta", delta)
    assert "unknown accountant 'magic'; known are rdp, pld" in refused(
        capsys, "account", run, "--accountant", "rdp,magic"
    )


def test_a_ledger_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no run without privacy, whose epsilon would be infinite, nor one that costs nothing."""
    write(tmp_path / "b")
    finished(tmp_path / "a", 0.9, 1.5)
    result = tmp_path / "a" / "result.json"
    assert "trained without privacy" in refused(capsys, "account", tmp_path / "a")
    record = json.loads(result.read_text())
    record["privacy"] |= {"delta": DELTA, "releases": 50}
    result.write_text(json.dumps(record))
    for path in (tmp_path / "a", tmp_path):
        told = refused(capsys, "account", path)
        assert "a: ledger.jsonl is missing, of which result.json tells. Restore it: epsilon cannot be computed" in told


def test_a_damaged_run_in_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a")
    broken = write(tmp_path / "b") / "ledger.jsonl"
    broken.write_bytes(broken.read_bytes()[:-30])
    assert answer(capsys, "account", tmp_path, status=3)["complete"] is False
    main(["account", str(tmp_path)])
    out, err = capsys.readouterr()
    assert "(not intact)" in out
    assert "is cut off; the epsilon of what is there is not a guarantee" in err


def test_phases_and_changing_lots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other lots and other noise in a second phase of one ledger: everything counts."""
    path = write(tmp_path / "run", steps=30) / "ledger.jsonl"
    larger = PoissonSampling(1000, 0.05)
    header = Header("example", "add_or_remove_one", 1000, DELTA, replay="other")
    writer = LedgerWriter(path, header, start=30, resume=True)
    for number in range(30, 50):
        writer.append(Release(number, larger, (SumQuery("a", 1.0, 2.0),)))
    writer.close()
    events = {Event(POISSON, (SumQuery("a", 1.0, 1.0),)): 30, Event(larger, (SumQuery("a", 1.0, 2.0),)): 20}
    facts = answer(capsys, "account", tmp_path, "--accountant", "rdp,pld,gdp,rdp-continuous")
    for name, value in facts["epsilons"].items():
        assert value == pytest.approx(epsilon(events, DELTA, name), rel=1e-6)
        assert value > epsilon({next(iter(events)): 30}, DELTA, name)


def test_several_runs_are_labeled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    words = ["account", str(tmp_path), "--accountant", "rdp,rdp-analytical,gdp", "--nominal"]
    main(words)
    out = capsys.readouterr().out
    assert "rdp-analytical: nominal: computed for fixed_size sampling" in out
    assert "gdp: an approximation, no bound" in out
    bases = answer(capsys, *words)["bases"]
    assert bases["rdp-analytical"] == {"guarantee": False, "nominal": True, "neighbouring_relation": "replace_one"}
    assert bases["rdp"] == {"guarantee": True, "nominal": False, "neighbouring_relation": "add_or_remove_one"}


@pytest.mark.long
def test_many_distinct_costs_are_said_to_be_rounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = Header("example", "add_or_remove_one", 1000, DELTA)
    writer = LedgerWriter(tmp_path / "run" / "ledger.jsonl", header)
    for number in range(150):
        writer.append(Release(number, POISSON, (SumQuery("a", 1.0, 1.0 + 0.01 * number),)))
    writer.close()
    main(["account", str(tmp_path / "run")])
    assert "150 distinct costs, rounded to the costly side" in capsys.readouterr().out


@pytest.mark.long
def test_twenty_thousand_adaptive_releases_are_one_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten groups whose bounds all change: equal costs are counted together (so that accountants need moments)."""
    rng = np.random.default_rng(0)
    writer = LedgerWriter(tmp_path / "ledger.jsonl", Header("example", "add_or_remove_one", 1000, DELTA))
    for number in range(20_000):
        bounds = rng.lognormal(0, 1, 10)
        std = 4.0 * math.sqrt(float((bounds**2).sum()))
        queries = tuple(SumQuery(str(group), float(bound), std) for group, bound in enumerate(bounds))
        writer.append(Release(number, POISSON, queries))
    writer.close()
    assert len(read_ledger(tmp_path / "ledger.jsonl").events) == 1
    facts = answer(capsys, "account", tmp_path, "--accountant", "rdp,pld")
    same = {Event(POISSON, (SumQuery("a", 1.0, 4.0),)): 20_000}
    for name in ("rdp", "pld"):
        assert facts["epsilons"][name] == pytest.approx(epsilon(same, DELTA, name), rel=1e-6)


# --------------------------------------------------------------------------------------------------- calibrate

KNOWN = {
    "--noise-multiplier": 1.1,
    "--sample-rate": 0.0042667,
    "--steps": 14_062,
    "--delta": 1e-5,
}


def test_the_issues_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for pair in KNOWN.items() for word in pair]
    facts = answer(capsys, "calibrate", *words, "--accountant", "rdp-classic")
    assert facts["epsilon"] == pytest.approx(3.0091, abs=1e-4)
    assert facts["solved_for"] == "epsilon"
    assert facts["accountant"] == "rdp-classic"


@pytest.mark.parametrize("flag", KNOWN)
@pytest.mark.parametrize("name", ["rdp", "rdp-classic", "rdp-continuous", "gdp"])
def test_each_flag_can_be_left_out(capsys: pytest.CaptureFixture[str], flag: str, name: str) -> None:
    whole = [word for pair in KNOWN.items() for word in pair]
    target = answer(capsys, "calibrate", *whole, "--accountant", name)["epsilon"]
    words = [word for other, value in KNOWN.items() if other != flag for word in (other, value)]
    facts = answer(capsys, "calibrate", *words, "--epsilon", target, "--accountant", name)
    key = flag.removeprefix("--").replace("-", "_")
    assert facts[key] == pytest.approx(KNOWN[flag], rel=1e-3)
    assert facts["solved_for"] == key


@pytest.mark.slow
def test_batches_epochs_and_fixed_lots(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("calibrate", "--population", 60_000, "--delta", 1e-5, "--epochs", 60)
    facts = answer(capsys, *base, "--batch-size", 256, "--noise-multiplier", 1.1)
    assert (facts["steps"], facts["batch_size"]) == (14_040, 256)
    fixed = ("calibrate", "--sampling", "fixed", "--population", 10**6, "--delta", 10**-6.6, "--steps", 1500)
    facts = answer(capsys, *fixed, "--noise-multiplier", 1.396, "--batch-size", 13_958)
    assert facts["epsilon"] == pytest.approx(5.0, rel=0.01)
    assert facts["neighbouring_relation"] == "replace_one"
    assert facts["noise_std_over_max_grad_norm"] == pytest.approx(2 * 1.396)
    facts = answer(capsys, *fixed, "--noise-multiplier", 1.396, "--epsilon", facts["epsilon"])
    assert facts["batch_size"] == 13_958


def test_calibrate_warns_as_a_training_does(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["calibrate", "--population", "1000", "--batch-size", "50", "--steps", "100"]
    assert main([*base, "--epsilon", "3", "--delta", "1e-2"]) == 0
    assert "delta=0.01 is not below 1/1000 (the number of records)" in capsys.readouterr().err
    assert main([*base, "--noise-multiplier", "0.001", "--delta", "1e-5"]) == 0
    assert "a noise multiplier of 0.001 protects no record" in capsys.readouterr().err
    assert main([*base, "--noise-multiplier", "1", "--delta", "1e-5"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.long
def test_pld_above_an_epsilon_of_100(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", z=0.3, sampling=PoissonSampling(1000, 0.2))
    facts = answer(capsys, "account", run, "--accountant", "rdp,pld")
    assert 100 < facts["epsilons"]["pld"] < facts["epsilons"]["rdp"]
    words = ["--delta", DELTA, "--sample-rate", 0.2, "--steps", 50, "--accountant", "pld", "--epsilon"]
    target = facts["epsilons"]["pld"]
    solution = answer(capsys, "calibrate", *words, target)
    assert target * (1 - 1e-4) < solution["epsilon_reached"] <= target
    assert solution["noise_multiplier"] == pytest.approx(0.3, rel=1e-4)


def test_going_on_with_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", steps=200)
    spent = answer(capsys, "account", run)["epsilon"]
    facts = answer(capsys, "calibrate", "--continue-from", run, "--epsilon", 3)
    assert facts["steps_before"] == 200
    event = Event(POISSON, (SumQuery("a", 1.0, 1.0),))
    assert epsilon({event: 200 + facts["steps"]}, DELTA) <= 3 < epsilon({event: 201 + facts["steps"]}, DELTA)
    more = answer(capsys, "calibrate", "--continue-from", run, "--steps", 100)
    assert more["epsilon"] == pytest.approx(epsilon({event: 300}, DELTA), rel=1e-6)
    assert "is out of reach: with steps=1 it is" in refused(
        capsys, "calibrate", "--continue-from", run, "--epsilon", spent / 2
    )
    assert "missing are" in refused(capsys, "calibrate", "--continue-from", run)
    other = ("calibrate", "--continue-from", run, "--epsilon", 3)
    assert "has sampling poisson, not fixed_size" in refused(capsys, *other, "--sampling", "fixed")
    write(tmp_path / "second")
    assert "holds 2 ledgers: name one run" in refused(capsys, "calibrate", "--continue-from", tmp_path, "--epsilon", 1)
    broken = run / "ledger.jsonl"
    broken.write_bytes(broken.read_bytes()[:-3])
    assert "known only from below" in refused(capsys, "calibrate", "--continue-from", run, "--epsilon", 3)


def test_a_membership_risk_as_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = answer(capsys, "calibrate", "--sample-rate", 0.01, "--steps", 500, "--advantage", 0.1)
    assert facts["solved_for"] == "noise_multiplier"
    assert facts["membership"]["advantage"] == pytest.approx(0.1, rel=1e-3)
    assert facts["membership"]["advantage"] <= 0.1
    run = write(tmp_path / "run", delta=1e-6)
    facts = answer(capsys, "calibrate", "--continue-from", run, "--tpr", "0.1@0.01")
    assert facts["solved_for"] == "steps"
    assert facts["delta"] == 1e-6
    assert 0.099 < facts["membership"]["true_positive_rates"]["0.01"] <= 0.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--advantage", "1.5"], "advantage must lie strictly between 0 and 1, not 1.5"),
        (["--advantage", "0.1", "--epsilon", "1"], "give epsilon=1 or advantage=0.1, not both"),
        (["--advantage", "0.1", "--tpr", "0.05@0.01"], "give --advantage or --tpr, not both"),
        (["--tpr", "0.01@0.05"], "the true positive rate must lie strictly between the false positive rate"),
        (["--tpr", "0.05"], "--tpr must be a true positive rate at a false positive rate, TPR@FPR"),
        (["--delta", "2"], "delta must lie strictly between 0 and 1, not 2.0"),
        (["--batch-size", "5"], "--sample-rate or --batch-size, not both"),
        (["--epochs", "5"], "--steps or --epochs, not both"),
        (["--epsilon", "1"], "nothing is missing"),
        (["--accountant", "magic"], "unknown accountant 'magic'"),
        (["--accountant", "rdp-analytical"], "does not cover 'poisson' sampling"),
        (["--sampling", "fixed"], "need the population"),
        (["--sampling", "magic"], "unknown sampling 'magic'"),
        (["--sampling", "shuffled"], "shuffled_epochs batches cannot be solved for"),
        (["--noise-multiplier", "-1"], "noise_multiplier must be a number from 1e-12"),
        (["--sample-rate", "2"], "sample_rate must be a number from 1e-12 to 1, not 2"),
        (["--steps", "0"], "steps must be a number from 1 to 1e+09, not 0"),
    ],
)
def test_wrong_words(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    known = {flag: str(value) for flag, value in KNOWN.items()}
    if words[0] in known:
        known[words[0]] = words[1]
        words = []
    assert message in refused(capsys, "calibrate", *(word for pair in known.items() for word in pair), *words)


def test_noise_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    """Where neighbors move a clipped sum by two bounds, strategy.noise_multiplier is twice noise over sensitivity."""
    words = [word for pair in KNOWN.items() for word in pair]
    assert answer(capsys, "calibrate", *words)["noise_std_over_max_grad_norm"] == 1.1
    facts = answer(capsys, "calibrate", *words, "--microbatch-size", 8)
    assert facts["noise_std_over_max_grad_norm"] == 2.2
    main(["calibrate", *map(str, words), "--microbatch-size", "8"])
    assert "strategy.noise_multiplier" in capsys.readouterr().out
    assert "microbatch_size must be at least 1" in refused(capsys, "calibrate", *words, "--microbatch-size", -3)


def test_fixed_lots_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "calibrate",
        "--sampling",
        "fixed",
        "--population",
        1000,
        "--noise-multiplier",
        1,
        "--steps",
        9,
        "--delta",
        1e-5,
    )
    assert "a whole number of records, not 2.7" in refused(capsys, *words, "--batch-size", 2.7)
    assert "a whole number of records, not 0.01" in refused(capsys, *words, "--sample-rate", 1e-5)


def test_a_batch_without_a_population(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("calibrate", "--noise-multiplier", 1, "--steps", 10, "--delta", 1e-5)
    assert "--batch-size requires --population" in refused(capsys, *words, "--batch-size", 5)
    assert "--batch-size must lie between 1" in refused(capsys, *words, "--batch-size", 50, "--population", 5)


def test_the_first_releases_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As if the run had ended there."""
    run, short = write(tmp_path / "run"), write(tmp_path / "short", steps=20)
    some = answer(capsys, "account", run, "--releases", 20)
    whole = answer(capsys, "account", run)
    assert some == answer(capsys, "account", short)
    assert some["steps"] == 20 and some["epsilon"] < whole["epsilon"]  # type: ignore[operator]
    assert answer(capsys, "account", run, "--releases", 50) == whole
    assert "short has 20; give that number or a smaller one" in refused(capsys, "account", run, short, "--releases", 30)
    for wrong in (0, -3):
        assert "must be a number of releases from 1 on" in refused(capsys, "account", run, f"--releases={wrong}")
