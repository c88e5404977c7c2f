"""Undo the tokenisation that some public corpora were published with, exactly as the public ADLM release does.

Perplexities are only comparable if the text is the same to the character, so each detokenizer is an ordered list of
replacements and nothing else. Raise VERSION whenever one changes: it is part of every cache name.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from adlm.errors import choose

VERSION = 1


class Rule(NamedTuple):
    """Replace a string, or the matches of a pattern by a template."""

    old: str | re.Pattern[str]
    new: str
    needle: str = ""
    """Part of every match: most texts lack it, and looking for it is far cheaper than matching."""


def _spaced(marks: str) -> list[Rule]:
    """Close up the space before each mark."""
    return [Rule(f" {mark} ", f"{mark} ") for mark in marks]


WIKITEXT: list[Rule] = [
    Rule("s '", "s'"),
    Rule(" @-@ ", "-"),
    Rule(" @,@ ", ","),
    Rule(" @.@ ", "."),
    *_spaced(":;.!?,"),
    Rule(re.compile(r"\(\s*([^)]*?)\s*\)"), r"(\1)", "("),
    Rule(re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]", "["),
    Rule(re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}", "{"),
    Rule(re.compile(r'"\s*([^"]*?)\s*"'), r'"\1"', '"'),
    Rule(re.compile(r"'\s*([^']*?)\s*'"), r"'\1'", "'"),
    Rule("= = = =", "===="),
    Rule("= = =", "==="),
    Rule("= =", "=="),
    Rule(" ° ", "°"),
    Rule(" \n", "\n"),
    Rule("\n ", "\n"),
    Rule(" N ", " 1 "),
    Rule(" 's", "'s"),
]

PTB: list[Rule] = [
    Rule(" 's", "'s"),
    Rule("s ' ", "s' "),
    Rule(" n't", "n't"),
    Rule(" \n ", "\n"),
    Rule("\\/", "/"),
    # Neighbouring numbers share a space, so one pass misses every second one of a run.
    *[Rule(" N ", " 1 ")] * 10,
    Rule("$ 1", "$1"),
    Rule("# 1", "#1"),
    Rule("<unk>", "?"),
]

LM1B: list[Rule] = [
    Rule("http : / / ", "http://"),
    Rule("https : / / ", "https://"),
    Rule(re.compile(r" '(\w+)"), r"'\1", " '"),
    Rule(re.compile(r" (\w+) \. "), r" \1. ", " . "),
    Rule(re.compile(r" (\w+) \.$"), r" \1.", " ."),
    Rule(" ? ", "? "),
    Rule(re.compile(r" \?$"), "?", " ?"),
    Rule(" ! ", "! "),
    Rule(re.compile(r" !$"), "!", " !"),
    *_spaced(",:;"),
    Rule(" / ", "/"),
    Rule(re.compile(r'" ([^"]+) "'), r'"\1"', '" '),
    Rule(re.compile(r"' ([^']+) '"), r"'\1'", "' "),
    Rule(re.compile(r"\( ([^()]+) \)"), r"(\1)", "( "),
    Rule(re.compile(r"\[ ([^\[\]]+) \]"), r"[\1]", "[ "),
    Rule("$ ", "$"),
    Rule("£ ", "£"),
]


def apply(rules: list[Rule], text: str) -> str:
    """Every rule once, in order."""
    for old, new, needle in rules:
        if isinstance(old, str):
            text = text.replace(old, new)
        elif needle in text:
            text = old.sub(new, text)
    return text


def lambada(text: str) -> str:
    """Straight double quotes; one line break before the passage, none around it."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


DETOKENIZERS: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "wikitext": lambda text: apply(WIKITEXT, text),
    "ptb": lambda text: apply(PTB, text),
    "lm1b": lambda text: apply(LM1B, text),
    "lambada": lambda text: lambada(text),
    "scientific_papers": lambda text: apply(LM1B, apply(WIKITEXT, text)),
}


def get_detokenizer(name: str) -> Callable[[str], str]:
    return DETOKENIZERS[choose("detokenizer", name, DETOKENIZERS)]
