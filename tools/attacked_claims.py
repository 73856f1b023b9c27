"""results/attack/claims: what the papers say of memorization, beside attacks on membership (`make claims-attacked`).

`python -m tools.attacked_claims` attacks the runs below attacks/claims; the page is made from what it writes.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from dpbench.attack.attack import FEWEST_RUNS, AttackedSetting, attack_runs
from dpbench.data.images import ImageDataModule
from dpbench.data.user_module import UserDataModule
from dpbench.errors import ConfigurationError
from dpbench.files import write_json
from dpbench.reports.markdown import markdown_rows
from dpbench.runs.folder import RunFolder
from dpbench.runs.numbers import ABSENT, epsilon_text
from dpbench.synthesis.memorization import memorization
from dpbench.synthesis.sample import load_gan, make

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / "attack" / "claims"
FACTS = "claims.json"
SWEEPS = {
    "noise": ("noise", "noise-dpsgd", "noise-vector_groups", "noise-discretized"),
    "users": ("users", "users-dpsgd"),
    "gan": ("gan", "gan-dpsgd"),
}
"""Folders of sweeps below attacks/claims, by what is attacked in them."""
_SIGNALS = {"gan": ("loss", "samples")}
_SAMPLES = 2000  # images of a generator whose nearest neighbors are looked for
_PATTERN = 14  # side of the pattern in the upper left corner
_RATE = "0.01"  # false positive rate of the tables

_PAGE = """# The papers' claims on memorization, attacked

Written by `make claims-attacked`: small runs of seconds each, in which every record (or user) is a member with
probability 1/2; threshold, LiRA and RMIA by the loss ([how](../../../docs/attack.md)), and of these the one with
the largest area under its curve (in two digits, then by its rate). Intervals: 95 %, runs and records resampled.
*Allowed*: what the whole ledger lets any attacker reach. *Audited ε*: the lower bound of the guesses of LiRA; with
the large δ of these runs (δ times the number of candidates is up to 0.5)
it shows 0 even where nearly all guesses are right.
A small network, one data set and few shadow models: a weak attack here is no proof of privacy anywhere.

| paper | says of memorization or membership | under attack |
| --- | --- | --- |
{overview}

## Three tools (2018): random noise

> Even with a large privacy spending, DP effectively prevents memorization of random noise, while being capable of
> learning on real data, with a small reduction in performance. (section 2.1)

> … if the model is able to learn a randomly labeled task, the privacy parameters are insufficiently strict. (the sanity
> check of section 2.1)

{noise_candidates:,} candidates: images of noise with random labels, a perceptron 784-128-10,
300 batches of 128 candidates. Each layer is clipped at 2, as in the paper; the paper's σ = 0.7225 for each
layer is z = 0.5109 for both. *Labels recalled* is the paper's measure, the accuracy on the members, 10 % by chance.

```
{noise_command}
```

{noise_table}

{noise_verdict}

At the paper's size (50,000 images, each in a batch with probability 0.0026 instead of 0.128) the same noise gives
another ε: [figure 1](../../three_tools_figure1/README.md) is that run by the paper's measure; it was not attacked.
{users_section}{compression_section}{general_section}{gan_section}
## Adaptive clipping (2021)

> When the training data potentially contains privacy-sensitive user information, it becomes imperative to use learning
> techniques that limit such memorization. […] Intuitively, DP prevents an adversary from confidently making any
> conclusions about whether some user's data was used in training a model. (section 1)

A motivation, and no claim of its own: the paper measures accuracy. Its strategy is attacked on digits in
[the comparison of strategies](../README.md).
"""

_USERS = """
## Three tools (2018): a pattern of one user

> As expected, in the centralized setting, we are able to learn the pattern without differential privacy but not with
> differential privacy. (section 2.1)

{candidates:,} candidate users of ten images of noise each; one user's images have the
pattern. 60 rounds of 100 candidate users, DP-FedAvg as in [figure 2](../../three_tools_figure2/README.md). *Pattern
called 1* is the paper's measure, the share of fresh images with the pattern that are given its label: it is also a
membership test of that one user, and so it is shown for runs with and without that user.

```
{command}
```

{table}

