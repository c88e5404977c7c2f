"""Texts that must match: each step has exactly the distribution of rejection sampling, by enumeration; the automaton
accepts exactly the texts of its regular expression."""

import functools
import itertools
import math
import re
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from chance import LEVEL, chi_square
from dense_blocks import DenseBlocks
from dense_loop import DEFAULTS, Walk, rates_of
from references import REFERENCES
from tiny import tiny_model
from toy import ToyModel
from vocabularies import words

pytest.importorskip("outlines_core", reason="needs the extra `constrain` (outlines-core)")

from adlm.constrain.automaton import TokenAutomaton, byte_automaton, lift, token_bytes
from adlm.constrain.matching import Constraint, backward, indicator
from adlm.data.tokenizers import raw_bytes
from adlm.engine import Engine, Request
from adlm.samplers.base import make_sampler
from adlm.schema import SamplingConfig

# Tokens of the toy: two letters, one token of both, the end of a text, the mask
SPELLED, EOS, MASK = [b"a", b"b", b"ab", b"", b""], 3, 4
ROWS = 400


@functools.cache
def constraint_of(regex: str) -> Constraint:
    return Constraint(lift(byte_automaton(regex), SPELLED, EOS), "the constraint")


def matches(regex: str, row, span: tuple[int, int], given=()) -> bool:
    """Whether a finished row matches, and does not end before what was given: by Python's own regular expressions."""
    first, last = span
    tokens = list(row[first:last])
    if last == len(row) and EOS in tokens:
        if any(first + tokens.index(EOS) < l < last for l in given):
            return False
        tokens = tokens[: tokens.index(EOS)]
    if any(t in (EOS, MASK) for t in tokens):
        return False
    return re.fullmatch(regex, b"".join(SPELLED[t] for t in tokens).decode()) is not None


class ConstrainedWalk(Walk):
    """A dense loop in which every step draws all masked positions of the block in work, rejects what cannot match, and
    keeps those that are revealed."""

    def __init__(self, model, start, regex: str, block: int = 0):
        super().__init__(model, start, record=False)
        self.regex, self.block, self.span = regex, block or len(start), (self.holes[0], self.holes[-1] + 1)
        self.possible = functools.cache(self.possible)
        self.all_holes = self.holes
        self.given = [l for l, token in enumerate(start) if token != MASK]

    def possible(self, row) -> bool:
        """Whether the masks of a row can be filled so that it matches."""
        if MASK not in row:
            return matches(self.regex, row, self.span, self.given)
        l = row.index(MASK)
        return any(self.possible((*row[:l], v, *row[l + 1 :])) for v in range(MASK))

    def step(self, number, choose) -> None:
        new: dict = defaultdict(float)
        for (z, memory, seen), prob in self.states.items():
            p = self.model.p(z)
            masked = self.masked(z)
            fills = []
            for tokens in itertools.product(range(MASK), repeat=len(masked)):
                row = list(z)
                for l, v in zip(masked, tokens):
                    row[l] = v
                if self.possible(tuple(row)):
                    fills.append((tokens, math.prod(p[l][v] for l, v in zip(masked, tokens))))
            total = sum(w for _, w in fills)
            for q, reveal, remask in choose(z, memory):
                for tokens, weight in fills if q else ():
                    row = list(z)
                    for l in remask:
                        row[l] = MASK
                    for l, v in zip(masked, tokens):
                        row[l] = v if l in reveal else MASK
                    new[tuple(row), memory, seen] += prob * q * weight / total
        self.states = dict(new)

    def run(self, c: SamplingConfig) -> dict:
        """The distribution of the finished row, block after block."""
        for start in range(0, max(self.all_holes) + 1, self.block):
            self.holes = [l for l in self.all_holes if start <= l < start + self.block]
            for number, choose in enumerate(REFERENCES.get(c.sampler, rates_of)(self, c) if self.holes else ()):
                self.step(number, choose)
        return self.finals()


def settings_of(sampler: str, T: int, **more) -> SamplingConfig:
    return SamplingConfig(sampler=sampler, steps=T, **(DEFAULTS | more))


def drawn(model, start, regex: str, c: SamplingConfig, rows: int = ROWS) -> list[tuple[int, ...]]:
    requests = (Request(list(start), c, s, constraint=constraint_of(regex)) for s in range(rows))
    return [tuple(r.tokens) for r in Engine(model, slots=500).run(requests)]


def compare(observed, expected: dict) -> float:
    counts = Counter(observed)
    assert set(counts) <= set(expected), "an outcome the dense loop never produces"
    return chi_square([counts[k] for k in expected], list(expected.values()))


