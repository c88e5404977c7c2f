"""What can be said about samples without a judge: one number per sample, so that one bootstrap serves them all.

Generative perplexity alone is easily fooled: low temperature, loops inside a text, or the same good text again and
again. Entropy and distinct-n see the first two, `shared` the third.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from adlm.evaluation.bootstrap import Interval, bootstrap_mean

NGRAMS = (1, 2, 3)
SHARED = 4
DEFINITIONS = {
    "entropy": "entropy in nats of a sample's own histogram of tokens (the whole row, ends included), mean over"
    " samples; as in the public release",
    **{f"distinct_{n}": f"distinct {n}-grams of tokens / all {n}-grams of a sample, mean over samples" for n in NGRAMS},
    f"shared_{SHARED}": f"share of a sample's {SHARED}-grams of tokens that another sample holds too, mean of samples",
}  # fmt: skip


def entropy(tokens: Sequence[int]) -> float:
    """H = -sum_v f_v ln f_v with f the shares of tokens in this row."""
    counts = np.unique(np.asarray(tokens), return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())


def ngrams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[i:] for i in range(n))))


def distinct(tokens: Sequence[int], n: int) -> float:
    """Distinct n-grams over all n-grams; 1 for a row that is too short to repeat itself."""
    found = ngrams(tokens, n)
    return len(set(found)) / len(found) if found else 1.0


def shared(samples: Sequence[Sequence[int]], n: int) -> np.ndarray:
    """For each sample the share of its n-grams that some other sample also holds."""
    per_sample = [ngrams(tokens, n) for tokens in samples]
    holders = Counter(gram for grams in per_sample for gram in set(grams))
    return np.array([np.mean([holders[g] > 1 for g in grams]) if grams else 0.0 for grams in per_sample])


def measure_tokens(samples: Iterable[Sequence[int]]) -> dict[str, Interval]:
    """All of DEFINITIONS, each with its bootstrap interval over samples."""
    rows = list(samples)
    values = {"entropy": np.array([entropy(r) for r in rows])}
    values |= {f"distinct_{n}": np.array([distinct(r, n) for r in rows]) for n in NGRAMS}
    values[f"shared_{SHARED}"] = shared(rows, SHARED)
    return {name: bootstrap_mean(per_sample) for name, per_sample in values.items()}
