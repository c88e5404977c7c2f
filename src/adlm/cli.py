"""The command line: `adlm <command> [word ...] [key=value ...] [--flag ...]`.

One table of commands; each names the function that does the work, imported only when it is called, so that `--help`
and a mistyped key are answered before torch is loaded. Exit status: 0; 1 bad input (one line on stderr; ADLM_DEBUG=1
shows the traceback); 2 wrong usage; 128 + N stopped by signal N, training after it has saved (130 Ctrl-C, 143 SIGTERM).
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
from adlm.compat.command_lines import release_line
from adlm.config.keys import (
    PER_REQUEST,
    TRAINING,
    allowed_text,
    default_text,
    group_choices,
    group_help,
    keys,
    nearest,
)
from adlm.errors import choose, missing_extra, require
from adlm.schema import Config, as_yaml
from adlm.tables import GROUPS


@dataclasses.dataclass(frozen=True)
class Command:
    """One line of the table: the function that does the work, and what the command line hands to it."""

    target: str
    """`module:function`. Called with the Config, then one keyword argument per flag given, and `args` if `rest`."""
    help: str
    words: tuple[str, ...] = ()
    """Keys that positional words fill, in order: `adlm sample runs/demo` sets eval.checkpoint."""
    required: int = 0
    """How many of them must be given."""
    rest: bool = False
    """Further words are handed over as args=[...]."""
    line: bool = False
    """The overrides are handed over as line=[...], for a command that composes several configurations from them."""
    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    """`--name` -> what it does; handed over as name=True."""
    defaults: tuple[str, ...] = ()
    """Overrides that the command line may override again."""
    out: str = ""
    """What `out` is, where that is no run folder (for --help); it then stays empty unless it is given."""
    sweeps: bool = False
    """Numbers and names of `sampling` may be lists; the settings they make are handed over as sweep=[...]."""
    own_text: bool = False
    """The settings fit the size of the text in data.path, and the machine (config/owntext.py)."""
    short: str = ""
    """Section whose keys may be typed without its name: `adlm serve port=8000`."""
    reads: tuple[str, ...] = ()
    """Sections of the schema and single keys that change what the command does: --help lists them, and others are
    refused. Keys of `words`, and `out` where it has a text of its own, need not be named."""
    loads_torch: bool = True
    """Its work begins with seconds of importing, which it does not say itself."""

    @property
    def read_keys(self) -> list[str]:
        """Every key that the command reads, in the order of `reads`."""
        named = [*self.reads, *self.words, *(["out"] if self.out else [])]
        found = [key for part in named for key in keys() if part in (key, key.rpartition(".")[0])]
        return list(dict.fromkeys(found))

    @property
    def groups(self) -> list[str]:
        """Groups that set something the command reads. A corpus is more than the tokenizer of a checkpoint."""
        read = {key.rpartition(".")[0] for key in self.read_keys if key not in MODEL}
        return [group for group in GROUPS if SECTION_OF.get(group, group) in read]


WHOLE = ("recipe", "algo", "experiment")
SECTION_OF = {"lr_scheduler": "optim", "task": "reason", "method": "reason"} | dict.fromkeys(WHOLE, "model")
"""Section that a group sets first of all, where it has another name."""
MODEL = ("eval.ema", "train.device", "data.tokenizer", "data.root")
"""Which weights of a checkpoint are loaded, and where."""
RANKS = ("train.device", "train.precision", "train.num_threads")
BOUND = (
    "eval.draws",
    "eval.block_length",
    "eval.estimator",
    "eval.seed",
    "eval.sequences",
    "eval.ema",
    "eval.batch_size",
)
SERVED = tuple(key for key in keys() if key.startswith("sampling.") and key.rpartition(".")[2] not in PER_REQUEST)

RESULT = "FILE.json of the result, or a folder for it (empty: beside the checkpoint; of the box: runs/box)"

COMMANDS: dict[str, Command] = {
    "demo": Command(
        "adlm.demo:run_demo",
        "train a nano model on this CPU in minutes, on the documentation inside Python or on your text (adlm demo"
        " my.txt), nothing downloaded, and write a report for the browser",
        words=("data.path",),
        defaults=("experiment=demo",),
        own_text=True,
        reads=(*TRAINING, "sampling"),
    ),
    "train": Command(
        "adlm.training.loop:run_train",
        "train a model on your text (adlm train my.txt: a file or folder; sizes and schedules fit it and this machine)"
        " or on data=NAME, or resume the run in `out`; under torchrun on many devices",
        words=("data.path",),
        own_text=True,
        flags={"dry-run": "print model, tokens and memory, then stop"},
        reads=(*TRAINING, "lora", "sampling"),
    ),
    "finetune": Command(
        "adlm.finetuning:run_finetune",
        "teach a trained model your text, in minutes on a CPU, with a report of before and after: adlm finetune my.txt;"
        " starts from the model in the package, or from init_from=FOLDER",
        words=("data.path",),
        line=True,
        defaults=("data=file",),
        short="checkpoint",
        reads=("seed", "out", "checkpoint", "lora", "data", "optim", "train", "track", "sampling", *BOUND),
    ),
    "adapt": Command(
        "adlm.adapting:run_adapt",
        "make a block-diffusion model of a causal one (a GGUF file, a Llama-type folder, a run of algo=ar): adlm adapt"
        " BASE data=NAME; anchored with algo=adlm",
        words=("checkpoint.init_from",),
        required=1,
        line=True,
        reads=("model", "noise", "objective", *TRAINING, "sampling"),
    ),
    "sample": Command(
        "adlm.api.command:run_sample",
        "draw texts from a model: free, after a prompt or into a template; a rerun continues the file",
        words=("eval.checkpoint",),
        flags={"watch": "show one text appearing, live in the terminal"},
        out="jsonl file that samples are appended to as they are drawn; a rerun continues it (empty: only shown)",
        reads=("sampling", *MODEL),
    ),
    "score": Command(
        "adlm.api.command:run_score",
        "how likely a text is: adlm score 'some words' [CHECKPOINT] (or a file, @file, or - for standard input)",
        rest=True,
        defaults=("eval.draws=64",),
        reads=("eval.checkpoint", "eval.draws", *MODEL),
    ),
    "data": Command(
        "adlm.data.preparation:run_data",
        "list: the corpora; prepare [train] [valid]: tokenise and pack one, ready for training",
        rest=True,
        reads=("data", "model.length"),
        loads_torch=False,
    ),
    "ppl": Command(
        "adlm.evaluation.perplexity:run_ppl",
        "perplexity of a checkpoint with confidence intervals, on its own validation split or on data=NAME",
        words=("eval.checkpoint",),
        defaults=("data=checkpoint",),
        out=RESULT,
        reads=(*BOUND, "data", *RANKS),
    ),
    "compare": Command(
        "adlm.compare:run_compare",
        "train algorithms on one corpus with one budget, and set bound, size, arithmetic and speed side by side:"
        " adlm compare adlm mdlm adlm+objective.gamma=0.1+seed=2 ...; a rerun does what is missing",
        rest=True,
        line=True,
        defaults=("experiment=compare",),
        short="compare",
        reads=("compare", *TRAINING, *BOUND),
    ),
    "bench": Command(
        "adlm.bench:run_bench",
        "train | sample: how fast this machine is, beside a reference implementation of the same",
        rest=True,
        out="file that the JSON line is appended to (empty: only printed)",
        reads=("bench", "algo", "seed", "model", "noise", "objective", "optim", "train", "sampling"),
    ),
    "zeroshot": Command(
        "adlm.evaluation.zeroshot:run_zeroshot",
        "perplexity on eight public data sets: adlm zeroshot CHECKPOINT [set ...], local copies below data.root",
        words=("eval.checkpoint",),
        rest=True,
        out=RESULT,
        reads=(*BOUND, "data", *RANKS),
    ),
    "anchors": Command(
        "adlm.evaluation.anchor_report:run_anchors",
        "which tokens of a text are anchors, and how both networks predict them when hidden: adlm anchors CHECKPOINT"
        " 'some words' (or a file, @file, or standard input)",
        words=("eval.checkpoint",),
        required=1,
        rest=True,
        out=RESULT,
        reads=("eval.draws", "eval.seed", *MODEL),
    ),
    "evaluate": Command(
        "adlm.evaluation.evaluate:run_evaluate",
        "samples over a sweep of settings: generative perplexity, entropy, distinct-n, MAUVE, with intervals, and a"
        " report of frontiers. A rerun does only what is missing",
        words=("eval.checkpoint",),
        defaults=("data=checkpoint", "sampling.n=128"),
        out="folder of samples, results and report (empty: evaluate/ in the checkpoint's folder; of the box: runs/box)",
        sweeps=True,
        reads=("eval", "sampling", "data", *RANKS),
    ),
    "import": Command(
        "adlm.compat.checkpoints:run_import",
        "a checkpoint of the public release -> an exported folder of ours: adlm import FILE.ckpt FOLDER",
        words=("eval.checkpoint", "out"),
        required=2,
        out="exported folder",
        reads=("eval.ema", "data.tokenizer", "data.root"),
    ),
    "export": Command(
        "adlm.api.command:run_export",
        "a run, or whatever else can be loaded -> an exported folder, to keep or to share: adlm export RUN FOLDER",
        words=("eval.checkpoint", "out"),
        required=2,
        flags={"transformers": "a folder that transformers' AutoModel classes load, too"},
        out="exported folder",
        reads=MODEL,
    ),
    "convert": Command(
        "adlm.compat.checkpoints:run_convert",
        "an exported folder -> a checkpoint the public release loads: adlm convert FOLDER FILE.ckpt",
        words=("eval.checkpoint", "out"),
        required=2,
        out="checkpoint file",
    ),
    "reason": Command(
        "adlm.reasoning.command:run_reason",
        "reasoning tasks. train: staged fine-tuning; eval RUN: answer test questions; table RUN ..: compare runs with"
        " the paper; data: what the questions are like",
        rest=True,
        defaults=("algo=ar", "model=nano", "task=prosqa", "method=acot"),
        reads=("reason", *TRAINING, "eval"),
    ),
    "serve": Command(
        "adlm.serving:run_serve",
        "answer requests over HTTP, with a page to watch text appear: adlm serve [CHECKPOINT ...] port=8000",
        rest=True,
        short="serve",
        reads=("serve", *SERVED, "eval.checkpoint", *MODEL, "train.num_threads"),
        loads_torch=False,
    ),
    "config": Command(
        "adlm.cli:run_config",
        "print the resolved settings; `key=list` prints what a group or key may be",
        reads=tuple(dict.fromkeys(key.rpartition(".")[0] for key in keys())),
        loads_torch=False,
    ),
}

# What is typed as a command, and where it is.
ELSEWHERE = {
    "infill": "adlm sample sampling.template='The [MASK:3] sat', POST /v1/infill of `adlm serve`",
    "generate": "adlm sample",
    "eval": "adlm evaluate, adlm ppl",
}


class UsageError(Exception):
    """The line is not of the form `adlm <command> ...`: exit status 2."""


def main(argv: Sequence[str] | None = None, strict: bool = True) -> int:
    """Run one command line and return its exit status. `strict`: keys that the command does not read are refused."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console with a code page cannot show every character
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv), strict)
        sys.stdout.flush()  # a reader that left is noticed here and not at interpreter exit
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
    """`python -m adlm_main mode=... ...` and `python -m main ...`, as the public release's users type them."""
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
    overrides = [f"{command.short}.{o}" if f"{command.short}.{o.partition('=')[0]}" in keys() else o for o in overrides]
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
        raise UsageError(f"adlm {name}: {rest[0]!r} is not of the form key=value")
    line = [*command.defaults, *(f"{k}={w}" for k, w in zip(command.words, named)), *overrides]
    arguments: dict[str, Any] = {flag.replace("-", "_"): True for flag in flags if flag != "json"}
    # Checked before the command is imported: a typing error must not cost the seconds that torch takes to load.
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


