"""Perplexities that were published, beside which `adlm ppl` and `adlm zeroshot` print their own.

Only values with a source, and only for the model they belong to: released weights by their hub name, and models of the
paper's own kind. Both WikiTexts have one validation text.
"""

import math
from pathlib import Path
from typing import NamedTuple

from adlm.io.export import Loaded
from adlm.models.network import parameter_count

PAPER_PARAMETERS = 293e6


class Published(NamedTuple):
    """Perplexities of one model by corpus, and where they are printed."""

    perplexities: dict[str, float]
    source: str


PAPER = {
    "adlm": Published(
        {"openwebtext": 20.14, "lambada": 44.32, "ptb": 95.37, "wikitext2": 31.94, "wikitext103": 31.94, "lm1b": 64.43,
         "ag_news": 55.72, "pubmed": 37.56, "arxiv": 33.69},
        "arXiv 2505.18456, ADLM after 524B tokens",
    ),
    "kuleshov-group/mdlm-owt": Published(
        {"openwebtext": 22.98, "lambada": 47.52, "ptb": 95.26, "wikitext2": 32.83, "wikitext103": 32.83, "lm1b": 67.01,
         "ag_news": 61.15, "pubmed": 41.89, "arxiv": 37.37},
        "arXiv 2505.18456, MDLM after 524B tokens",
    ),
    "kuleshov-group/bd3lm-owt-block_size4": Published(
        {"openwebtext": 20.73, "lambada": 50.03, "ptb": 96.81, "wikitext2": 31.31, "wikitext103": 31.31, "lm1b": 60.88,
         "ag_news": 61.67, "pubmed": 42.52, "arxiv": 39.20},
        "arXiv 2505.18456, BD3LM with blocks of 4 after 524B tokens",
    ),
}  # fmt: skip
"""Model -> what was published of it."""


def comparable(loaded: Loaded) -> bool:
    """Whether the model is of the paper's kind: ADLM, GPT-2's vocabulary and the mask, 1024 tokens, 293M parameters."""
    model = loaded.model
    same_size = math.isclose(parameter_count(model), PAPER_PARAMETERS, rel_tol=0.01)
    gpt2 = (model.vocab_size, model.mask_id) == (50258, 50257)
    return gpt2 and same_size and model.config.length == 1024 and model.config.anchored and not model.config.causal


def published(checkpoint: str, loaded: Loaded) -> Published | None:
    """What was published of a model: by the name it was asked for, a hub name or a folder called like one
    (owner/model, models--owner--model); else of the paper's model, if it is of that kind."""
    name = checkpoint.partition("@")[0].rstrip("/").replace("--", "/")
    for model, found in PAPER.items():
        if "/" in model and (f"/{name}".endswith(f"/{model}") or Path(name).name == Path(model).name):
            return found
    return PAPER["adlm"] if comparable(loaded) else None
