"""lm-evaluation-harness for our models:

    python -m adlm.evaluation.harness run --model adlm --model_args path=FOLDER,draws=32 --tasks ...

The harness has no plug-ins, so a model must be registered before its command line starts: importing this module
registers it, and running the module then starts the harness. Needs the extra `harness`.

loglikelihood          causal models: exact. Diffusion: minus the bound on -log p(continuation | context) from `draws`
                       numbers of masks, the context always visible (api/scoring.py); one token has no noise.
                       likelihood=left-to-right: the chain rule instead, each token given those before it with the
                       rest masked. It has no noise, and the server returns the same numbers to `local-completions`.
is_greedy              diffusion: the whole continuation is masked, then the position with the highest confidence is
                       filled with its best token, again and again; true if every token is that of the continuation.
loglikelihood_rolling  the same for a whole text after a begin token; long texts in parts of the model's length.
generate_until         the context as prompt, then the sampler of `sampler`, `steps`, ...; greedy unless do_sample.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from adlm.engine.blocks import own_block
from adlm.errors import choose, missing_extra, require

try:
    from lm_eval import models  # noqa: F401  # with only ours registered, the harness would not load its own
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
    missing = missing_extra(error) or str(error)
    if __name__ == "__main__":
        sys.exit(f"adlm: error: {missing}")
    raise ModuleNotFoundError(missing, name=error.name) from None

from adlm.api import LanguageModel, load
from adlm.api.language_model import python_words
from adlm.api.scoring import left_to_right, states_in_writing, whole
from adlm.engine import Request
from adlm.rules import Count, accept
from adlm.schema import SamplingConfig


@register_model("adlm")
class Harness(LM):
    """The interface of lm-evaluation-harness for one of our models."""

    def __init__(
        self, path: str = "", draws: int = 32, ema: bool = True, max_gen_toks: int = 128, device: str | None = None,
        likelihood: str = "bound", **sampling: Any,
    ):  # fmt: skip
        """`path`: a run folder, an exported folder, a hub name or a release .ckpt.

        `sampling`: fields of SamplingConfig (sampler, steps, top_p, seed, ...). The harness adds batch_size, the number
        of texts drawn together, and max_batch_size, which is ignored.
        """
        super().__init__()
        require(bool(path), "--model_args path=FOLDER is missing")
        self.chain_rule = choose("--model_args likelihood", likelihood, ("bound", "left-to-right")) != "bound"
        self.draws = accept("--model_args draws", draws, Count)
        self.max_gen_toks = accept("--model_args max_gen_toks", max_gen_toks, Count)
        sampling.pop("max_batch_size", None)
        batch = str(sampling.pop("batch_size", ""))  # may be `auto`
        sampling = {"steps": 128, "batch_size": int(batch) if batch.isdigit() else 16, **sampling}
        self.lm: LanguageModel = load(path, usable(device), bool(ema))
        with python_words():
            self.settings: SamplingConfig = self.lm.request(**sampling).settings

    def get_model_info(self) -> dict[str, Any]:
        """Facts that the harness writes beside the results."""
        sampling = {f"adlm_{name}": getattr(self.settings, name) for name in ("sampler", "steps", "top_p", "seed")}
        return {"adlm_algo": self.lm.info.get("algo"), "adlm_draws": self.draws, **sampling}

    @property
    def tokenizer_name(self) -> str:
        return self.lm.tokenizer.fingerprint

    # Likelihoods

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether it is the greedy continuation."""
        found = []
        for context, continuation in arguments(requests, "loglikelihood", disable_tqdm):
            given, scored = self.split(context, continuation)
            if self.chain_rule:
                found.append(self.left_to_right(given, scored))
            else:
                score = self.lm.score(scored, self.draws, given)
                found.append((-score.nll * len(scored), self.is_greedy(given, scored)))
            self.cache_hook.add_partial("loglikelihood", (context, continuation), found[-1])
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text."""
        found = []
        for (text,) in arguments(requests, "loglikelihood_rolling", disable_tqdm):
            tokens = self.lm.tokenizer.encode(text)
            if self.chain_rule:
                room = self.lm.length - 1
                parts = [tokens[a : a + room] for a in range(0, len(tokens), room)]
                found.append(sum(self.left_to_right([], part)[0] for part in parts))
            else:
                found.append(-self.lm.score(tokens, self.draws).nll * len(tokens) if tokens else 0.0)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def left_to_right(self, given: Sequence[int], scored: Sequence[int]) -> tuple[float, bool]:
        """The chain rule: log-likelihood, and whether every token is the likeliest given those before it."""
        lm, kept = self.lm, max(0, self.lm.length - 1 - len(scored))
        start = [lm.tokenizer.bos_id, *(given[-kept:] if kept else ())]
        known = whole(lm.in_turns(left_to_right(lm.model, scored, start, lm.schedule, 1)))
        return sum(k.log_p for k in known), all(k.best[0][0] == token for k, token in zip(known, scored))

    def split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of the context and of the continuation. Spaces at the end of the context go to the continuation, since
        vocabularies put them in front of words."""
        encode = self.lm.tokenizer.encode
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        given = encode(bare)
        scored = encode(bare + continuation)[len(given) :] or encode(continuation)
        require(bool(scored), f"a continuation has no tokens: {continuation!r}")
        return given, scored

    @torch.no_grad()
    def is_greedy(self, given: Sequence[int], scored: Sequence[int]) -> bool:
        """Whether greedy decoding gives the continuation."""
        tok, length = self.lm.tokenizer, self.lm.length
        if len(scored) >= length:
            return False
        kept = length - 1 - len(scored)
        start = [tok.bos_id, *(given[-kept:] if kept else ())]
        if self.lm.model.config.causal:
            log_p_LV = self.lm.log_probs(torch.tensor([[*start, *scored[:-1]]]))[0, len(start) - 1 :]
            return log_p_LV.argmax(-1).tolist() == list(scored)
        canvas = [*start, *[tok.mask_id] * len(scored)]
        return all(self.reveal_surest(canvas, start, scored) for _ in scored)

    def reveal_surest(self, canvas: list[int], start: Sequence[int], scored: Sequence[int]) -> bool:
        """Fill the hole with the highest confidence, in `canvas` or in the block that the model writes next, with its
        best token; return whether that is the token of the continuation."""
        model, tokens_BL = self.lm.model, torch.tensor([canvas], device=self.lm.device)
        block, first = own_block(model) or len(canvas), canvas.index(model.mask_id)
        states_LD = states_in_writing(model, tokens_BL, self.lm.noise_level(tokens_BL))[0, len(start) :]
        logits_LV = model.head(states_LD).float()
        logits_LV[:, model.mask_id] = -torch.inf
        best_L = logits_LV.softmax(-1).max(-1)
        hole_L = tokens_BL[0, len(start) :] == model.mask_id
        hole_L[first // block * block + block - len(start) :] = False
        place = int(best_L.values.masked_fill(~hole_L, -1).argmax())
        token = int(best_L.indices[place])
        canvas[len(start) + place] = token
        return token == scored[place]

    # Texts

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """A text after each context, up to its first stop string."""
        wanted = [(context, dict(settings)) for context, settings in arguments(requests, "generate_until", True)]
        seed = self.settings.seed
        made = [self.request(context, settings, seed + i) for i, (context, settings) in enumerate(wanted)]
        texts: dict[int, str] = {}
        for result in self.lm.engine(self.settings.batch_size).run(made):
            number = result.seed - seed
            start = sum(1 for t in made[number].tokens if t != self.lm.tokenizer.mask_id)
            tokens = result.tokens[start:]
            if (eos := self.lm.tokenizer.eos_id) in tokens:
                tokens = tokens[: tokens.index(eos)]
            texts[number] = before_stop(self.lm.text(tokens), wanted[number][1].get("until") or [])
            self.cache_hook.add_partial("generate_until", wanted[number], texts[number])
        return [texts[i] for i in range(len(wanted))]

    def request(self, context: str, settings: dict[str, Any], seed: int) -> Request:
        """A request with the end of the context as prompt, as much of it as leaves room for the new tokens."""
        tok = self.lm.tokenizer
        room = min(int(settings.get("max_gen_toks", self.max_gen_toks)), self.lm.length - 1)
        require(room >= 1, f"max_gen_toks={room} must be at least 1")
        kept = self.lm.length - 1 - room
        prompt = [tok.bos_id, *(tok.encode(context)[-kept:] if kept else ())]
        sampled = bool(settings.get("do_sample", False))
        temperature = float(settings.get("temperature", 1.0)) if sampled else 0.0
        top_p = float(settings.get("top_p", self.settings.top_p))
        config = replace(self.settings, temperature=temperature, top_p=top_p)
        return Request([*prompt, *[tok.mask_id] * room], config, seed, stop_id=tok.eos_id)


def usable(device: str | None) -> str:
    """The device to load to. The harness passes cuda:0 by default; without a GPU the CPU is used."""
    if device and device.startswith("cuda") and not torch.cuda.is_available():
        print(f"adlm: note: no CUDA device is available for {device}; running on the CPU", file=sys.stderr)
        return "cpu"
    return device or "auto"


def arguments(requests: Iterable[Any], label: str, quiet: bool) -> Iterator[tuple[Any, ...]]:
    from tqdm import tqdm

    for request in tqdm(list(requests), desc=f"adlm {label}", disable=quiet):
        yield request.args


def before_stop(text: str, stops: str | Sequence[str]) -> str:
    """The text before the first of the stops."""
    stops = [stops] if isinstance(stops, str) else stops
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else text


def main() -> None:
    """The harness's own command line; a user's mistake becomes one line, as in `adlm`."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except ValueError as error:
        sys.exit(f"adlm: error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    sys.modules["adlm.evaluation.harness"] = sys.modules["__main__"]  # an import by name must not register twice
    main()
