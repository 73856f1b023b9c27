"""Files for code hosts, containers and hooks: what they name exists, and their versions are those of the package."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet

from dpbench.cli import parser
from tests.support.cli import ROOT
from tests.support.configs import composed

GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path for path in (GITHUB / "workflows").glob("*.yml")}
YAML = [*GITHUB.rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
TEXTS = [
    *YAML,
    GITHUB / "pull_request_template.md",
    *(ROOT / name for name in ("SECURITY.md", "Dockerfile", ".dockerignore")),
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs() -> dict[str, dict[str, Any]]:
    return {f"{name}/{job}": body for name, path in WORKFLOWS.items() for job, body in loaded(path)["jobs"].items()}


def commands() -> list[list[str]]:
    """Every command line of the workflows, as words."""
    lines = [line for job in jobs().values() for step in job["steps"] for line in step.get("run", "").splitlines()]
    return [shlex.split(line) for line in lines]


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_files_are_yaml() -> None:
    assert [path.name for path in YAML if not isinstance(loaded(path), dict)] == []


def test_commands_of_the_workflows_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    (subcommands,) = (action.choices for action in parser()._actions if action.dest == "command")
    assert subcommands is not None
    seen = set()
    for words in commands():
        seen.add(words[0])
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0] == "dpbench":
            assert words[1] in subcommands, words
            composed(*words[2:])
        else:
            assert words[0] == "test" or words[:2] == ["python", "-m"], words
            assert words[0] == "test" or words[2] in ("pip", "hatchling"), words
    assert seen == {"make", "dpbench", "python", "test"}


def test_python_versions_are_those_of_the_package() -> None:
    declared = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", name)}
    least = PROJECT["requires-python"].removeprefix(">=")
    assert least == min(declared, key=lambda version: int(version.rpartition(".")[2]))
    for name, job in jobs().items():
        matrix = job.get("strategy", {}).get("matrix", {}).get("python")
        assert matrix is None or set(matrix) == declared, name
    assert dict(instructions())["ARG"].removeprefix("PYTHON=") in declared


def test_no_pin_asks_for_a_later_python() -> None:
    """With the first release of the least Python, pip would look for another version of each without end."""
    least = PROJECT["requires-python"].removeprefix(">=") + ".0"
    pinned = [one for one in distributions() if PINNED.get(one.name) == one.version]
    assert len(pinned) > 100
    assert [one.name for one in pinned if least not in SpecifierSet(one.metadata.get("Requires-Python", ""))] == []


def test_the_release_is_published_without_a_token() -> None:
    publish = jobs()["release/publish"]
    assert publish["permissions"] == {"id-token": "write"} and "secrets" not in WORKFLOWS["release"].read_text()
    for path in WORKFLOWS.values():
        assert loaded(path)["permissions"] == {"contents": "read"}, path.name


def test_hooks_have_the_versions_of_make_check() -> None:
    (hooks,) = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert hooks["rev"] == f"v{PINNED['ruff']}"
    assert [hook["id"] for hook in hooks["hooks"]] == ["ruff-check", "ruff-format"]


def test_nothing_names_a_registry_or_a_machine() -> None:
    for path in TEXTS:
        hosts = re.findall(r"https?://([\w.-]+)", path.read_text(encoding="utf-8"))
        assert set(hosts) <= {"github.com"}, path
        assert not re.search(r"/(home|root|tmp/)\b|index-url", path.read_text(encoding="utf-8")), path


def copied() -> list[tuple[list[str], str]]:
    return [(words[:-1], words[-1]) for kind, rest in instructions() if kind == "COPY" for words in [rest.split()]]


def test_the_image_is_given_what_it_copies() -> None:
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line.removeprefix("!") for line in patterns if line.startswith("!")}
    assert allowed == {source for sources, _ in copied() for source in sources}
    assert all((ROOT / name).exists() for name in allowed)


def test_the_days_reading_is_in_order() -> None:
    """No file of the list imports one that comes later, so that each can be read by what came before."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## A day's reading")[2].partition("What these import besides")[0]
    listed = re.findall(r"`((?:privacy|session|callback)/[\w/]+)`", section)
    assert len(listed) == 24
    for place, name in enumerate(listed):
        source = (ROOT / "src" / "dpbench" / f"{name}.py").read_text(encoding="utf-8")
        imported = re.findall(r"^from dpbench\.([\w.]+) import", source, re.MULTILINE)
        assert not {module.replace(".", "/") for module in imported} & set(listed[place + 1 :]), name


def test_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    places = (ROOT, ROOT / "src" / "dpbench", ROOT / "src" / "dpbench" / "privacy")
    for name in re.findall(r"`([a-z_]+/[\w/.]+\.(?:py|yaml|md|toml|tsv|json|txt))`", text):
        assert any((place / name).exists() for place in places), name
