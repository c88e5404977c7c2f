"""The command line: `adlm <command> [word ...] [key=value ...] [--flag ...]`.

The table of commands is in commands.py. The function of a command is imported only when it is called, so that `--help`
and errors for mistyped keys appear before torch is loaded. Exit status: 0; 1 bad input (one line on stderr;
ADLM_DEBUG=1 shows the traceback); 2 wrong usage; 128 + N stopped by signal N, for training after saving (130 Ctrl-C,
143 SIGTERM).
"""

import dataclasses
import functools
import importlib
import io
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from adlm import config
from adlm.commands import COMMANDS, ELSEWHERE, Command
from adlm.compat.command_lines import release_line
from adlm.config import as_yaml
from adlm.config.keys import allowed_text, default_text, group_choices, group_help, keys, nearest
from adlm.errors import choose, missing_extra, require
from adlm.migration import REMOVED, RENAMED
from adlm.schema import Config
from adlm.tables import GROUPS


class UsageError(Exception):
    """The line is not of the form `adlm <command> ...`: exit status 2."""


def main(argv: Sequence[str] | None = None, strict: bool = True) -> int:
    """Run one command line and return its exit status. `strict`: refuse keys that the command does not read."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console's code page may lack characters
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv), strict)
        sys.stdout.flush()  # notices a closed pipe here, not at interpreter exit
        return status
    except UsageError as error:
        return _fail(f"{error}; `adlm --help` shows how", 2)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        return _fail(str(error) or type(error).__name__, 1)
    except ModuleNotFoundError as error:
        if not (advice := missing_extra(error)):
            raise
        return _fail(advice, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(message: str, status: int) -> int:
    if os.environ.get("ADLM_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()
    print("adlm: error: " + " ".join(message.split()), file=sys.stderr)
    return status


def release_main(program: str, argv: Sequence[str] | None = None) -> int:
    """Run `python -m adlm_main mode=... ...` and `python -m main ...`, the public release's command lines."""
    try:
        line = release_line(program, list(sys.argv[1:] if argv is None else argv))
    except ValueError as error:
        return _fail(str(error), 1)
    return main(line, strict=False)  # the release has one list of keys for all its modes


def _run(argv: list[str], strict: bool) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print_overview()
        return 0 if argv else 2
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"adlm {version('adlm')}")
        return 0
    if argv[0] in ELSEWHERE:
        raise UsageError(f"there is no command {argv[0]!r}: {ELSEWHERE[argv[0]]}")
    try:
        name = choose("command", argv[0], COMMANDS)
    except ValueError as error:
        raise UsageError(str(error)) from None
    command = COMMANDS[name]
    overrides, words, flags = _sort(command, argv[1:])
    own = {key.partition(".")[2] for key in (*keys(), *REMOVED, *RENAMED) if key.startswith(f"{command.short}.")}
    overrides = [f"{command.short}.{text}" if text.partition("=")[0] in own else text for text in overrides]
    if "help" in flags:
        print_help(name, command)
        return 0
    asked = [text.removesuffix("=list") for text in overrides if text.endswith("=list")]
    if asked:
        for key in asked:
            print_choices(key.lstrip("+"))
        return 0
    named, rest = words[: len(command.words)], words[len(command.words) :]
    if len(named) < command.required:
        raise UsageError(f"adlm {name} needs {' and '.join(command.words[: command.required])}")
    if rest and not command.rest:
        raise UsageError(f"adlm {name}: {rest[0]!r} is not of the form key=value; quote a value that has spaces")
    line = [*_defaults(command, overrides), *(f"{k}={w}" for k, w in zip(command.words, named)), *overrides]
    arguments: dict[str, Any] = {flag.replace("-", "_"): True for flag in flags if flag != "json"}
    # Checked before the command is imported: a typo must be reported before the seconds that torch takes to load.
    refuse = functools.partial(refuse_unread, name, command) if strict else lambda key: None
    if command.sweeps:
        cfg, arguments["sweep"] = config.load_sweep(line, refuse)
    else:
        cfg = config.load(line, run_folder=not command.out, check_key=refuse, own_text=command.own_text)
    if command.rest:
        arguments["args"] = rest
    if command.line:
        arguments["line"] = line
    if command.loads_torch and sys.stderr.isatty() and "torch" not in sys.modules:
        print(f"adlm {name}: loading torch ...", file=sys.stderr, flush=True)
    result = _target(command)(cfg, **arguments)
    if "json" in flags and os.environ.get("RANK", "0") == "0":
        print(json.dumps(_plain(result)))
    if isinstance(result, dict) and result.get("stopped_by"):
        return 128 + result["stopped_by"]
    return result if isinstance(result, int) else 0


def _defaults(command: Command, overrides: list[str]) -> list[str]:
    """The defaults of a command, without groups that the user's experiment sets."""
    named = [text.partition("=")[2] for text in overrides if text.startswith("experiment=")]
    experiments = GROUPS["experiment"]
    chosen = experiments.chooses(named[-1]) if named and named[-1] in experiments else set()
    return [text for text in command.defaults if text.partition("=")[0] not in chosen]


