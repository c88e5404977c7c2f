"""Detokenizers: each replacement by hand, and their order where it shows."""

import pytest

from adlm.data.formats import LM1B_MARKS, WIKITEXT_MARKS, Replacement, replaced
from adlm.tables import DETOKENIZERS

CASES = [
    # ---- wikitext
    ("wikitext", " the dogs ' tails ", " the dogs' tails "),
    ("wikitext", "guest @-@ starring , 1 @,@ 000 , 2 @.@ 5", "guest-starring, 1,000, 2.5"),
    ("wikitext", "a : b ; c . d ! e ? f , g", "a: b; c. d! e? f, g"),
    ("wikitext", "x ( 24 in ) y [ a ] z { b }", "x (24 in) y [a] z {b}"),
    ("wikitext", 'became " lobster red " on', 'became "lobster red" on'),
    ("wikitext", "called ' red ' by", "called 'red' by"),
    ("wikitext", " = = = = Deep = = = = \n", " ==== Deep ====\n"),
    ("wikitext", " = = = Mid = = = \n", " === Mid ===\n"),
    ("wikitext", " = = Top = = \n", " == Top ==\n"),
    ("wikitext", " = Title = \n", " = Title =\n"),
    ("wikitext", "20 ° C", "20°C"),
    ("wikitext", "one \n two", "one\ntwo"),
    ("wikitext", "in N years", "in 1 years"),
    ("wikitext", "Teddy 's Story", "Teddy's Story"),
    ("wikitext", "", ""),
    # The plural rule comes before quotes are trimmed: it takes the opening quote of the second word.
    ("wikitext", "dogs ' a ' b", "dogs'a' b"),
    # ---- ptb
    ("ptb", "abc 's monday", "abc's monday"),
    ("ptb", "viewers ' opinions", "viewers' opinions"),
    ("ptb", "it was n't black", "it wasn't black"),
    ("ptb", "line one \n line two", "line one\nline two"),
    ("ptb", "profit\\/loss", "profit/loss"),
    ("ptb", "a N b", "a 1 b"),
    ("ptb", "N a N", "N a N"),
    ("ptb", "a N N N N N b", "a 1 1 1 1 1 b"),
    ("ptb", "a $ N b and # N c", "a $1 b and #1 c"),
    ("ptb", "<unk> said <unk>", "? said ?"),
    # ---- lm1b
    ("lm1b", "see http : / / a.b and https : / / c.d", "see http://a.b and https://c.d"),
    ("lm1b", "it 's and they 'll", "it's and they'll"),
    ("lm1b", "one . Two three .", "one . Two three."),
    ("lm1b", "go one . Two three .", "go one. Two three."),
    ("lm1b", "at 5 p.m . today", "at 5 p.m . today"),
    ("lm1b", "really ? Yes ! Really ?", "really? Yes! Really?"),
    ("lm1b", "stop !", "stop!"),
    ("lm1b", "a , b : c ; d", "a, b: c; d"),
    ("lm1b", "and / or", "and/or"),
    ("lm1b", '" house arrest , " saying', '"house arrest," saying'),
    ("lm1b", "( a ) [ b ]", "(a) [b]"),
    ("lm1b", "at $ 2,900 or £ 30", "at $2,900 or £30"),
    # ---- lambada
    ("lambada", "  “Yes,” he said. \n", '\n"Yes," he said.'),
    ("lambada", "a ‘b’ c", "\na ‘b’ c"),
    # ---- none
    ("none", " anything ( at all ) ", " anything ( at all ) "),
]


@pytest.mark.parametrize(("name", "before", "after"), CASES)
def test_by_hand(name, before, after):
    assert DETOKENIZERS.load(name)(before) == after


def test_scientific_papers_is_wikitext_then_lm1b():
    text = 'cost of $ 5 @.@ 2 ( see ref . ) and / or it \'s " so " \n next , one .'
    both = DETOKENIZERS.load("lm1b")(DETOKENIZERS.load("wikitext")(text))
    assert DETOKENIZERS.load("scientific_papers")(text) == both
    assert both == 'cost of $5.2 (see ref.) and/or it\'s "so"\nnext, one.'


def test_ptb_rewrites_ten_times_and_no_more():
    run = " ".join(["N"] * 30)
    assert DETOKENIZERS.load("ptb")(f"a {run} b").count("1") == 30, "overlapping runs need two passes, not more"


def test_unknown_name():
    with pytest.raises(ValueError, match="did you mean 'wikitext'"):
        DETOKENIZERS.load("wikitxt")


def test_needles_only_save_time():
    """A replacement's needle must be in every text its pattern matches: leaving needles out changes nothing."""
    texts = [before for _, before, _ in CASES] + [before + "\n" for _, before, _ in CASES]
    for rules in (WIKITEXT_MARKS, LM1B_MARKS):
        slow = [Replacement(rule.old, rule.new) for rule in rules]
        assert [replaced(rules, text) for text in texts] == [replaced(slow, text) for text in texts]