{verdict}
"""

_COMPRESSION = """
## Gradient compression (2020)

> We use gradient compression to minimize privacy leakage and improve the accuracy of differentially private models.
> (abstract)

> We suggest creating a sketch from gradient (a compressed version) which contains the general information about the
> training data but not the detailed information. (section 1)

The last rows of the noise table above: τ = 0.001, C = 2.828 for all layers together, without error correction.
{verdict}
"""

_GENERAL = """
## A general approach (2018)

> … *example-level* privacy […], in which an adversary cannot tell with high confidence from the learned model
> parameters whether a given example was present in the training set. (appendix A)

That is what the definition says, and no measurement. {verdict}
"""

_GAN = """
## PyVacy (2019): generated digits

No claim on memorization, copies or attacks. Section 5.2 says why the generator costs nothing:

> … it is only exposed to noise and the predictions of the discriminator, which remain private via post-processing.

The first {candidates:,} digits of scikit-learn, 300 batches of 64 candidates, the
convolutional networks of `experiment=digits_gan` instead of the paper's. Attacked are the discriminator (its logit) and
the synthetic images (distance to the nearest of 5,000); *unusually close* is the share of 2,000 images that lie as
close to a member as only 1 % of test images do ([how](../../../docs/gan.md)).

```
{command}
```

{table}

