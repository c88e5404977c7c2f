"""Every choice by name, in one place: name -> "module:attribute" of what it stands for.

Nothing is imported until a name is looked up, so the command line knows all names without loading torch. A package of
yours adds a name without touching this file, by an entry point of the group `adlm.<table>`, and YAML groups of its
folder configs/ by one of the group `adlm.configs` (docs/extending.md):

    [project.entry-points."adlm.samplers"]
    mine = "my_package.sampler:MySampler"

    [project.entry-points."adlm.configs"]
    mine = "my_package"  # algo=mine reads my_package/configs/algo/mine.yaml
"""

import functools
import importlib
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adlm.errors import choose

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@functools.cache
def installed() -> tuple["EntryPoint", ...]:
    """Entry points of the groups `adlm.*`, of any package. Read once for all groups, and not for `adlm --help`: a
    search of the whole environment takes some 20 ms."""
    from importlib.metadata import distributions

    return tuple(e for d in distributions() for e in d.entry_points if e.group.startswith("adlm."))


class Table(Mapping[str, str]):
    """Names of one kind of thing, with the place of each."""

    # Two tables are the same if they are one object; rules that hold a table can be hashed.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __init__(self, group: str, entries: dict[str, str]):
        self.group, self.entries = group, entries

    @functools.cached_property
    def targets(self) -> dict[str, str]:
        """Our own entries, then those of installed packages, which never replace ours."""
        others = {e.name: e.value for e in installed() if e.group == f"adlm.{self.group}"}
        return self.entries | {name: place for name, place in others.items() if name not in self.entries}

    def __getitem__(self, name: str) -> str:
        return self.targets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def load(self, name: str, key: str = "") -> Any:
        """What `name` stands for; an unknown one is refused with the nearest known. `key`: the setting to blame."""
        target = self.targets[choose(key or self.group, name, self.targets)]
        module, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:
            if name in self.entries:  # ours: a missing extra, which has its own message, or a bug, which is not hidden
                raise
            what = f"entry point {name} = {target!r} of the group adlm.{self.group}"
            raise ValueError(f"the {what} cannot be loaded ({type(error).__name__}: {error})") from error


class Group(Collection[str]):
    """A group of YAML files, each of which sets several keys: `algo=NAME` reads configs/algo/NAME.yaml."""

    def __init__(self, name: str):
        self.name = name

    @functools.cached_property
    def files(self) -> dict[str, Path]:
        """Name -> file; of two files of a name ours counts."""
        found = (path for folder in reversed(config_folders()) for path in (folder / self.name).glob("*.yaml"))
        return dict(sorted((path.stem, path) for path in found))

    def __contains__(self, name: object) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def chooses(self, name: str) -> set[str]:
        """Other groups of which the file chooses a name itself (`override /task: gsm8k` in its defaults)."""
        return set(re.findall(r"^\s*- override /(\w+):", self.files[name].read_text(encoding="utf-8"), re.MULTILINE))

    def help(self, name: str) -> str:
        """The first comment of the file, which says what it is."""
        for line in self.files[name].read_text(encoding="utf-8").splitlines():
            if line.startswith("# ") and "@package" not in line:
                return line.removeprefix("# ")
        return ""


@functools.cache
def config_folders() -> tuple[Path, ...]:
    """Folders of YAML groups: ours, then configs/ of the packages named by entry points `adlm.configs`."""
    found = [Path(__file__).parent / "configs"]
    for entry in installed():
        if entry.group != "adlm.configs":
            continue
        # Found without importing the package, which may load torch.
        spec = importlib.util.find_spec(entry.value.partition(".")[0])
        places = spec.submodule_search_locations if spec else None
        folder = Path(places[0], *entry.value.split(".")[1:], "configs") if places else None
        if folder is None or not folder.is_dir():
            what = f"entry point {entry.name} = {entry.value!r} of the group adlm.configs"
            raise ValueError(f"the {what} names no package with a folder configs/")
        found.append(folder)
    return tuple(found)


