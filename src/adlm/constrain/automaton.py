"""The token automaton of a regular expression: which tokens are allowed where, for a vocabulary of any size.

`outlines-core` builds the automaton over bytes. Here its edges become tokens: from each state every token is spelled
byte by byte. Tokens that the automaton cannot distinguish (from every state they lead to the same one) are one
*letter*. There are far fewer letters than tokens, and all later code works with letters.

A text may end before its sequence does. So there is one more state, END. An accepting state enters it by the
end-of-text token, and every token stays in it: what follows the end of a text is dropped, so it is not constrained.

A regular expression can have an automaton of any size (a{1000}{1000}), and the library sets no limit. So it runs in a
separate process, with a limit on time and memory.

The module starts with the pieces of regular expressions from which JSON is built.
"""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders

from adlm.data.tokenizers import Tokenizer, byte_characters
from adlm.errors import missing_extra, require

# ---- pieces of regular expressions -----------------------------------------------------------------------------------
# Pieces of regular expressions for JSON: texts, numbers between bounds, patterns inside quotes.

CHARACTER = r'(?:[^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])'
"""One character of a string, literal or as a short escape."""
NATURAL = "(?:0|[1-9][0-9]*)"
NUMBER = rf"-?{NATURAL}(?:\.[0-9]{{1,15}})?(?:[eE][+-]?[0-9]{{1,2}})?"
FRACTION = r"\.[0-9]{1,6}"
POSITIVE_FRACTION = r"\.[0-9]{0,3}[1-9][0-9]{0,2}"
ZERO_FRACTION = r"\.0{1,6}"


LONGEST = 100_000
"""Most characters of a regular expression."""


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
    """All numbers from low to high, without leading zeros: grouped by number of digits, then digit by digit."""
    options = []
    for digits in range(len(str(low)), (len(str(high)) if high is not None else len(str(low))) + 1):
        first, last = max(low, 10 ** (digits - 1) if digits > 1 else 0), 10**digits - 1
        options += same_length(str(first), str(last if high is None else min(high, last)))
    if high is None:
        options.append(f"[1-9][0-9]{{{len(str(low))},}}")
    return either(options)


def same_length(low: str, high: str) -> Iterator[str]:
    """Patterns of the numbers from low to high, which have the same number of digits."""
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
    """Decimal numbers between bounds that are whole numbers."""
    for bound in (low, high):
        if bound is not None and bound != int(bound):
            raise refuse(f"{place + '.' if place else ''}a bound of {bound} is not supported: whole numbers are")
    first, last = None if low is None else int(low), None if high is None else int(high)
    if first is not None and last is not None and (first > last or (first == last and (above or below))):
        raise refuse(f"{place or 'the schema'} has no number between its bounds")
    options = []
    if first is None or first < 0:
        least, out = (0, False) if last is None or last >= 0 else (-last, below)
        zero_too = last is None or last > 0 or (last == 0 and not below)
        sizes = magnitudes(least, out or (least == 0 and not zero_too), None if first is None else -first, above)
        options += ["-" + size for size in sizes]
    if last is None or last >= 0:
        least, out = (first, above) if first is not None and first >= 0 else (0, False)
        options += magnitudes(least, out, last, below)
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
"""What the classes expand to. A class that excludes spaces excludes all of SPACES, and `.` excludes LINES."""
LINES = "\u2028\u2029"
SPACES = f" \u00a0\u1680\u2000-\u200a{LINES}\u202f\u205f\u3000\ufeff"
PATTERN = re.compile(
    r"""\\(?P<kind>[dwsDWS]) | \\(?P<sign>[][.+*?(){}|^$/\-]) | (?P<any>\.) | \[(?P<not>\^?)(?P<set>(?:\\.|[^]\\"])+)\]
    | (?P<same>\(\?:|\((?!\?)|[)|?*+]|\{\d{1,4}(?:,\d{0,4})?\}|[^][\\"(){}^$.\x00-\x1f\x7f-\x9f])""",
    re.VERBOSE,
)


