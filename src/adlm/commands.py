"""The table of commands: for each the function that does the work, and what the command line hands to it."""

from dataclasses import dataclass, field

from adlm.config.keys import PER_REQUEST, TRAINING, keys
from adlm.tables import GROUPS


@dataclass(frozen=True)
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
    flags: dict[str, str] = field(default_factory=dict)
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
    ruled: dict[str, str] = field(default_factory=dict)
    """Keys of those sections that it does not read -> the keys that rule in their place."""
    loads_torch: bool = True
    """Its work begins with seconds of importing, which it does not say itself."""

    @property
    def read_keys(self) -> list[str]:
        """Every key that the command reads, in the order of `reads`."""
        named = [*self.reads, *self.words, *(["out"] if self.out else [])]
        found = [key for part in named for key in keys() if part in (key, key.rpartition(".")[0])]
        return [key for key in dict.fromkeys(found) if key not in self.ruled]

    @property
    def groups(self) -> list[str]:
        """Groups that set something the command reads: of `data` its name, a corpus."""
        read = {key.rpartition(".")[0] for key in self.read_keys if not key.startswith("data.") or key == "data.name"}
        return [group for group in GROUPS if SECTION_OF.get(group, group) in read]


WHOLE = ("recipe", "algo", "experiment")
SECTION_OF = {"lr_scheduler": "optim", "task": "reason", "method": "reason"} | dict.fromkeys(WHOLE, "model")
"""Section that a group sets first of all, where it has another name."""
MODEL = ("eval.ema", "train.device", "data.tokenizer", "data.root")
"""Which weights of a checkpoint are loaded, and where."""
RANKS = ("train.device", "train.precision", "train.num_threads")
BOUND = (
    "eval.draws", "eval.block_length", "eval.estimator", "eval.sequences", "eval.ema", "eval.batch_size",
)  # fmt: skip
SERVED = tuple(key for key in keys() if key.startswith("sampling.") and key.rpartition(".")[2] not in PER_REQUEST)

TASK_FILES = ("data.path", "data.valid_path", "data.tokenizer", "data.root")
"""Of a reasoning task, which is no corpus: its examples, and its vocabulary."""

RESULT = "FILE.json of the result, or a folder for it (empty: beside the checkpoint; of the box: runs/box)"