GROUPS = {
    name: Group(name)
    for name in (
        "model", "data", "noise", "optim", "lr_scheduler", "recipe", "algo", "sampling", "task", "method", "experiment",
    )
}  # fmt: skip
"""Later groups win over earlier ones: a corpus may set the length, a recipe may set the block, an algorithm is applied
on top of any recipe, and an experiment has the last word below the command line. configs/config.yaml keeps the same
order. `data` has also every corpus of the table (data/corpora.py)."""

ALGORITHMS = GROUPS["algo"]

CORPORA = Table(
    "corpora",
    {
        "pydocs": "adlm.data.corpora:PYDOCS",
        "file": "adlm.data.corpora:FILE",
        "prepared": "adlm.data.corpora:PREPARED",
        "checkpoint": "adlm.data.corpora:CHECKPOINT",
        "openwebtext": "adlm.data.corpora:OPENWEBTEXT",
        "openwebtext-train": "adlm.data.corpora:OPENWEBTEXT_TRAIN",
        "openwebtext-valid": "adlm.data.corpora:OPENWEBTEXT_VALID",
        "lm1b": "adlm.data.corpora:LM1B",
        "lm1b-gpt2": "adlm.data.corpora:LM1B_GPT2",
        "wikitext2": "adlm.data.corpora:WIKITEXT2",
        "wikitext103": "adlm.data.corpora:WIKITEXT103",
        "ptb": "adlm.data.corpora:PTB",
        "lambada": "adlm.data.corpora:LAMBADA",
        "ag_news": "adlm.data.corpora:AG_NEWS",
        "pubmed": "adlm.data.corpora:PUBMED",
        "arxiv": "adlm.data.corpora:ARXIV",
        "text8": "adlm.data.corpora:TEXT8",
        "text8-crop": "adlm.data.corpora:TEXT8_CROP",
        "tinystories": "adlm.data.corpora:TINYSTORIES",
        "fineweb-edu": "adlm.data.corpora:FINEWEB_EDU",
        "wikipedia": "adlm.data.corpora:WIKIPEDIA",
    },
)
"""Name -> a `Corpus` (data/corpora.py)."""

FORMATS = Table(
    "formats",
    {
        "auto": "adlm.data.formats:by_suffix",
        "lines": "adlm.data.formats:stripped_lines",
        "wikitext": "adlm.data.formats:wikitext_lines",
        "jsonl": "adlm.data.formats:jsonl",
        "scientific_papers": "adlm.data.formats:scientific_papers",
        "ag_news": "adlm.data.formats:ag_news_csv",
    },
)
"""Published format of a corpus' files -> a function (path, text_key) -> documents. A parquet or jsonl copy of any of
them is read by its suffix instead."""

DETOKENIZERS = Table(
    "detokenizers",
    {
        "none": "adlm.data.formats:unchanged",
        "wikitext": "adlm.data.formats:detokenize_wikitext",
        "ptb": "adlm.data.formats:detokenize_ptb",
        "lm1b": "adlm.data.formats:detokenize_lm1b",
        "lambada": "adlm.data.formats:detokenize_lambada",
        "scientific_papers": "adlm.data.formats:detokenize_scientific_papers",
    },
)
"""Name -> a function document -> document that undoes the tokenisation a corpus was published with."""

TOKENIZERS = Table(
    "tokenizers",
    {
        "gpt2": "adlm.data.tokenizers:gpt2",
        "bert-base-uncased": "adlm.data.tokenizers:bert_base_uncased",
        "text8": "adlm.data.tokenizers:text8_characters",
        "bytes": "adlm.data.tokenizers:raw_bytes",
    },
)
"""Name -> a function root -> `Tokenizer`; `root` is data.root, a folder that may hold vocabulary files. Beside these,
data.tokenizer may be bpe-N, a tokenizer.json or a folder."""

BRIDGES = Table(
    "bridges",
    {
        "linear": "adlm.models.bridge:LinearBridge",
        "none": "adlm.models.bridge:NoBridge",
    },
)

