"""Completion scripts for bash, zsh and fish, made from the parsers: the commands, their options, and names of patches.

A positional argument whose words are known has them in an attribute `words` (see `offer`).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator

_BASH = """_vllm_rocm_fixes() {{
    local words command=${{COMP_WORDS[1]}}
    case $command in
{cases}
    esac
    (( COMP_CWORD == 1 )) && words={first}
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _vllm_rocm_fixes {program}"""


def offer(action: argparse.Action, words: Iterable[str]) -> None:
    """Let a shell complete this argument with these words."""
    action.words = tuple(words)  # type: ignore[attr-defined]


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script that makes a shell ("bash", "zsh" or "fish") complete this command line."""
    commands = dict(_commands(parser))
    if shell == "fish":
        return "\n".join(_fish(parser, commands))
    cases = "\n".join(f"    {name}) words={shlex.quote(' '.join(_words(p)))} ;;" for name, p in commands.items())
    first = shlex.quote(" ".join([*commands, *_words(parser)]))
    bash = _BASH.format(cases=cases, first=first, program=parser.prog)
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash}" if shell == "zsh" else bash


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _words(parser: argparse.ArgumentParser) -> list[str]:
    words = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    return words + [word for action in parser._actions for word in getattr(action, "words", ())]


def _fish(parser: argparse.ArgumentParser, commands: dict[str, argparse.ArgumentParser]) -> Iterator[str]:
    for name, command in commands.items():
        summary = (command.description or "").partition("\n")[0]
        start = f"complete -c {parser.prog}"
        yield f"{start} -n __fish_use_subcommand -a {name} -d {shlex.quote(summary)}"
        for action in command._actions:
            text = shlex.quote(action.help or "")
            where = f"{start} -n '__fish_seen_subcommand_from {name}'"
            yield from (f"{where} -l {option[2:]} -d {text}" for option in action.option_strings if option[:2] == "--")
            yield from (f"{where} -a {word}" for word in getattr(action, "words", ()))