{verdict}
"""


# From runs


def collect(runs: Path, out: Path) -> None:
    """Attack the runs that there are, and write claims.json.

    Args:
        runs: attacks/claims.
        out: Folder of results.

    Raises:
        ConfigurationError: There are no runs, so that what is there would be lost.
    """
    if not runs.is_dir():
        raise ConfigurationError(f"{runs} holds no runs: make claims-attacked trains them.")
    facts: dict[str, list[dict[str, Any]]] = {}
    for family, sweeps in SWEEPS.items():
        there = [runs / name for name in sweeps if _finished(runs / name) >= FEWEST_RUNS]
        if not there:
            continue
        settings = attack_runs(there, _SIGNALS.get(family, ("loss",)))
        facts[family] = [{**setting.summary.to_dict(), **_about(setting)} for setting in settings]
    write_json(out / FACTS, facts)


def _finished(sweep: Path) -> int:
    return len(list(sweep.glob("*/result.json")))


def _about(setting: AttackedSetting) -> dict[str, Any]:
    """What the papers measure of a setting: means of metrics, and what the pattern or the generator shows."""
    first = setting.rows[0].record
    strategy = first["config"]["strategy"]
    privacy = first["privacy"]
    about: dict[str, Any] = {
        "strategy": strategy["_target_"].rpartition(".")[2],
        "noise_multiplier": privacy.get("noise_multiplier"),
        "command": _command(setting),
        "metrics": {
            name: float(np.mean([row.metrics[name] for row in setting.rows]))
            for name, value in setting.rows[0].metrics.items()
            if value is not None and not name.startswith("privacy/")
        },
    }
    data = setting.candidates.data
    if isinstance(data, UserDataModule):
        about["pattern"] = _pattern(setting, data)
    if setting.summary.attacks[-1].signal == "samples":
        assert isinstance(data, ImageDataModule)
        about["unusually_close"] = _unusually_close(setting, data)
    return about


def _command(setting: AttackedSetting) -> str:
    """The command line of one setting; the attack itself decides seeds, members and folders."""
    folder = setting.rows[0].folder
    assert folder is not None
    words = yaml.safe_load((folder.hydra / "overrides.yaml").read_text(encoding="utf-8"))
    kept = [word for word in words if not word.startswith(("seed=", "data.membership=", "logger="))]
    return shlex.join(["dpbench", "attack", "--train", str(len(setting.rows)), *kept])


def _pattern(setting: AttackedSetting, data: UserDataModule) -> dict[str, Any]:
    """Test accuracies (share of fresh patterns called 1) of runs with and without the user who has the pattern."""
    rows = torch.cat([images[:, 0] for images, _ in data.candidate_dataloader()])
    marked = rows[:, :_PATTERN, :_PATTERN].flatten(1).std(dim=1) == 0
    (user,) = np.unique(data.record_of_row[marked.numpy()])
    members = setting.members[:, user]
    accuracy = np.array([row.metrics["test/accuracy"] for row in setting.rows])
    scores = setting.scores[:, user]
    return {
        "user": int(user),
        "accuracy_of_members": accuracy[members].tolist(),
        "accuracy_of_others": accuracy[~members].tolist(),
        "scores_of_members": scores[members].tolist(),
        "scores_of_others": scores[~members].tolist(),
    }


def _unusually_close(setting: AttackedSetting, data: ImageDataModule) -> dict[str, float]:
    """Mean over the runs of what `dpbench evaluate` says of nearest neighbors, against the members of each run."""
    train = _unit(data.train_set.pixels)
    test = _unit(data.test_set.pixels)
    shares = []
    suspected = 0
    for row, members in zip(setting.rows, setting.members, strict=True):
        assert isinstance(row.folder, RunFolder)
        images, _ = make(load_gan(row.folder).module, _SAMPLES, seed=0)
        figures = memorization(images.float() / 255, train[torch.from_numpy(members)], test)
        shares.append(float(figures["unusually_close"]))
        suspected += bool(figures["memorization_suspected"])
    return {"share": float(np.mean(shares)), "suspected": suspected}


def _unit(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels.permute(0, 3, 1, 2).contiguous() + 1) / 2


# The page


def page() -> str:
    """The text of results/attack/claims/README.md."""
    facts: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / FACTS).read_text(encoding="utf-8"))
    return page_of(facts)


def page_of(facts: dict[str, list[dict[str, Any]]]) -> str:
    """The page of some facts; families and strategies that were not attacked have no section.

    Args:
        facts: As `collect` writes them.
    """
    noise = facts["noise"]
    by_strategy = {setting["strategy"]: [s for s in noise if s["strategy"] == setting["strategy"]] for setting in noise}
    sections = {"users_section": "", "compression_section": "", "general_section": "", "gan_section": ""}
    verdicts = {
        "three_tools, noise": _noise_verdict(by_strategy),
        "three_tools, user": "not attacked",
        "general_approach": "not attacked",
        "pyvacy": "not attacked",
        "gradient_compression": "not attacked",
    }
    if "users" in facts:
        verdicts["three_tools, user"] = _users_verdict(facts["users"])
        sections["users_section"] = _USERS.format(
            **_size(facts["users"]),
            table=_users_table(facts["users"]),
            verdict=verdicts["three_tools, user"],
        )
    if "DiscretizedDPSGD" in by_strategy:
        verdicts["gradient_compression"] = _compression_verdict(by_strategy)
        sections["compression_section"] = _COMPRESSION.format(verdict=verdicts["gradient_compression"])
    if "VectorGroups" in by_strategy:
        verdicts["general_approach"] = _general_verdict(by_strategy)
        sections["general_section"] = _GENERAL.format(verdict=verdicts["general_approach"])
    if "gan" in facts:
        verdicts["pyvacy"] = _gan_verdict(facts["gan"])
        sections["gan_section"] = _GAN.format(
            **_size(facts["gan"]),
            table=_gan_table(facts["gan"]),
            verdict=verdicts["pyvacy"],
        )
    size = _size(noise)
    return _PAGE.format(
        overview=_overview(verdicts),
        noise_candidates=size["candidates"],
        noise_command=_of_strategy(by_strategy, "DPSGD")[0]["command"],
        noise_table=_noise_table(noise),
        noise_verdict=verdicts["three_tools, noise"],
        **sections,
    )


def _size(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = settings[0]
    return {"candidates": first["candidates"], "command": settings[-1]["command"]}


def _overview(verdicts: dict[str, str]) -> str:
    claims = {
        "three_tools, noise": ("three_tools_2018, 2.1", "DP-SGD does not memorize random noise"),
        "three_tools, user": ("three_tools_2018, 2.1", "a pattern of one user is not learned with DP-FedAvg"),
        "general_approach": ("general_approach_2018, A", "none of its own: what the definition says"),
        "pyvacy": ("pyvacy_2019", "none"),
        "gradient_compression": ("gradient_compression_denoising_2020, 1", "compression minimizes leakage"),
    }
    rows = [f"| {paper} | {claim} | {verdicts[key]} |" for key, (paper, claim) in claims.items()]
    rows.append("| adaptive_quantile_clipping_2021, 1 | none of its own: DP limits memorization | not attacked here |")
    return "\n".join(rows)


def _name(setting: dict[str, Any]) -> str:
    if setting["delta"] is None:
        return "SGD, without privacy"
    return f"{setting['strategy']}, z = {setting['noise_multiplier']:.4g}"


def _by_noise(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without privacy first, then strategy by strategy, least noise first."""
    return sorted(settings, key=lambda s: (s["delta"] is not None, s["strategy"], s["noise_multiplier"] or 0))


