"""Every choice by name, in one place: name -> "module:attribute" of what it stands for.

Nothing is imported until a name is looked up, so the command line knows all names without loading torch. A package of
yours adds a name without touching this file, by an entry point of the group `adlm.<table>` (docs/extending.md):

    [project.entry-points."adlm.samplers"]
    mine = "my_package.sampler:MySampler"
"""

import functools
import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from adlm.errors import choose


class Table(Mapping[str, str]):
    """Names of one kind of thing, with the place of each."""

    def __init__(self, group: str, entries: dict[str, str]):
        self.group, self.entries = group, entries

    @functools.cached_property
    def targets(self) -> dict[str, str]:
        """Our own entries, then those of installed packages."""
        return self.entries | {e.name: e.value for e in entry_points(group=f"adlm.{self.group}")}

    def __getitem__(self, name: str) -> str:
        return self.targets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def load(self, name: str, key: str = "") -> Any:
        """Import what `name` stands for; an unknown name is refused with the nearest known one. `key`: the setting."""
        module, _, attribute = self[choose(key or self.group, name, self)].partition(":")
        return getattr(importlib.import_module(module), attribute)


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
        "anelbo": "adlm.objectives.anelbo:Anelbo",
        "nelbo": "adlm.objectives.nelbo:Nelbo",
        "d3pm": "adlm.objectives.d3pm:D3pm",
        "score-entropy": "adlm.objectives.score_entropy:ScoreEntropy",
        "autoregressive": "adlm.objectives.autoregressive:Autoregressive",
    },
)

ANCHOR_RULES = Table(
    "anchor_rules",
    {
        "count": "adlm.objectives.anchors:count",
        "common": "adlm.objectives.anchors:common",
        "all": "adlm.objectives.anchors:every",
        "none": "adlm.objectives.anchors:none",
    },
)

SCHEDULES = Table(
    "schedules",
    {
        "loglinear": "adlm.diffusion.schedules:LogLinear",
        "linear": "adlm.diffusion.schedules:Linear",
        "geometric": "adlm.diffusion.schedules:Geometric",
        "cosine": "adlm.diffusion.schedules:Cosine",
        "cosine-squared": "adlm.diffusion.schedules:CosineSquared",
        "polynomial": "adlm.diffusion.schedules:Polynomial",
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
        "prosqa-balanced": "adlm.reasoning.tasks:PROSQA_BALANCED",
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
        "icot": "adlm.reasoning.methods:ICOT",
        "coconut": "adlm.reasoning.methods:COCONUT",
        "coconut-pause": "adlm.reasoning.methods:COCONUT_PAUSE",
    },
)
