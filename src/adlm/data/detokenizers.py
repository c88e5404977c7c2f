"""Undo the tokenisation that some public corpora were published with, exactly as the public ADLM release does.

Perplexities are only comparable if the text is the same to the character, so each detokenizer is an ordered list of
replacements and nothing else. Raise VERSION whenever one changes: it is part of every cache name.
"""

import re
from collections.abc import Callable

from adlm.errors import choose

VERSION = 1

# (old, new) is a plain replacement; (compiled pattern, template) a regular expression.
Rule = tuple[str | re.Pattern[str], str]


def _spaced(marks: str) -> list[Rule]:
    """ " x " becomes "x " for each mark x."""
    return [(f" {mark} ", f"{mark} ") for mark in marks]


WIKITEXT: list[Rule] = [
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *_spaced(":;.!?,"),
    (re.compile(r"\(\s*([^)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r'"\s*([^"]*?)\s*"'), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]

PTB: list[Rule] = [
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    ("\\/", "/"),
    # Neighbouring numbers share a space, so one pass misses every second one of a run.
    *[(" N ", " 1 ")] * 10,
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
]

LM1B: list[Rule] = [
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "),
    (re.compile(r" (\w+) \.$"), r" \1."),
    (" ? ", "? "),
    (re.compile(r" \?$"), "?"),
    (" ! ", "! "),
    (re.compile(r" !$"), "!"),
    *_spaced(",:;"),
    (" / ", "/"),
    (re.compile(r'" ([^"]+) "'), r'"\1"'),
    (re.compile(r"' ([^']+) '"), r"'\1'"),
    (re.compile(r"\( ([^()]+) \)"), r"(\1)"),
    (re.compile(r"\[ ([^\[\]]+) \]"), r"[\1]"),
    ("$ ", "$"),
    ("£ ", "£"),
]


def apply(rules: list[Rule], text: str) -> str:
    """Every rule once, in order."""
    for old, new in rules:
        text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
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