def string_pattern(pattern: Any, place: str) -> str:
    """A `pattern` for use between quotes: it matches no quote, backslash or control character. Without anchors,
    anything may come before and after."""
    if not isinstance(pattern, str):
        raise refuse(f"{place}.pattern must be a text")
    begun, ended = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    body, at, found = pattern[begun : len(pattern) - ended], 0, []
    while at < len(body):
        part = PATTERN.match(body, at)
        inside = plain_set(part["set"], SPACES if part["not"] else CLASSES["s"]) if part and part["set"] else ""
        if part is None or inside is None:
            raise refuse(
                f"{place + '.' if place else ''}pattern {pattern!r:.60} is not supported from {body[at:]!r:.20} on"
            )
        found.append(translated(part, inside))
        at = part.end()
    free = f"{CHARACTER}*"
    return f"{'' if begun else free}(?:{''.join(found)}){'' if ended else free}"


def plain_set(inside: str, spaces: str) -> str | None:
    """The inside of [...] with classes expanded; None if it holds something unsupported. A hyphen makes a range only
    between two single characters; any other sign is escaped, since Rust's sets have more operators (`&&`, `--`)."""
    parts = re.findall(r"\\(.)|(.)", inside, re.DOTALL)
    if any(escaped and not (escaped in CLASSES or escaped in r"][.+*?(){}|^$/-\&~") for escaped, _ in parts):
        return None
    if any(escaped == "\\" or plain in ("[", '"') for escaped, plain in parts):
        return None  # a quote or a backslash would have to be escaped in the string
    single = [None if escaped in CLASSES else in_set(escaped or plain) for escaped, plain in parts]
    found, at = "", 0
    while at < len(parts):
        ends = single[at], single[at + 2] if parts[at + 1 : at + 2] == [("", "-")] and at + 2 < len(parts) else None
        if None not in ends:
            found, at = f"{found}{ends[0]}-{ends[1]}", at + 3
        else:
            kind = parts[at][0]
            found, at = found + (single[at] or (spaces if kind == "s" else CLASSES[kind])), at + 1
    return found


def in_set(character: str) -> str:
    """A character escaped so that Rust's [...] reads it literally."""
    return "\\" + character if character in r"^-&~[]" else character


def translated(part: re.Match[str], inside: str) -> str:
    if part["kind"]:
        kind = part["kind"].lower()
        if part["kind"].islower():
            return f"[{CLASSES[kind]}]"
        return f"[^{SPACES if kind == 's' else CLASSES[kind]}{NOT_INSIDE}]"
    if part["sign"]:
        return literal(part["sign"])
    if part["any"]:
        return f"[^{LINES}{NOT_INSIDE}]"
    if part["set"]:
        return f"[^{inside}{NOT_INSIDE}]" if part["not"] else f"[{inside}&&[^{NOT_INSIDE}]]"
    return part["same"]


# ---- the automaton ---------------------------------------------------------------------------------------------------

SECONDS, MEMORY = 10, 1 << 29
"""Limits while an automaton is built. The memory limit stops a large one, at the same size on every machine; the time
limit leaves room for a slow or busy machine. JSON of any kind takes 1.5 s of CPU time and 290 MB."""
MOST_WORK = 1_000_000_000
"""Limit of states times bytes of the vocabulary."""
MOST_EDGES = 3_000_000
PROGRAM = f"""
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
    resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
except ImportError:
    pass
from outlines_core import Index, Vocabulary
try:
    index = Index(json.load(sys.stdin), Vocabulary(256, {{bytes([i]): [i] for i in range(256)}}))
except ValueError as error:
    print(json.dumps(str(error)))
else:
    edges = {{s: list(e.items()) for s, e in index.get_transitions().items()}}
    start = index.get_next_state(index.get_initial_state(), ord("\\n"))
    print(json.dumps([start, sorted(index.get_final_states()), edges]))
"""


@dataclass(frozen=True)
class ByteAutomaton:
    """An automaton over bytes: the next state by state and byte. The last state is dead: no match is possible there."""

    next_SB: NDArray[np.int32]
    start: int
    accepting_S: NDArray[np.bool_]