OBJECTIVES = Table(
    "objectives",
    {
        "anelbo": "adlm.objectives.nelbo:Anelbo",
        "nelbo": "adlm.objectives.nelbo:Nelbo",
        "d3pm": "adlm.objectives.baselines:D3pm",
        "score-entropy": "adlm.objectives.baselines:ScoreEntropy",
        "autoregressive": "adlm.objectives.baselines:Autoregressive",
    },
)

ANCHOR_RULES = Table(
    "anchor_rules",
    {
        "count": "adlm.objectives.anchors:count",
        "common": "adlm.objectives.anchors:common",
        "all": "adlm.objectives.anchors:every",
        "none": "adlm.objectives.anchors:none",
        "given": "adlm.objectives.anchors:given",
    },
)

SCHEDULES = Table(
    "schedules",
    {
        "loglinear": "adlm.diffusion.process:LogLinear",
        "linear": "adlm.diffusion.process:Linear",
        "geometric": "adlm.diffusion.process:Geometric",
        "cosine": "adlm.diffusion.process:Cosine",
        "cosine-squared": "adlm.diffusion.process:CosineSquared",
    },
)

SAMPLERS = Table(
    "samplers",
    {
        "mdlm": "adlm.samplers.scheduled:Mdlm",
        "remdm-cap": "adlm.samplers.scheduled:RemdmCap",
        "remdm-rescale": "adlm.samplers.scheduled:RemdmRescale",
        "remdm-loop": "adlm.samplers.scheduled:RemdmLoop",
        "remdm-conf": "adlm.samplers.reading:RemdmConf",
        "forward-backward": "adlm.samplers.scheduled:ForwardBackward",
        "dfm": "adlm.samplers.scheduled:Dfm",
        "ddpm": "adlm.samplers.scheduled:Ddpm",
        "analytic": "adlm.samplers.scheduled:Analytic",
        "score": "adlm.samplers.reading:ScoreSampler",
        "first-hitting": "adlm.samplers.scheduled:FirstHitting",
        "autoregressive": "adlm.samplers.scheduled:LeftToRight",
        "confidence": "adlm.samplers.reading:Confidence",
        "entropy": "adlm.samplers.reading:Entropy",
        "anchor-first": "adlm.samplers.reading:AnchorFirst",
    },
)

TASKS = Table(
    "tasks",
    {
        "prosqa": "adlm.reasoning.tasks:PROSQA",
        "prosqa-2hop": "adlm.reasoning.tasks:PROSQA_2HOP",
        "prosqa-7hop": "adlm.reasoning.tasks:PROSQA_7HOP",
        "prosqa-8hop": "adlm.reasoning.tasks:PROSQA_8HOP",
        "prosqa-balanced": "adlm.reasoning.tasks:PROSQA_BALANCED",
        "prosqa-terse": "adlm.reasoning.tasks:PROSQA_TERSE",
        "prosqa-terse-balanced": "adlm.reasoning.tasks:PROSQA_TERSE_BALANCED",
        "prontoqa": "adlm.reasoning.tasks:PRONTOQA",
        "gsm8k": "adlm.reasoning.tasks:GSM8K",
    },
)

METHODS = Table(
    "methods",
    {
        "cot": "adlm.reasoning.methods:COT",
        "no-cot": "adlm.reasoning.methods:NO_COT",
        "pause": "adlm.reasoning.methods:PAUSE",
        "acot": "adlm.reasoning.methods:ACOT",
        "acot-kept": "adlm.reasoning.methods:ACOT_KEPT",
        "acot-triple": "adlm.reasoning.methods:ACOT_TRIPLE",
        "icot": "adlm.reasoning.methods:ICOT",
        "coconut": "adlm.reasoning.methods:COCONUT",
        "coconut-double": "adlm.reasoning.methods:COCONUT_DOUBLE",
        "coconut-pause": "adlm.reasoning.methods:COCONUT_PAUSE",
    },
)
