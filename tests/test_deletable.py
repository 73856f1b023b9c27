"""A capability is a folder: without it, its entry point, pages and tests, the others work, and nothing names it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_COPIED = ("src", "conf", "tests", "tools", "benchmarks")
_CORE = ("tests/callback/test_strategy.py", "tests/session/test_session.py")


@dataclass(frozen=True)
class Capability:
    """A folder of src/dpbench/capabilities that can be deleted.

    Attributes:
        words: Names of it that nothing else in src may say.
        others: What goes with the folder.
        users: Capabilities that are built on it, and go with it.
    """

    words: str
    others: tuple[str, ...] = ()
    users: tuple[str, ...] = ()


_TABLES_BY_USER = [
    *product(("adaptive_quantile", "correlated_noise"), ("mnist_writers", "shakespeare_roles"), ("", "_tuning")),
    *product(("correlated_noise",), ("mnist_writers_fresh",), ("", "_tuning")),
]
CAPABILITIES = {
    "attack": Capability(
        r"capabilities\.attack|dpbench attack|attack\.png",
        ("tests/capabilities/attack", "tools/attack_runs.py", "tools/attacked_claims.py"),
    ),
    "auditing": Capability(
        r"capabilities\.auditing|dpbench audit",
        (
            "tests/capabilities/auditing",
            "tests/tools/test_audits.py",
            "tests/tools/results",
            "tools/audits",
            "tools/results",
        ),
        users=("attack", "workflow"),
    ),
    "canaries": Capability(
        r"capabilities\.canaries|[gG]radient_?[cC]anaries|\bCanaries\b",
        ("conf/audit/gradient_canaries.yaml", "conf/experiment/audit.yaml", "tests/capabilities/canaries"),
        users=("attack", "auditing", "workflow"),
    ),
    "correlated": Capability(
        r"capabilities\.correlated|\bBanded",
        (
            "conf/table/correlated_noise",
            "tests/capabilities/auditing/test_banded_audit.py",
            "tests/capabilities/correlated",
        ),
    ),
    "export": Capability(r"capabilities\.export|dpbench export", ("tests/capabilities/export",)),
    "graphs": Capability(r"capabilities\.graphs|\bGraphs\b", ("tests/session/test_graphs.py", "tests/gpu")),
    "hugging_face": Capability(
        r"hugging_face|PrivateTrainer",
        ("conf/experiment/lm", "conf/model/bert.yaml", "conf/model/gpt2.yaml", "tests/capabilities/hugging_face"),
    ),
    "synthesis": Capability(
        r"capabilities\.synthesis\b|dpbench sample|dpbench evaluate",
        (
            *(f"conf/table/pyvacy/gan{name}.yaml" for name in ("", "_augmented", "_tuning")),
            "tests/capabilities/synthesis",
            "tools/attacked_claims.py",
        ),
    ),
    "workflow": Capability("workflow", ("tests/capabilities/workflow",)),
    "tune": Capability(
        r"capabilities\.tune|dpbench tune|best_of_trials",
        (
            "conf/base/tuned.yaml",
            "conf/experiment/tune",
            "conf/table/tune",
            "tests/capabilities/tune",
            "tools/results/tuned.py",
        ),
    ),
    "prior": Capability(
        r"capabilities\.prior|random_prior|random_shapes|pretrain\b",
        (
            "conf/data/random_shapes.yaml",
            "conf/table/recipes/random_prior.yaml",
            "conf/table/recipes/random_prior_tuning.yaml",
            "tests/capabilities/prior",
        ),
    ),
    "own_data": Capability(
        r"capabilities\.own_data|user_table|image_folder|stackexchange",
        (
            "conf/data/image_folder.yaml",
            "conf/data/stackexchange_tags.yaml",
            "conf/data/table.yaml",
            "conf/data/user_table.yaml",
            *(f"conf/experiment/adaptive_quantile/{name}.yaml" for name in ("cifar100", "emnist_ae", "emnist_cr")),
            "conf/experiment/adaptive_quantile/shakespeare.yaml",
            *(f"conf/experiment/adaptive_quantile/{name}.yaml" for name in ("so_lr", "so_nwp", "stackexchange_tags")),
            "conf/table/adaptive_quantile/stackexchange_tags.yaml",
            "conf/table/adaptive_quantile/stackexchange_tags_tuning.yaml",
            "tests/capabilities/own_data",
        ),
        users=("hugging_face",),
    ),
    "users": Capability(
        r"capabilities\.users|UserData|LocalTraining|\bUsers\(|records=users|digits_users|mnist_writers",
        (
            "benchmarks/users",
            "conf/base/users.yaml",
            *(
                f"conf/data/{name}.yaml"
                for name in ("digits_users", "mnist_writers", "shakespeare_roles", "user_noise")
            ),
            *(f"conf/experiment/adaptive_quantile/mnist_writers{name}.yaml" for name in ("", "_ae")),
            "conf/experiment/adaptive_quantile/shakespeare_roles.yaml",
            "conf/records/users.yaml",
            *(f"conf/table/{paper}/{data}{name}.yaml" for paper, data, name in _TABLES_BY_USER),
            "conf/table/recipes/frozen.yaml",
            "conf/table/three_tools/figure2.yaml",
            "tests/capabilities/users",
        ),
        users=("own_data", "hugging_face"),
    ),
    "claims": Capability(r"capabilities\.claims|claims\.toml|reproduce claims", ("tests/capabilities/claims",)),
}


def copy_without(names: list[str], folder: Path) -> dict[str, str]:
    """Copy the tree without some capabilities; returns the environment of commands that run there.

    Entry points are read from the metadata of what is installed, so that the copy has metadata of its own. Contracts on
    imports within a capability go with it.
    """
    for part in _COPIED:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in names:
        shutil.rmtree(folder / "src" / "dpbench" / "capabilities" / name)
        for other in CAPABILITIES[name].others:
            place = folder / other
            shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        text, count = re.subn(rf'(?m)^\S+ = "dpbench\.capabilities\.{name}[.:].*\n', "", text)
        assert count, f"{name} has no entry point"
        own = f'"dpbench.capabilities.{name}.'
        text = "\n\n".join(part for part in text.split("\n\n") if not (own in part and "importlinter" in part))
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    project = tomllib.loads(text)["project"]
    lines = []
    for group, entries in {"console_scripts": project["scripts"], **project["entry-points"]}.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    metadata = folder / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}


def mentions(name: str, source: Path) -> list[str]:
    """Files that name a capability."""
    pattern = re.compile(CAPABILITIES[name].words)
    files = [*source.rglob("*.py"), *source.rglob("*.md"), *source.rglob("*.yaml")]
    return [str(file) for file in files if pattern.search(file.read_text(encoding="utf-8"))]


def ran(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_capability_can_be_deleted(name: str, tmp_path: Path) -> None:
    gone = [name, *CAPABILITIES[name].users]
    environment = copy_without(gone, tmp_path)
    assert mentions(name, tmp_path / "src") == []
    ran([str(Path(sys.executable).with_name("lint-imports")), "--no-logo"], tmp_path, environment)
    shown = ran([sys.executable, "-m", "dpbench", "--help"], tmp_path, environment)
    listed = ran([sys.executable, "-m", "dpbench", "reproduce", "list"], tmp_path, environment)
    commands = {"attack": "attack", "audit": "auditing", "evaluate": "synthesis", "export": "export"}
    commands |= {"sample": "synthesis", "workflow": "workflow"}
    for command, capability in commands.items():
        assert (f"  {command} " in shown) is (capability not in gone)
    assert ("claims" in listed) is (name != "claims")
    assert ("pretrain" in shown) is (name != "prior")


@pytest.mark.slow
def test_the_core_works_without_any_of_them(tmp_path: Path) -> None:
    environment = copy_without(list(CAPABILITIES), tmp_path)
    ran([sys.executable, "-m", "dpbench", "train", "experiment=demo", "hydra.run.dir=run"], tmp_path, environment)
    assert (tmp_path / "run" / "result.json").is_file()
    ran([sys.executable, "-m", "pytest", "-q", "-m", "not slow and not long", *_CORE], tmp_path, environment)


def test_an_import_of_a_capability_is_found(tmp_path: Path) -> None:
    (tmp_path / "core.py").write_text("from dpbench.capabilities.graphs.executor import Graphs\n", encoding="utf-8")
    assert mentions("graphs", tmp_path) == [str(tmp_path / "core.py")]
