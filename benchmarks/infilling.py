"""How well does a model fill holes in unseen sentences? Exact matches, and the likelihood under a judge.

    python benchmarks/infilling.py MODEL [MODEL ...] --texts held-out.jsonl --judge FOLDER [--sentences 200] [--hole 5]

The sentences are up to two of each document of `--texts`, in order, with 12 to 40 words. The hole is `--hole` tokens of
the judge's tokenizer that are whole words, somewhere inside. A diffusion model reads both sides of the hole and gets
the number of its own tokens that are missing; it fills in the most confident token first. A causal model continues the
left side with as many tokens and never sees the right side. All are greedy. The judge, a causal model, scores the
whole sentences, and also the original ones.

Prints one line per model, and one JSON document at the end (`--out` writes it, with all fillings, to a file).
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from adlm.api.language_model import LanguageModel, load  # noqa: E402
from adlm.data.formats import read  # noqa: E402
from adlm.evaluation.judge import Judge, JudgedText, open_judge, score_texts  # noqa: E402
from adlm.io.paths import pick_device  # noqa: E402
from adlm.reasoning.answers import wilson  # noqa: E402

WORDS = range(12, 41)
"""Numbers of words that a sentence may have."""
BATCH = 16
UNSURE = 2.0
"""A confidence threshold that is never reached, so that every evaluation fills in one token."""


class Hole(NamedTuple):
    """A sentence in three parts; the middle part begins with a space."""

    left: str
    middle: str
    right: str


def sentences(documents: Iterable[str]) -> Iterator[str]:
    """The second and third sentences of each document that are neither short nor long, nor look like a template."""
    for document in documents:
        parts = re.split(r"(?<=[.!?])\s+", document)
        fit = (s for s in parts if len(s.split()) in WORDS and s.isprintable() and "[" not in s and s[-1] in ".!?")
        yield from list(fit)[1:3]


def cut(sentence: str, judge: Judge, tokens: int, chance: random.Random) -> Hole | None:
    """A hole of `tokens` tokens between whole words; None if there is no room for one."""
    starts = [match.start() for match in re.finditer(r" (?=\w)", sentence)]
    found = []
    for i, a in enumerate(starts[1:-1], 1):
        fit = [b for b in starts[i + 1 :] if len(judge.encode(sentence[a:b])) == tokens]
        found += [Hole(sentence[:a], sentence[a:b], sentence[b:]) for b in fit[:1]]
    return chance.choice(found) if found else None


def fill(lm: LanguageModel, holes: list[Hole]) -> list[str]:
    """The model's text for each hole."""
    numbers = [len(lm.tokenizer.encode(hole.middle)) for hole in holes]
    if lm.model.config.causal:
        texts = [
            lm.generate(prompt=hole.left, max_new_tokens=n, temperature=0.0)[0].text for hole, n in zip(holes, numbers)
        ]
        return [text.removeprefix(hole.left) for text, hole in zip(texts, holes)]
    templates = [f"{hole.left} [MASK:{n}]{hole.right}" for hole, n in zip(holes, numbers)]
    most = max(numbers)
    how: dict[str, Any] = {"sampler": "confidence", "threshold": UNSURE, "temperature": 0.0, "steps": most}
    drawn = lm.generate(templates, batch_size=BATCH, **how)
    return [one.text.removeprefix(hole.left).removesuffix(hole.right) for one, hole in zip(drawn, holes)]


def perplexity(judge: Judge, texts: list[str]) -> float:
    ids = [judge.encode(text) for text in texts]
    scored = score_texts(judge, [JudgedText([judge.start_id, *i], [False, *[True] * len(i)]) for i in ids], BATCH)
    return float(np.exp(scored.nats_N.sum() / scored.tokens_N.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--judge", required=True)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--hole", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    device, chance = pick_device(args.device), random.Random(0)
    judge = open_judge(args.judge, device)
    cuts = (cut(s, judge, args.hole, chance) for s in sentences(read(Path(args.texts), "auto", "text")))
    holes = [hole for _, hole in zip(range(args.sentences), (hole for hole in cuts if hole is not None))]
    print(f"{'model':30} {'sentences':>9} {'exact, %':>9} {'interval':>13} {'judge perplexity':>17}")
    rows = [{"model": "the text itself", "judge_perplexity": perplexity(judge, ["".join(hole) for hole in holes])}]
    print(f"{'the text itself':30} {len(holes):9} {'':>9} {'':>13} {rows[0]['judge_perplexity']:17.2f}")
    for name in args.models:
        filled = fill(load(name, str(device)), holes)
        exact = sum(text.strip() == hole.middle.strip() for text, hole in zip(filled, holes))
        low, high = wilson(exact, len(holes))
        value = perplexity(judge, [hole.left + text + hole.right for text, hole in zip(filled, holes)])
        row = {"model": name, "sentences": len(holes), "exact": exact, "interval": [low, high]}
        rows.append(row | {"judge_perplexity": value, "filled": filled})
        interval = f"{100 * low:.1f} to {100 * high:.1f}"
        print(
            f"{name[-30:]:30} {len(holes):9} {100 * exact / len(holes):9.1f} {interval:>13} {value:17.2f}", flush=True
        )
    if args.out:
        result = {"texts": Path(args.texts).name, "judge": judge.facts, "hole": args.hole}
        result |= {"holes": [hole._asdict() for hole in holes], "rows": rows}
        Path(args.out).write_text(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