M = MASK
# Free, with text in between, with text after the end (then nothing may end early), with a prompt
CANVASES = {"free": (M, M, M), "between": (M, 0, M), "closed": (0, M, M, 1)}


@pytest.mark.parametrize("T", [3])
@pytest.mark.parametrize("canvas", CANVASES)
@pytest.mark.parametrize("sampler", ["mdlm", "remdm-loop", "first-hitting", "confidence"])
def test_a_step_is_rejection_sampling(sampler, canvas, T, record_property):
    start, regex = CANVASES[canvas], "a(ba)*|b?a?|bab?"
    model = ToyModel(vocab_size=5, length=len(start), seed=3)
    c = settings_of(sampler, T)
    expected = ConstrainedWalk(model, start, regex).run(c)
    p = compare(drawn(model, start, regex, c), expected)
    record_property("p_value", p)
    assert all(matches(regex, row, (start.index(M), len(start) - start[::-1].index(M))) for row in expected)
    assert p > LEVEL, (sampler, canvas, p)


def test_the_law_can_fail():
    """Ignoring what stays masked (any completion counts the same) is another distribution, and it is noticed."""
    start, regex, c = (M, M, M), "a(ba)*|b?a?|bab?", settings_of("first-hitting", 3)
    model = ToyModel(vocab_size=5, length=3, seed=3, scale=3.0)
    walk = ConstrainedWalk(model, start, regex)
    other = ToyModel(vocab_size=5, length=3, seed=3, scale=3.0)
    with torch.no_grad():  # the same predictions where it draws, others where it does not look
        other.table += torch.randn(other.table.shape, generator=torch.Generator().manual_seed(1))
    counts, expected = Counter(drawn(other, start, regex, c)), walk.run(c)
    assert chi_square([counts[k] for k in expected], list(expected.values())) < 1e-6


@pytest.mark.parametrize("sampler", ["mdlm", "first-hitting", "remdm-cap"])
@pytest.mark.parametrize("K", [1, 2])
def test_blocks_carry_the_automaton(K, sampler, record_property):
    """Inside a block, rejection sampling; what comes after it only has to remain possible."""
    model = tiny_model(5, MASK, length=4, block_length=str(K), anchored=False, seed=5)
    start, regex = (1, M, M, M), "(ab)*a?|b(ab)?"
    c = settings_of(sampler, 2, block_length=K)
    expected = ConstrainedWalk(DenseBlocks(model, K), start, regex, block=K).run(c)
    p = compare(drawn(model, start, regex, c), expected)
    record_property("p_value", p)
    assert p > LEVEL, (K, sampler, p)


def test_windows_carry_the_automaton():
    """A text longer than the model, window by window: all of it matches, and the last window ends it."""
    model, regex = ToyModel(vocab_size=5, length=4, seed=2), "(abb)*a?"
    c = settings_of("mdlm", 3, stride=2)
    for row in drawn(model, (M,) * 8, regex, c, 100):
        assert matches(regex, row, (0, 8)), row


def test_windows_leave_room_for_what_is_given_after_them():
    """What a window may become depends on the tokens that are given beyond it, and not on their number alone."""
    model, regex = ToyModel(vocab_size=5, length=4, seed=2), "b{6}[ab]*|a{6}[ab]*"
    found = drawn(model, (M, M, M, M, 0, 0, M, M), regex, settings_of("mdlm", 3, stride=2), 50)
    for row in found:
        assert row[:6] == (0,) * 6 and matches(regex, row, (0, 8), (4, 5)), row