@functools.lru_cache(maxsize=64)
def byte_automaton(regex: str) -> ByteAutomaton:
    """The automaton of a regular expression (the whole text must match) in the syntax of Rust's `regex`."""
    require(len(regex) <= LONGEST, f"the regular expression has {len(regex)} characters, allowed are {LONGEST}")
    try:
        import outlines_core  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(missing_extra(error) or str(error)) from None
    command = [sys.executable, "-I", "-c", PROGRAM]
    # Anchor the end: otherwise the first alternative that matches hides longer ones, and a|ab is a. The library cannot
    # anchor a text that may be empty, so one character comes first. It is a line break, which `.` does not match: the
    # library also looks for matches that begin later, and in .{40} those could begin in 2^40 sets of places.
    anchored = f"\\n(?:{regex})\\z"
    try:
        done = subprocess.run(command, input=json.dumps(anchored), capture_output=True, text=True, timeout=4 * SECONDS)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode != 0 or not done.stdout:
        raise ValueError(f"the regular expression {regex!r:.60} is too large: its automaton takes too long or too much")
    found = json.loads(done.stdout)
    if isinstance(found, str):
        raise ValueError(f"not a regular expression that can be used: {regex!r:.60} ({found})")
    start, final, edges = found
    names = {name: i for i, name in enumerate(sorted({start, *final, *map(int, edges)}))}
    dead = len(names)
    next_SB = np.full((dead + 1, 256), dead, dtype=np.int32)
    for name, leaving in edges.items():
        for byte, target in leaving:
            if byte < 256:  # the library uses one more symbol for the end of a text
                next_SB[names[int(name)], byte] = names[target]
    accepting_S = np.zeros(dead + 1, dtype=bool)
    accepting_S[[names[name] for name in final]] = True
    return ByteAutomaton(next_SB, names[start], accepting_S)


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Edges (source, letter, target), sorted by source. Every state has at least one edge, and can reach a match."""

    start: int
    accepting_S: NDArray[np.bool_]
    """False for the last state, END, where a text has ended."""
    source_E: NDArray[np.int64]
    letter_E: NDArray[np.int64]
    target_E: NDArray[np.int64]
    letter_V: NDArray[np.int64]
    """Letter of each token. Tokens that lead nowhere have the last but one letter."""
    eos_id: int

    @property
    def end(self) -> int:
        return len(self.accepting_S) - 1

    @functools.cached_property
    def every(self) -> int:
        """The last letter, which stands for every token and stays in END. Before it come the letter of tokens that lead
        nowhere and, before that, the end-of-text token's."""
        return int(self.letter_E.max())

    @property
    def ended(self) -> int:
        """The letter of the end-of-text token."""
        return int(self.letter_V[self.eos_id])

    @functools.cached_property
    def first_S(self) -> NDArray[np.int64]:
        """Index of the first edge of each state."""
        return np.searchsorted(self.source_E, np.arange(len(self.accepting_S)))

    @functools.cached_property
    def order_V(self) -> NDArray[np.int64]:
        """Tokens sorted by letter."""
        return np.argsort(self.letter_V, kind="stable")

    def follow(self, state: int, token: int) -> int | None:
        """The state after a token; None if it leads nowhere."""
        if state == self.end:
            return state
        a, b = np.searchsorted(self.source_E, [state, state + 1])
        found = np.flatnonzero(self.letter_E[a:b] == self.letter_V[token])
        return int(self.target_E[a + found[0]]) if len(found) else None


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each token adds to a text, empty if none. Refuses a vocabulary whose tokens change with their
    neighbours."""
    backend, found = tokenizer.backend, [b""] * tokenizer.vocab_size
    decoder, vocab = backend.decoder, backend.get_vocab(with_added_tokens=False)
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    if isinstance(decoder, decoders.ByteLevel):
        spelled = {character: byte for byte, character in enumerate(byte_characters())}
        for token, i in vocab.items():
            if all(character in spelled for character in token):
                found[i] = bytes(spelled[character] for character in token)
    elif isinstance(decoder, decoders.Fuse):
        for token, i in vocab.items():
            found[i] = token.encode()
    else:
        kind = "spaces" if decoder is None else type(decoder).__name__
        raise ValueError(f"a constraint needs tokens that are pieces of text; {tokenizer.name!r} joins them by {kind}")
    for i, content in added.items():
        found[i] = content.encode()
    for i in tokenizer.special_ids:
        found[i] = b""
    return found


def lift(byte: ByteAutomaton, spelled: Sequence[bytes], eos_id: int) -> TokenAutomaton:
    """The automaton over tokens, given the bytes of each; `eos_id` ends a text."""
    S, lengths = len(byte.next_SB) - 1, np.array([len(b) for b in spelled])
    require(S * int(lengths.sum()) <= MOST_WORK, f"the constraint is too large for this vocabulary ({S} states)")
    tokens = np.flatnonzero(lengths > 0)
    targets = spell(byte, [spelled[v] for v in tokens.tolist()])
    # Tokens with the same targets from all states are one letter; random sums of 64 bits tell letters apart.
    random_S = np.random.default_rng(0).integers(0, 1 << 64, size=S, dtype=np.uint64)
    key = np.zeros(len(tokens), dtype=np.uint64)
    for s in range(S):
        key += random_S[s] * targets(s).astype(np.uint64)
    _, example, letter = np.unique(key, return_index=True, return_inverse=True)
    targets = spell(byte, [spelled[v] for v in tokens[example].tolist()])
    next_SC = np.stack([targets(s) for s in range(S)])
    return assemble(next_SC, byte, letter, tokens, len(spelled), eos_id)


def spell(byte: ByteAutomaton, spelled: Sequence[bytes]) -> Callable[[int], NDArray[np.int32]]:
    """A function that maps a state to the states that each text leads to."""
    dead, lengths = len(byte.next_SB) - 1, np.array([len(b) for b in spelled])
    order = np.argsort(-lengths, kind="stable")
    columns = [
        np.frombuffer(bytes(spelled[v][j] for v in order[: int((lengths > j).sum())].tolist()), dtype=np.uint8)
        for j in range(int(lengths.max(initial=0)))
    ]

    def targets(state: int) -> NDArray[np.int32]:
        found = np.full(len(spelled), dead, dtype=np.int32)
        alive, now = np.arange(len(spelled)), np.full(len(spelled), state, dtype=np.int32)
        for byte_n in columns:
            going = np.searchsorted(alive, len(byte_n))  # the others are fully spelled
            found[order[alive[going:]]] = now[going:]
            alive = alive[:going]
            now = byte.next_SB[now[:going], byte_n[alive]]
            alive, now = alive[now != dead], now[now != dead]
        found[order[alive]] = now
        return found

    return targets


def assemble(
    next_SC: NDArray[np.int32], byte: ByteAutomaton, letter: NDArray, tokens: NDArray, vocab_size: int, eos_id: int
) -> TokenAutomaton:
    """Keep the states that whole tokens reach from the start and that lead to a match, and renumber them."""
    S, C = next_SC.shape
    source, by = np.nonzero(next_SC < S)
    target = next_SC[source, by]
    live = byte.accepting_S[:S] & grown(np.arange(S) == byte.start, source, target)
    kept = grown(live, target, source) & grown(np.arange(S) == byte.start, source, target)
    require(bool(kept[byte.start]), "no text of this vocabulary matches the constraint")
    inside = kept[source] & kept[target]
    require(int(inside.sum()) <= MOST_EDGES, f"the constraint has {int(inside.sum())} edges, allowed are {MOST_EDGES}")
    number = np.cumsum(kept) - 1
    used = np.unique(by[inside])
    rename = np.full(C, len(used) + 1)  # nowhere
    rename[used] = np.arange(len(used))
    end, eos, none, every = int(kept.sum()), len(used), len(used) + 1, len(used) + 2
    accepting_S = np.append(byte.accepting_S[:S][kept], False)
    last = np.flatnonzero(accepting_S)
    edges = np.concatenate(
        [
            np.stack([number[source[inside]], rename[by[inside]], number[target[inside]]]),
            np.stack([last, np.full_like(last, eos), np.full_like(last, end)]),
            np.array([[end], [every], [end]]),
        ],
        axis=1,
    )
    edges = edges[:, np.argsort(edges[0], kind="stable")]
    letter_V = np.full(vocab_size, none)
    letter_V[tokens] = rename[letter]
    letter_V[eos_id] = eos
    return TokenAutomaton(int(number[byte.start]), accepting_S, edges[0], edges[1], edges[2], letter_V, eos_id)


def grown(marked: NDArray[np.bool_], source: NDArray, target: NDArray) -> NDArray[np.bool_]:
    """All states reached from the marked ones along edges."""
    marked = marked.copy()
    while True:
        more = marked.copy()
        more[target[marked[source]]] = True
        if (more == marked).all():
            return marked
        marked = more