def refuse_unread(name: str, command: Command, key: str) -> None:
    """Refuse a key or group that the command does not use."""
    if key in GROUPS:
        require(
            key in command.groups,
            f"{key}=...: `adlm {name}` does not read this group; `adlm {name} --help` lists what it reads",
        )
        return
    ruling = command.ruled.get(key)
    require(ruling is None, f"{key}: `adlm {name}` does not read this key; {ruling} rules in its place")
    if key not in command.read_keys:
        same = [k for k in command.read_keys if k.rpartition(".")[2] == key.rpartition(".")[2]]
        hint = f"{nearest(key, same)}; `adlm {name} --help` lists those it reads"
        raise ValueError(f"{key}: `adlm {name}` does not read this key{hint}")


def _sort(command: Command, argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """argv -> overrides, words, flags. A word may contain an equals sign: a file name, or a variant such as
    `adlm+seed=2`."""
    overrides, words, flags = [], [], []
    for text in argv:
        if text.startswith("-") and len(text) > 1 and "=" not in text:
            flag = {"-h": "--help"}.get(text, text)
            if flag.removeprefix("--") not in {"help", "json", *command.flags} or not flag.startswith("--"):
                known = ", ".join(f"--{f}" for f in (*command.flags, "json", "help"))
                meant = [
                    key for key in command.read_keys if key.rpartition(".")[2] == text.strip("-").replace("-", "_")
                ]
                hint = f"; settings are written {meant[0]}=VALUE" if meant else ""
                raise UsageError(f"unknown flag {text!r}; this command knows {known}{hint}")
            flags.append(flag.removeprefix("--"))
        elif "=" in text and "+" not in text.partition("=")[0].lstrip("+") and not os.path.exists(text):
            overrides.append(text)
        else:
            words.append(text)
    return overrides, words, flags


def _target(command: Command) -> Callable[..., Any]:
    module, _, function = command.target.partition(":")
    return getattr(importlib.import_module(module), function)


def _plain(result: Any) -> Any:
    """The result of a command, converted to types that JSON has."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return dataclasses.asdict(result)
    return {} if result is None or isinstance(result, int) else result


def run_config(cfg: Config) -> dict[str, Any]:
    """`adlm config`: print the settings as YAML."""
    print(as_yaml(cfg), end="")
    return dataclasses.asdict(cfg)


def print_choices(key: str) -> None:
    """`adlm config model=list`: print the names of a group."""
    if key in GROUPS:
        for name in group_choices(key):
            print(f"{name:<18} {group_help(key, name)}")
        return
    require(key in keys(), f"unknown key {key!r}{nearest(key, [*keys(), *GROUPS])}; `adlm config` prints all keys")
    setting = keys()[key]
    require(setting.choices is not None, f"{key} takes any {setting.kind.__name__}: {setting.help}")
    for name in setting.choices or ():
        print(name or "''")


def print_overview() -> None:
    print("usage: adlm <command> [checkpoint] [key=value ...] [--json] [--help]\n")
    for name, command in COMMANDS.items():
        print(f"  {name:<10} {command.help}")
    print("\nadlm <command> --help lists its keys; adlm config model=list the choices of a group or key.")


def print_help(name: str, command: Command) -> None:
    """Print usage, flags, groups and the keys of the command's sections, with default, help and allowed values."""
    words = "".join(f" [{key.rsplit('.', 1)[-1]}]" for key in command.words) + (" [word ...]" if command.rest else "")
    print(f"usage: adlm {name}{words} [key=value ...]{''.join(f' [--{f}]' for f in command.flags)} [--json]\n")
    print(f"{command.help}\n")
    for flag, text in (*command.flags.items(), ("json", "the last line of stdout is one JSON document")):
        print(f"  --{flag:<22} {text}")
    if command.out:
        _print_entry("out", "", command.out)
    if command.sweeps:
        _print_entry("sampling.KEY=64,128", "", "numbers and names may be lists: every combination is measured")
    if command.groups:
        print("\nGroups (a name stands for several settings):")
    for group in command.groups:
        _print_entry(group, "", ", ".join(group_choices(group)))
    if command.own_text or (command.line and command.words):
        print("\nThe values below are those before text, machine and start are known; `config.yaml` has a run's own.")
    preset = config.preset(command.defaults)
    read = [key for key in command.read_keys if key not in command.words and not (key == "out" and command.out)]
    for section in dict.fromkeys(key.rpartition(".")[0] for key in read):
        print(f"\n{section or 'General'}:")
        own = [dataclasses.replace(keys()[k], default=preset[k]) for k in read if k.rpartition(".")[0] == section]
        for key in own:
            _print_entry(key.name, default_text(key), f"{key.help} {allowed_text(key)}")


def _print_entry(key: str, default: str, text: str) -> None:
    head = f"  {key}" + (f" = {default}" if default else "")
    print(head if len(head) > 38 else f"{head:<38}", end="\n" if len(head) > 38 else " ")
    lines = textwrap.wrap(text, 78, break_on_hyphens=False) or [""]
    first = " " * 39 + lines[0] if len(head) > 38 else lines[0]
    print("\n".join([first, *(" " * 39 + line for line in lines[1:])]))