def _best(setting: dict[str, Any], signal: str = "loss") -> dict[str, Any]:
    attacks = [attack for attack in setting["attacks"] if attack["signal"] == signal]
    # RMIA's scores have ties, so that of equal areas one may have no threshold at the rate of the tables.
    best: dict[str, Any] = max(
        attacks, key=lambda attack: (round(attack["auc"]["value"], 2), attack["tpr"][_RATE]["value"])
    )
    return best


def _attacked(setting: dict[str, Any], signal: str = "loss") -> list[str]:
    """Cells: attack, AUC, TPR."""
    best = _best(setting, signal)
    auc = best["auc"]
    tpr = best["tpr"][_RATE]
    return [
        best["name"],
        f"{auc['value']:.3f} ({auc['low']:.3f} to {auc['high']:.3f})",
        f"{100 * tpr['value']:.2f} % ({100 * tpr['low']:.2f} to {100 * tpr['high']:.2f})",
    ]


def _claimed(setting: dict[str, Any]) -> list[str]:
    """Cells: what the ledger allows, audited and claimed ε, verdict."""
    if setting["delta"] is None:
        return [ABSENT, ABSENT, "∞", ABSENT]
    accountant = "rdp" if setting["epsilon"]["pld"] is None else "pld"
    return [
        f"≤ {100 * setting['allowed']['tpr'][_RATE]:.3g} %",
        f"{setting['audited']:.2f}",
        f"{epsilon_text(setting['epsilon'][accountant])} ({accountant.upper()}), δ = {setting['delta']:g}",
        setting["verdict"],
    ]


_ATTACKED = ["attack", "AUC", "TPR at FPR 1 %"]
_CLAIMED = ["allowed", "audited ε", "claimed ε", "verdict"]


def _noise_table(settings: Sequence[dict[str, Any]]) -> str:
    rows = [["setting", "runs", "labels recalled", *_ATTACKED, *_CLAIMED]]
    for setting in _by_noise(settings):
        recalled = f"{100 * _recalled(setting):.1f} %"
        rows.append([_name(setting), str(len(setting["runs"])), recalled, *_attacked(setting), *_claimed(setting)])
    return markdown_rows(rows)


def _users_table(settings: Sequence[dict[str, Any]]) -> str:
    rows = [["setting", "runs", "pattern called 1, with that user (n)", "without (n)", *_ATTACKED, *_CLAIMED]]
    for setting in _by_noise(settings):
        pattern = [_mean_text(setting["pattern"][f"accuracy_of_{kind}"]) for kind in ("members", "others")]
        rows.append([_name(setting), str(len(setting["runs"])), *pattern, *_attacked(setting), *_claimed(setting)])
    return markdown_rows(rows)


def _gan_table(settings: Sequence[dict[str, Any]]) -> str:
    rows = [["setting", "runs", "seen", "unusually close", *_ATTACKED, *_CLAIMED]]
    for setting in _by_noise(settings):
        close = setting["unusually_close"]
        share = f"{100 * close['share']:.2f} % (suspected in {close['suspected']} runs)"
        rows.append(
            [
                _name(setting),
                str(len(setting["runs"])),
                "discriminator",
                ABSENT,
                *_attacked(setting),
                *_claimed(setting),
            ]
        )
        claimed = [ABSENT if place == 1 else cell for place, cell in enumerate(_claimed(setting))]
        rows.append(
            [
                _name(setting),
                str(len(setting["runs"])),
                "synthetic images",
                share,
                *_attacked(setting, "samples"),
                *claimed,
            ]
        )
    return markdown_rows(rows)


