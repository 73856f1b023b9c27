"""`dpbench completion`: what a shell needs to complete commands, options and settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dpbench.cli.arguments import Commands, add_command

_EPILOG = """\
Commands, options and, for train, groups and settings. Written once, it costs no start of Python at a TAB; write it
again after an upgrade, or when a plug-in was installed.

examples:
  dpbench completion bash > ~/.local/share/bash-completion/completions/dpbench
  dpbench completion zsh >> ~/.zshrc
  source <(dpbench completion bash)                 for this shell alone
"""

_OF_HYDRA = ("train", "priors", "resume", "workflow")

_BASH = """\
# dpbench: completion, made by `dpbench completion`
_dpbench() {{
  local line="${{COMP_LINE:0:$COMP_POINT}}"
  local whole="${{line##* }}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}" words="" before=""
  local cur="$whole"
  COMPREPLY=()
  case "$whole" in
    --*=*) prev="${{whole%%=*}}"; before="$prev="; cur="${{whole#*=}}" ;;
    *=*,*) before="${{whole%,*}},"; cur="${{whole%%=*}}=${{whole##*,}}" ;;  # of a sweep: model=cnn,mlp
  esac
  if [ "$COMP_CWORD" -le 1 ]; then
    words="{commands}"
  else
    case "$command $prev" in
{choices}
    *) [[ "$before" = --* ]] || case "$command $cur" in
{options}
{settings}
      esac ;;
    esac
  fi
  if [ -n "$words" ]; then
    COMPREPLY=( $(compgen -W "$words" -- "$cur") )
  fi
  case "${{COMPREPLY[0]}}" in
    *=) compopt -o nospace 2> /dev/null ;;
  esac
  case "$before" in
    *,) COMPREPLY=( "${{COMPREPLY[@]#*=}}" ) ;;
  esac
  COMPREPLY=( "${{COMPREPLY[@]/#/$before}}" )
  case "$whole" in
    *=*) case "$COMP_WORDBREAKS" in
      *=*) COMPREPLY=( "${{COMPREPLY[@]#"${{whole%=*}}="}}" ) ;;  # bash replaces only what stands behind the sign
    esac ;;
  esac
}}
complete -o default -F _dpbench dpbench
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "completion", "completion for a shell", _EPILOG)
    parser.add_argument("shell", choices=["bash", "zsh"], help="which")
    parser.set_defaults(parsers=commands)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    print((_ZSH if options.shell == "zsh" else "") + script(options.parsers.choices), end="")
    return 0


def script(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """A script for bash, which zsh runs too.

    Args:
        parsers: Of the commands, by name.
    """
    choices, options = [], []
    for name, parser in parsers.items():
        flags = [flag for action in parser._actions for flag in action.option_strings]
        options.append(f'      "{name} -"*) words="{" ".join(flags)}" ;;')
        for action in parser._actions:
            if action.choices:
                patterns = [f'"{name} {flag}"' for flag in action.option_strings] or [f'"{name} {name}"']
                choices.append(f'    {" | ".join(patterns)}) words="{" ".join(map(str, action.choices))}" ;;')
    words = " ".join(_settings())
    settings = "\n".join(f'      "{name} "*) words="{words}" ;;' for name in _OF_HYDRA)
    every = " ".join(["--help", "--version", *parsers])
    return _BASH.format(
        commands=every, choices="\n".join(choices), options="\n".join(options), settings=settings.rstrip()
    )


def _settings() -> list[str]:
    """What Hydra's commands take: GROUP=NAME, and KEY= of every setting that a file of the configuration has."""
    from dpbench.run.search_path import conf_dir, groups_of, plugin_dirs

    folders = (conf_dir(), *plugin_dirs())
    groups = {group: names for group, names in groups_of(*folders).items() if group not in ("schema", "hydra")}
    words = [f"{group}={name}" for group, names in groups.items() for name in names]
    keys = {key for folder in folders for key in _keys_of(folder, groups)}
    return [*words, *(f"{key}=" for key in sorted(keys))]


def _keys_of(folder: Path, groups: Mapping[str, Any]) -> Iterator[str]:
    import yaml

    for path in sorted(folder.rglob("*.yaml")):
        group = path.relative_to(folder).parts[0]
        if group in groups and group != "experiment":
            yield from _flat(group, yaml.safe_load(path.read_text(encoding="utf-8")))
        elif path.parent == folder:
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
            for name, value in settings.items() if isinstance(settings, dict) else ():  # others are data, no settings
                yield from _flat(str(name), value) if name not in ("hydra", "defaults") else ()


def _flat(name: str, value: Any) -> Iterator[str]:
    """Dotted keys of plain settings."""
    if not isinstance(value, dict):
        yield name
        return
    for key, inner in value.items():
        if isinstance(key, str) and key.isidentifier() and not key.startswith("_") and key not in ("defaults", "hydra"):
            yield from _flat(f"{name}.{key}", inner)