@pytest.mark.parametrize("sampler", ["mdlm", "confidence", "remdm-conf", "entropy", "anchor-first", "dfm"])
def test_temperature_zero_takes_the_most_probable_text_that_matches(sampler):
    model, regex = ToyModel(vocab_size=5, length=3, seed=4), "a(ba)*|bb"
    p = model.p((M, M, M))
    rows = [r for r in itertools.product(range(MASK), repeat=3) if matches(regex, r, (0, 3))]
    best = max(rows, key=lambda row: math.prod(p[l][v] for l, v in enumerate(row)))
    if sampler == "mdlm":
        assert set(drawn(model, (M, M, M), regex, settings_of("mdlm", 1, temperature=0.0), 20)) == {best}
    for row in drawn(model, (M, M, M), regex, settings_of(sampler, 3, temperature=0.0), 20):
        assert matches(regex, row, (0, 3))


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.4}, {"min_p": 0.9}])
def test_filtered_tokens_are_taken_only_where_nothing_else_matches(filters):
    """One step: of the texts that match, those with fewest filtered tokens, by their own probabilities."""
    model, start, regex = ToyModel(vocab_size=5, length=3, seed=6), (M, M, M), "a(ba)*|b?a?|bab?"
    from adlm.diffusion.random import filter_logits

    logits = model.table[model.code(torch.tensor([start]))[0]].detach().clone()
    logits[:, MASK] = -torch.inf
    kept, plain = filter_logits(logits, **filters).exp(), logits.softmax(-1)
    weights = {}
    for row in itertools.product(range(MASK), repeat=3):
        if matches(regex, row, (0, 3)):
            # after the end of a text tokens are as they come
            lost = sum(kept[l, v] == 0 for l, v in enumerate(row))
            weights[row] = (int(lost), math.prod(float(kept[l, v] or plain[l, v]) for l, v in enumerate(row)))
    fewest = min(n for n, _ in weights.values())
    best = {row: w for row, (n, w) in weights.items() if n == fewest}
    expected = {row: w / sum(best.values()) for row, w in best.items()}
    assert compare(drawn(model, start, regex, settings_of("mdlm", 1, **filters), 300), expected) > LEVEL


def test_what_nothing_can_match_is_refused_before_the_first_step():
    model = ToyModel(vocab_size=5, length=3)
    for start, regex, says in [
        ((M, M, M), "a{7}", "no text of 3 tokens or fewer matches"),
        ((0, M, M), "b{5}", "no text of 2 tokens or fewer matches"),
        ((M, 1, M), "a+", "matches with the 1 tokens that are given between its holes"),
        ((M, M, 0), "", "no text of 2 tokens matches"),
    ]:
        with pytest.raises(ValueError, match=says):
            Engine(model).check(Request(list(start), SamplingConfig(), constraint=constraint_of(regex)))
    with pytest.raises(ValueError, match="no text of 3 tokens or fewer"):
        Engine(model).check(Request([M] * 3, SamplingConfig(), banned=[[0], [2]], constraint=constraint_of("a+b?")))
    with pytest.raises(ValueError, match="which says itself what must appear"):
        Engine(model).check(Request([M] * 3, SamplingConfig(), required=[[0]], constraint=constraint_of("a+b?")))
    with pytest.raises(ValueError, match="only single tokens can be banned"):
        Engine(model).check(Request([M] * 3, SamplingConfig(), banned=[[0, 1]], constraint=constraint_of("a+b?")))
    assert model.calls == 0


# ---- The automaton


@pytest.mark.parametrize("regex", ["a(ba)*|b?a?", "(a|b)*abb", "", "a{2,4}", "(aa)*(bb)*", "a|ab", "b?a?|bab?"])
def test_the_token_automaton_accepts_exactly_the_texts_of_its_expression(regex):
    a = constraint_of(regex).automaton
    for n in range(6):
        for row in itertools.product(range(3), repeat=n):
            state = a.start
            for token in row:
                state = None if state is None else a.follow(state, token)
            accepted = state is not None and bool(a.accepting_S[state])
            assert accepted == (re.fullmatch(regex, b"".join(SPELLED[t] for t in row).decode()) is not None), row


@pytest.mark.parametrize("make", [raw_bytes, words])
def test_letters_say_what_the_librarys_own_index_says(make):
    """State by state and token by token, for real vocabularies."""
    from outlines_core import Index, Vocabulary

    tok = make()
    regex, spelled = r'\{"name": "[^"\\\x00-\x1f]{0,4}", "n": -?[0-9]{1,3}(, "é": (true|null))?\}', token_bytes(tok)
    ours: TokenAutomaton = lift(byte_automaton(regex), spelled, tok.eos_id)
    tokens = defaultdict(list)
    for i, text in enumerate(spelled):
        if text:
            tokens[text].append(i)
    theirs = Index(f"(?:{regex})\\z", Vocabulary(tok.eos_id, dict(tokens)))
    edges, final = theirs.get_transitions(), set(theirs.get_final_states())
    pairs, seen = [(ours.start, theirs.get_initial_state())], {}
    while pairs:
        a, b = pairs.pop()
        if a in seen:
            assert seen[a] == b
            continue
        seen[a] = b
        assert bool(ours.accepting_S[a]) == (b in final)
        for token in range(tok.vocab_size):
            after = ours.follow(a, token)
            if after == ours.end:
                assert token == tok.eos_id and b in final
            elif after is not None:
                pairs.append((after, edges[b][token]))
            else:
                assert (
                    token == tok.eos_id or token not in edges.get(b, {}) or not leads_on(edges, final, edges[b][token])
                )
    assert len(seen) == len(ours.accepting_S) - 1