COMMANDS: dict[str, Command] = {
    "demo": Command(
        "adlm.demo:run_demo",
        "train a nano model on this CPU in minutes, on the documentation inside Python or on your text (adlm demo"
        " my.txt), without downloads, and write a report for the browser",
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
        flags={"dry-run": "print model, tokens and memory, then stop; with gpus=64 gpu=h200 predict the run on these"},
        short="cluster",
        reads=(*TRAINING, "lora", "sampling", "cluster"),
    ),
    "finetune": Command(
        "adlm.finetuning:run_finetune",
        "fine-tune a trained model on your text, in minutes on a CPU, with a before/after report: adlm finetune my.txt;"
        " starts from the bundled model, or from init_from=FOLDER",
        words=("data.path",),
        line=True,
        defaults=("data=file",),
        short="checkpoint",
        reads=("seed", "out", "checkpoint", "lora", "data", "optim", "train", "sampling", *BOUND),
    ),
    "adapt": Command(
        "adlm.finetuning:run_adapt",
        "make a block-diffusion model of a causal one (a GGUF file, a Llama-type folder, a run of algo=ar): adlm adapt"
        " BASE my.txt, or data=NAME; anchored with algo=adlm. A model that was adapted before is trained on",
        words=("checkpoint.init_from", "data.path"),
        required=1,
        line=True,
        defaults=("data=file",),
        reads=(*TRAINING, "lora", "sampling"),
    ),
    "sample": Command(
        "adlm.api.command:run_sample",
        "draw texts from a model: unconditional, after a prompt or into a template; a rerun continues the file",
        words=("eval.checkpoint",),
        flags={"watch": "show one text appearing, live in the terminal"},
        out="jsonl file that samples are appended to as they are drawn; a rerun continues it (empty: only shown)",
        reads=("sampling", *MODEL),
    ),
    "score": Command(
        "adlm.api.command:run_score",
        "score a text under a model: adlm score 'some words' [CHECKPOINT] (or a file, @file, or - for standard input)",
        rest=True,
        defaults=("eval.draws=64",),
        reads=("eval.checkpoint", "eval.draws", *MODEL),
    ),
    "data": Command(
        "adlm.data.preparation:run_data",
        "list: the corpora; prepare [train] [valid]: tokenise and pack one, ready for training",
        rest=True,
        reads=("data", "model.length", "train.num_threads"),
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
        "train algorithms on one corpus with one budget, and compare bound, size, arithmetic and speed:"
        " adlm compare adlm mdlm adlm+objective.gamma=0.1+seed=2 ...; a rerun does what is missing",
        rest=True,
        line=True,
        defaults=("experiment=compare",),
        short="compare",
        reads=("compare", *TRAINING, *BOUND),
    ),
    "speedrun": Command(
        "adlm.compare:run_speedrun",
        "the shortest time to a bound on Wikipedia, by rules that make records comparable (docs/speedrun.md)",
        defaults=("experiment=speedrun",),
        reads=TRAINING,
    ),
    "bench": Command(
        "adlm.bench:run_bench",
        "train | sample: measure the speed of this machine, beside a reference implementation",
        rest=True,
        out="file that a JSON line for each batch size is appended to (empty: only printed)",
        reads=("bench", "algo", "seed", "model", "noise", "objective", "data.tokenizer", "optim", "train", "sampling"),
    ),
    "zeroshot": Command(
        "adlm.evaluation.perplexity:run_zeroshot",
        "perplexity on eight public data sets: adlm zeroshot CHECKPOINT [set ...], local copies below data.root",
        words=("eval.checkpoint",),
        rest=True,
        out=RESULT,
        reads=(*BOUND, "data", *RANKS),
    ),
    "anchors": Command(
        "adlm.evaluation.anchors:run_anchors",
        "which tokens of a text are anchors, and how both networks predict them when hidden: adlm anchors CHECKPOINT"
        " 'some words' (or a file, @file, or standard input)",
        words=("eval.checkpoint",),
        required=1,
        rest=True,
        out=RESULT,
        reads=("eval.draws", *MODEL),
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
        "a run, or any model that can be loaded -> an exported folder, to keep or to share: adlm export RUN FOLDER",
        words=("eval.checkpoint", "out"),
        required=2,
        flags={
            "transformers": "a folder that transformers' AutoModel classes load, too",
            "four-bit": "weights in 4.5 bits, a seventh of the size, fitted to the text that the model was trained on"
            " or to data=file data.path=my.txt",
        },
        defaults=("data=checkpoint",),
        out="exported folder",
        reads=(*MODEL, "data.name", "data.path", "data.text_key", "data.cache_dir"),
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
        "reasoning tasks. train: staged fine-tuning; eval RUN: answer test questions; ask RUN QUESTION: answer one;"
        " table RUN ..: compare runs with the paper; data: statistics of the questions",
        rest=True,
        defaults=("algo=ar", "model=nano", "task=prosqa", "method=acot"),
        reads=("reason", *(section for section in TRAINING if section != "data"), *TASK_FILES, "eval"),
        ruled={"train.steps": "reason.epochs", "checkpoint.init_from": "reason.base"},
    ),
    "serve": Command(
        "adlm.serving:run_serve",
        "answer requests over HTTP, with a page to watch text appear: adlm serve [CHECKPOINT ...] port=8000",
        rest=True,
        short="serve",
        reads=("serve", *SERVED, "sampling.batch_size", "eval.checkpoint", *MODEL, "train.num_threads"),
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