def refuse_unread(name: str, command: Command, key: str) -> None:
    """Refuse a key or group that would change nothing."""
    if key in GROUPS:
        require(
            key in command.groups,
            f"{key}=...: `adlm {name}` does not read this group; `adlm {name} --help` lists what it reads",
        )
        return
    read = command.read_keys
    same = [k for k in read if k.rpartition(".")[2] == key.rpartition(".")[2]]
    require(
        key in read,
        f"{key}: `adlm {name}` does not read this key{nearest(key, same)}; `adlm {name} --help` lists those it reads",
    )


def _sort(command: Command, argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """argv -> overrides, words, flags. A word may hold an equals sign: the name of a file, or a variant such as
    `adlm+seed=2`."""
    overrides, words, flags = [], [], []
    for text in argv:
        if text.startswith("-") and len(text) > 1 and "=" not in text:
            flag = {"-h": "--help"}.get(text, text)
            if flag.removeprefix("--") not in {"help", "json", *command.flags} or not flag.startswith("--"):
                known = ", ".join(f"--{f}" for f in (*command.flags, "json", "help"))
                raise UsageError(f"unknown flag {text!r}; this command knows {known}")
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
    """What a command returned, as JSON can say it."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return dataclasses.asdict(result)
    return {} if result is None or isinstance(result, int) else result


def run_config(cfg: Config) -> dict[str, Any]:
    """`adlm config`: the settings as YAML."""
    print(as_yaml(cfg), end="")
    return dataclasses.asdict(cfg)


def print_choices(key: str) -> None:
    """`adlm config model=list`."""
    if key in GROUPS:
        for name in group_choices(key):
            print(f"{name:<18} {group_help(key, name)}")
        return
    choose("key", key, [*keys(), *GROUPS])
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
    """Usage, flags, groups and the keys of the command's sections, with default, meaning and what is allowed."""
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
    read = [key for key in command.read_keys if key not in command.words and not (key == "out" and command.out)]
    for section in dict.fromkeys(key.rpartition(".")[0] for key in read):
        print(f"\n{section or 'General'}:")
        for key in [keys()[name] for name in read if name.rpartition(".")[0] == section]:
            _print_entry(key.name, default_text(key), f"{key.help} {allowed_text(key)}")


def _print_entry(key: str, default: str, text: str) -> None:
    head = f"  {key}" + (f" = {default}" if default else "")
    print(head if len(head) > 38 else f"{head:<38}", end="\n" if len(head) > 38 else " ")
    lines = textwrap.wrap(text, 78, break_on_hyphens=False) or [""]
    first = " " * 39 + lines[0] if len(head) > 38 else lines[0]
    print("\n".join([first, *(" " * 39 + line for line in lines[1:])]))