def leads_on(edges, final, state, seen=None) -> bool:
    seen = seen or set()
    return state in final or any(
        target not in seen and leads_on(edges, final, target, seen | {target})
        for target in set(edges.get(state, {}).values())
    )


def test_a_message_of_every_edge_is_the_dense_sum():
    """Backward messages against matrices of all states, in numbers that doubles cannot hold."""
    a = constraint_of("(a|ab)*b{0,3}a").automaton
    rng, S = np.random.default_rng(0), len(constraint_of("(a|ab)*b{0,3}a").automaton.accepting_S)
    mass = np.log(rng.random((6, a.every + 1))) - 2000
    found = backward(a, mass, indicator(a.accepting_S))
    expected = indicator(a.accepting_S)
    for l in reversed(range(6)):
        sums = np.full(S, -np.inf)
        for s, c, t in zip(a.source_E, a.letter_E, a.target_E):
            sums[s] = np.logaddexp(sums[s], mass[l, c] + expected[t])
        expected = sums
        np.testing.assert_allclose(found[l], expected)


@pytest.mark.parametrize("regex", ["a(ba)*|b?a?", "(aa)*b", "a{2,4}", "(a|ab)*b{0,3}a"])
@pytest.mark.parametrize("closed", [False, True])
def test_what_may_follow_on_other_canvases_is_every_fill(regex, closed):
    """Which states lead to a match by the holes and given tokens that are left: by enumeration."""
    constraint = constraint_of(regex)
    a = constraint.automaton
    for after in [(), (M,), (M,) * 2, (M,) * 5, (M, 0, M), (1, M), (M, 2, M, M)]:
        for banned in ([], [0]):
            asked = (M, *after, *((0,) if closed else ()))
            if closed and after and after[-1] != M:
                continue
            later = [(v,) if v != M else tuple(t for t in range(M) if t not in banned) for v in after]
            found = constraint.span(asked, asked, M, 0, 1).end([*banned, M])
            for state in range(len(a.accepting_S)):
                ends = {state}
                for tokens, given in zip(later, after):  # a text that has ended would hide what is given behind it
                    going = ends if given == M else ends - {a.end}
                    ends = {a.follow(s, t) for s in going for t in tokens} - {None}
                right = any(a.accepting_S[s] or (s == a.end and not closed) for s in ends)
                assert (found[state] == 0) == right, (after, banned, state)


def test_an_automaton_that_would_be_endless_is_refused():
    with pytest.raises(ValueError, match="is too large"):
        byte_automaton("(a|b)*a(a|b){60}")
    for bad in ("(", r"\bx", "(?=a)b"):
        with pytest.raises(ValueError, match="not a regular expression that can be used"):
            byte_automaton(bad)


@pytest.mark.parametrize("regex", [".{40}", "The .{0,60}", "[A-Z].{0,80}[.]", ""])
def test_a_long_free_part_is_small(regex):
    """So many characters are so many states; the library took 2^n for them, as it also looks for later beginnings."""
    a = byte_automaton(regex)
    assert len(a.next_SB) < 1000
    for text in ("The end.", "The e", "x" * 40, "é" * 40, "x" * 41, "Th", "", "a\nb"):
        state = a.start
        for byte in text.encode():
            state = a.next_SB[state, byte]
        assert a.accepting_S[state] == (re.fullmatch(regex, text) is not None), text


def test_remasked_positions_stay_completable():
    """Whatever a sampler masks again, every canvas the network sees can be completed, and given tokens never change."""
    model, regex, start = ToyModel(vocab_size=5, length=4, seed=8), "a(ba)*b?|b(a|b)", (M, M, 1, M)
    walk = ConstrainedWalk(model, start, regex)

    class Watched(Engine):
        def call(self, group, canvases, length):
            for i in group:
                row = tuple(self.window_tokens(i))
                assert walk.possible(row) and row[2] == 1
            return super().call(group, canvases, length)

    for sampler in ("remdm-loop", "remdm-conf", "forward-backward", "dfm", "ddpm", "analytic", "score"):
        c = settings_of(sampler, 6)
        assert make_sampler(c, Engine(model).schedule)
        for r in Watched(model, slots=50).run(
            Request([*start], c, s, constraint=constraint_of(regex)) for s in range(50)
        ):
            assert matches(regex, r.tokens, (0, 4))
