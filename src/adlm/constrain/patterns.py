"""Pieces of regular expressions for JSON: texts, numbers between bounds, patterns inside of quotes."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

CHARACTER = r'(?:[^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])'
"""One character of a string, written as it is or by a short escape."""
NATURAL = "(?:0|[1-9][0-9]*)"
NUMBER = rf"-?{NATURAL}(?:\.[0-9]{{1,15}})?(?:[eE][+-]?[0-9]{{1,2}})?"
FRACTION = r"\.[0-9]{1,6}"
POSITIVE_FRACTION = r"\.[0-9]{0,3}[1-9][0-9]{0,2}"
ZERO_FRACTION = r"\.0{1,6}"


def refuse(what: str) -> ValueError:
    return ValueError(f"response_format: {what}")


def literal(text: str) -> str:
    """A regular expression that matches this text alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", lambda found: "\\" + found[0], text)


def either(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


# Numbers between bounds


def integers(low: int | None, high: int | None) -> str:
    """All integers from low to high; None: no bound."""
    options = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        options.append("-" + naturals(least, None if low is None else -low))
    if high is None or high >= 0:
        options.append(naturals(max(0, low or 0) if low is not None else 0, high))
    return either(options)


def naturals(low: int, high: int | None) -> str:
    """All numbers from low to high, without leading zeros: by their number of digits, and digit by digit."""
    options = []
    for digits in range(len(str(low)), (len(str(high)) if high is not None else len(str(low))) + 1):
        first, last = max(low, 10 ** (digits - 1) if digits > 1 else 0), 10**digits - 1
        options += same_length(str(first), str(last if high is None else min(high, last)))
    if high is None:
        options.append(f"[1-9][0-9]{{{len(str(low))},}}")
    return either(options)


def same_length(low: str, high: str) -> Iterator[str]:
    """Patterns of the numbers from low to high, which have as many digits."""
    if low == high:
        yield low
    elif set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        yield f"[{low[0]}-{high[0]}]" + (f"[0-9]{{{len(low) - 1}}}" if low[1:] else "")
    elif low[0] == high[0]:
        yield from (low[0] + rest for rest in same_length(low[1:], high[1:]))
    else:
        zeros, nines = "0" * (len(low) - 1), "9" * (len(low) - 1)
        yield from (low[0] + rest for rest in same_length(low[1:], nines))
        if int(low[0]) + 1 < int(high[0]):
            yield from same_length(str(int(low[0]) + 1) + zeros, str(int(high[0]) - 1) + nines)
        yield from (high[0] + rest for rest in same_length(zeros, high[1:]))


def number_between(low: float | None, above: bool, high: float | None, below: bool, place: str) -> str:
    """Decimal numbers between whole bounds."""
    for bound in (low, high):
        if bound is not None and bound != int(bound):
            raise refuse(f"{place + '.' if place else ''}a bound of {bound} is not supported: whole numbers are")
    first, last = None if low is None else int(low), None if high is None else int(high)
    options = []
    if first is None or first < 0:
        least, out = (0, False) if last is None or last >= 0 else (-last, below)
        zero_too = last is None or last > 0 or (last == 0 and not below)
        sizes = magnitudes(least, out or (least == 0 and not zero_too), None if first is None else -first, above)
        options += ["-" + size for size in sizes]
    if last is None or last >= 0:
        least, out = (first, above) if first is not None and first >= 0 else (0, False)
        options += magnitudes(least, out, last, below)
    if not options:
        raise refuse(f"{place or 'the schema'} has no number between its bounds")
    return either(options)


def magnitudes(low: int, above: bool, high: int | None, below: bool) -> list[str]:
    """Numbers from low to high >= low >= 0: whole parts below high with any fraction, and high itself."""
    if low == high:
        return [] if above or below else [f"{low}(?:{ZERO_FRACTION})?"]
    found = [f"{low}{POSITIVE_FRACTION}"] if above else [f"{low}(?:{FRACTION})?"]
    if high is None or low + 1 <= high - 1:
        found.append(f"{naturals(low + 1, None if high is None else high - 1)}(?:{FRACTION})?")
    if high is not None and not below:
        found.append(f"{high}(?:{ZERO_FRACTION})?")
    return found


# Patterns of strings

NOT_INSIDE = r'"\\\x00-\x1F\x7F-\x9F'
CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " "}
PATTERN = re.compile(
    r"""\\(?P<kind>[dwsDWS]) | \\(?P<sign>[][.+*?(){}|^$/\-]) | (?P<any>\.) | \[(?P<not>\^?)(?P<set>(?:\\.|[^]\\"])+)\]
    | (?P<same>\(\?:|\((?!\?)|[)|?*+]|\{\d{1,4}(?:,\d{0,4})?\}|[^][\\"(){}^$.\x00-\x1f\x7f-\x9f])""",
    re.VERBOSE,
)


def string_pattern(pattern: Any, place: str) -> str:
    """A `pattern` as it may stand between quotes: no quote, backslash or control character comes out of it. One that
    is not anchored may have anything before and after."""
    if not isinstance(pattern, str):
        raise refuse(f"{place}.pattern must be a text")
    begun, ended = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    body, at, found = pattern[begun : len(pattern) - ended], 0, []
    while at < len(body):
        part = PATTERN.match(body, at)
        inside = plain_set(part["set"]) if part and part["set"] else ""
        if part is None or inside is None:
            raise refuse(
                f"{place + '.' if place else ''}pattern {pattern!r:.60} is not supported from {body[at:]!r:.20} on"
            )
        found.append(translated(part, inside))
        at = part.end()
    free = f"{CHARACTER}*"
    return f"{'' if begun else free}(?:{''.join(found)}){'' if ended else free}"


def plain_set(inside: str) -> str | None:
    """The inside of [...] with classes written out; None if it holds what we do not read."""
    parts = re.findall(r"\\(.)|(.)", inside)
    if any(escaped and not (escaped in CLASSES or escaped in r"][.+*?(){}|^$/-\&~") for escaped, _ in parts):
        return None
    if any(escaped == "\\" or plain in ("[", '"') for escaped, plain in parts):
        return None  # a quote or a backslash would have to be escaped in the string
    return "".join(CLASSES.get(e) or ("\\" + (e or plain) if e or plain in "&~" else plain) for e, plain in parts)


def translated(part: re.Match[str], inside: str) -> str:
    if part["kind"]:
        members = CLASSES[part["kind"].lower()]
        return f"[{members}]" if part["kind"].islower() else f"[^{members}{NOT_INSIDE}]"
    if part["sign"]:
        return literal(part["sign"])
    if part["any"]:
        return f"[^{NOT_INSIDE}]"
    if part["set"]:
        return f"[^{inside}{NOT_INSIDE}]" if part["not"] else f"[{inside}&&[^{NOT_INSIDE}]]"
    return part["same"]