def _mean_text(shares: Sequence[float]) -> str:
    if not shares:
        return ABSENT
    return f"{100 * float(np.mean(shares)):.1f} % ({len(shares)})"


def _recalled(setting: dict[str, Any]) -> float:
    return float(setting["metrics"]["nonprivate/train_accuracy"])


def _of_strategy(by_strategy: dict[str, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    """Settings of a strategy, least noise first."""
    return sorted(by_strategy[name], key=lambda setting: setting["noise_multiplier"] or 0)


def _auc(setting: dict[str, Any], signal: str = "loss") -> str:
    return f"{_best(setting, signal)['auc']['value']:.2f}"


def _noise_verdict(by_strategy: dict[str, list[dict[str, Any]]]) -> str:
    private = _of_strategy(by_strategy, "DPSGD")
    papers = private[0]
    most = private[-1]
    return (
        f"Not at this size: at the paper's σ {100 * _recalled(papers):.0f} % of the labels are recalled (AUC "
        f"{_auc(papers)}). And the check is blunter than the attack: at z = {most['noise_multiplier']:g}, where "
        f"{100 * _recalled(most):.0f} % are recalled, the attack still has an AUC of {_auc(most)}. Within every ledger."
    )


def _users_verdict(settings: Sequence[dict[str, Any]]) -> str:
    without = next(setting for setting in settings if setting["delta"] is None)
    private = [setting for setting in settings if setting["delta"] is not None]
    text = (
        f"Without privacy the pattern is called 1 in {_mean_text(without['pattern']['accuracy_of_members'])} of the "
        f"images where its user trains, and members among all users are recognized with an AUC of {_auc(without)}"
    )
    if not private:
        return f"{text}."
    return (
        f"{text}; with DP-FedAvg {_mean_text(private[0]['pattern']['accuracy_of_members'])} and {_auc(private[0])} (in "
        f"brackets: runs). Without that user it is {_mean_text(private[0]['pattern']['accuracy_of_others'])}: no "
        "pattern learned does not mean nobody recognized."
    )


def _compression_verdict(by_strategy: dict[str, list[dict[str, Any]]]) -> str:
    compressed = _of_strategy(by_strategy, "DiscretizedDPSGD")
    least = compressed[0]
    text = (
        f"Compression with next to no noise (z = {least['noise_multiplier']:g}) hides nobody: AUC {_auc(least)}, "
        f"{100 * _recalled(least):.0f} % of the labels recalled"
    )
    same = [
        (setting, plain)
        for setting in compressed[1:]
        for plain in by_strategy["DPSGD"]
        if plain["noise_multiplier"] == setting["noise_multiplier"]
    ]
    for setting, plain in same:
        text += (
            f"; at z = {setting['noise_multiplier']:g} {_auc(setting)} and {100 * _recalled(setting):.0f} %, DP-SGD "
            f"{_auc(plain)} and {100 * _recalled(plain):.0f} %"
        )
    return f"{text}."


def _general_verdict(by_strategy: dict[str, list[dict[str, Any]]]) -> str:
    setting = by_strategy["VectorGroups"][0]
    tpr = 100 * _best(setting)["tpr"][_RATE]["value"]
    allowed = 100 * setting["allowed"]["tpr"][_RATE]
    return (
        f"How far it is true, ε says: with vector groups at z = {setting['noise_multiplier']:g} on the noise above an "
        f"attacker tells members with an AUC of {_auc(setting)}, and {tpr:.1f} % of them at a false positive rate of "
        f"1 %; {allowed:.0f} % are allowed."
    )


def _gan_verdict(settings: Sequence[dict[str, Any]]) -> str:
    parts = [
        f"{_name(setting)}: AUC {_auc(setting)} by the discriminator, {_auc(setting, 'samples')} by synthetic images"
        for setting in _by_noise(settings)
    ]
    return (
        f"{'; '.join(parts)}. So short a training without privacy gives nothing away either, so this says nothing for "
        "or against privacy."
    )


if __name__ == "__main__":
    collect(Path("attacks/claims"), FOLDER)  # as the runs are named in claims.json
