"""Which settings `adlm evaluate` compares: the product of the lists of samplers, steps, temperatures and top_p.

One point of generative perplexity says little, since temperature buys it at the price of entropy; a sweep shows the
frontier. No tensors here: the command line checks every combination before torch is loaded.
"""

import itertools
from dataclasses import replace

from adlm import tables
from adlm.schema import EvalConfig, SamplingConfig


def settings_of(e: EvalConfig, base: SamplingConfig) -> list[SamplingConfig]:
    """Every combination once, in the order of the lists; an empty list means the value of `base`."""
    columns = (
        items(e.samplers, str, "eval.samplers") or [base.sampler],
        items(e.steps, int, "eval.steps") or [base.steps],
        items(e.temperatures, float, "eval.temperatures") or [base.temperature],
        items(e.top_ps, float, "eval.top_ps") or [base.top_p],
    )
    found = []
    for sampler, steps, temperature, top_p in itertools.product(*columns):
        # asked only where it matters: the sampler's class loads torch, and the command line comes here first
        if len(columns[1]) > 1 and not tables.SAMPLERS.load(sampler, "eval.samplers").steps_matter:
            steps = columns[1][0]
        c = replace(base, sampler=sampler, steps=steps, temperature=temperature, top_p=top_p)
        if c not in found:
            found.append(c)
    return found


def items(text: str, kind: type, key: str) -> list:
    """'0.8, 1' -> [0.8, 1.0]."""
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(kind(word))
        except ValueError:
            whole = "whole numbers" if kind is int else "numbers"
            raise ValueError(f"{key}={text}: {word!r} is not a number; give {whole} separated by commas") from None
    return found


def label(c: SamplingConfig) -> str:
    """What a setting is called in files and tables."""
    steps = f"-T{c.steps}" if tables.SAMPLERS.load(c.sampler).steps_matter else ""
    return f"{c.sampler}{steps}-temp{exact(c.temperature)}-p{exact(c.top_p)}"


def exact(number: float) -> str:
    """As short as it can be without being another number: samples are kept by label."""
    return short if float(short := f"{number:g}") == number else repr(number)
