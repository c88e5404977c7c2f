"""OpenAI's completions: text that only grows, whatever order the model writes it in.

A diffusion model fills its canvas everywhere at once, so what can be streamed is the left part that has no holes any
more. With a sampler that masks again nothing is certain before the end, and the text is sent then. Streamed or not, the
text is the same.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from adlm.api import LanguageModel
from adlm.engine import Request
from adlm.engine.request import end_of_text
from adlm.errors import require
from adlm.serving.bodies import CompletionAnswer, CompletionBody, CompletionChoice, Logprobs, Problem, Usage
from adlm.serving.service import Served
from adlm.serving.worker import Job, Update, within

# Draws of noise behind a completion's logprobs
LOGPROB_DRAWS = 16
# Decoders that only append: the text of a beginning of a sequence is a beginning of its text (but for half a character)
APPENDING = ("ByteLevel", "Fuse")
HALF = "\ufffd"


class Part(NamedTuple):
    """Text that a completion has gained, and why it ended there: None while more may follow."""

    text: str
    reason: Literal["stop", "length"] | None


class CompletionText:
    """One completion: what of it is certain, given a canvas that is only partly filled."""

    def __init__(self, lm: LanguageModel, request: Request, stops: list[str]):
        self.lm, self.request, self.stops = lm, request, stops
        tokens, mask = list(request.tokens), lm.model.mask_id
        self.first = tokens.index(mask)
        self.after = len(tokens) - 1 - tokens[::-1].index(mask) + 1
        """Where a suffix begins."""
        self.prompt = lm.text(tokens[: self.first])
        self.sent = 0
        """Characters that were returned."""

    def grow(self, tokens: list[int], final: bool) -> Part:
        """The certain text that was not returned before; all that is left, if the sequence is final."""
        end = end_of_text(tokens, self.request.stop_id, self.first, min(len(tokens), self.after))
        if not final and self.lm.model.mask_id in tokens[:end]:
            end = tokens.index(self.lm.model.mask_id)
        over = final or (end is not None and end < len(tokens) and tokens[end] == self.request.stop_id)
        known = tokens[: self.after if end is None else end]
        text = self.lm.text(known)[len(self.prompt) :]
        if not over:
            text = text.rstrip(HALF)
        certain = len(text) if over else len(text) - self.held(text)
        stop = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if stop is not None and stop <= certain:  # else a longer stop may turn out to begin before this one
            text, reason = text[:stop], "stop"
        elif over:
            reason = "stop" if end is not None else "length"
        else:
            text, reason = text[:certain], None
        new = text[self.sent :]
        self.sent += len(new)
        return Part(new, reason)

    def held(self, text: str) -> int:
        """Characters at the end that may be the beginning of a stop."""
        sizes = range(max((len(s) for s in self.stops), default=1) - 1, 0, -1)
        return next((k for k in sizes if any(len(s) > k and text.endswith(s[:k]) for s in self.stops)), 0)

    def offsets(self, tokens: list[int], text: str) -> list[int]:
        """Where in the completion each of its tokens begins, which is where the text before it ends: tokens may be
        parts of one character, and no part has a text of its own."""
        found = []
        for at in range(self.first, min(len(tokens), self.after)):
            before = self.lm.text(tokens[:at])[len(self.prompt) :]
            # half a character at its end shows as another one
            begins = next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), min(len(before), len(text)))
            if begins >= len(text) or tokens[at] == self.lm.model.mask_id:
                break
            found.append(begins)
        return found


class Completion:
    """One request to /v1/completions."""

    def __init__(self, served: Served, body: CompletionBody):
        self.served, self.body, self.requests = served, body, served.completions(body)
        self.id, self.created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        stops = [body.stop] if isinstance(body.stop, str) else body.stop if isinstance(body.stop, list) else []
        require(all(stops), "stop holds an empty text")
        self.texts = [CompletionText(served.lm, r, stops) for r in self.requests]
        self.drawn = 0
        """Tokens of completions that have ended."""
        self.wants_logprobs = body.logprobs is not None and body.logprobs is not False
        require(
            not (self.wants_logprobs and (body.stream or body.suffix)),
            "logprobs are computed for a finished completion after its prompt: not with stream or suffix",
        )
        if (body.stream or stops) and self.certain_early:  # to send text as it becomes certain, or to end at a stop
            self.requests = [replace(r, watch=True) for r in self.requests]

    @property
    def certain_early(self) -> bool:
        """Whether text is certain before the end: nothing is masked again, and decoding only appends."""
        r, lm = self.requests[0], self.served.lm
        # A banned phrase, and an end of text before the last required word, are drawn again.
        early_end = bool(r.required) and r.stop_id is not None
        repaired = (early_end or any(len(word) > 1 for word in r.banned)) and not lm.model.config.causal
        appends = type(lm.tokenizer.backend.decoder).__name__ in APPENDING
        return appends and not repaired and self.served.writes_once(r.settings)

    def answer(self, choices: list[CompletionChoice], usage: bool = False) -> CompletionAnswer:
        found = CompletionAnswer(id=self.id, created=self.created, model=self.served.id, choices=choices)
        if usage:  # what is given counts once a prompt, as OpenAI counts it
            given = sum(len(t.request.tokens) - (t.after - t.first) for t in self.texts[:: self.body.n])
            found.usage = Usage(prompt_tokens=given, completion_tokens=self.drawn, total_tokens=given + self.drawn)
        return found

    def choice(self, index: int, part: Part, nfe: int | None = None, **more: Any) -> CompletionChoice:
        seed = self.requests[index].seed
        return CompletionChoice(text=part.text, index=index, finish_reason=part.reason, seed=seed, nfe=nfe, **more)

    async def parts(self, job: Job) -> AsyncIterator[tuple[Part, Update]]:
        """(new text, the update it came from) until every completion has ended; one that met a stop is not waited
        for."""
        while job.open:
            update = await job.next()
            text, got = self.texts[update.index], update.result or update.frame
            assert got is not None
            part = text.grow(got.tokens, update.result is not None)
            if part.reason is not None:
                job.open.discard(update.index)
                self.served.worker.cancel(job, update.index)
                self.drawn += sum(t != self.served.lm.model.mask_id for t in got.tokens[text.first : text.after])
            yield part, update

    async def whole(self, job: Job) -> CompletionAnswer:
        """Everything at once."""
        told = [""] * len(self.requests)
        choices: dict[int, CompletionChoice] = {}
        async for part, update in self.parts(job):
            index, got = update.index, update.result or update.frame
            told[index] += part.text
            if part.reason is None:
                continue
            assert got is not None
            logprobs = await self.logprobs(job, index, told[index], got.tokens) if self.wants_logprobs else None
            echo = self.texts[index].prompt if self.body.echo else ""
            whole = Part(echo + told[index], part.reason)
            choices[index] = self.choice(index, whole, got.nfe, logprobs=logprobs)
        return self.answer([choices[index] for index in sorted(choices)], usage=True)

    async def logprobs(self, job: Job, index: int, text: str, tokens: list[int]) -> Logprobs:
        """Minus each token's part of the bound on -log p(completion | prompt); exact for causal models."""
        completion, served = self.texts[index], self.served
        given = tokens[1 : completion.first]
        offsets = await asyncio.to_thread(completion.offsets, tokens, text)
        drawn = tokens[completion.first : completion.first + len(offsets)]
        if not drawn:
            return Logprobs(tokens=[], token_logprobs=[], text_offset=[])
        score = served.worker.call(lambda: served.lm.score(drawn, LOGPROB_DRAWS, context=given), admitted=True)
        logprobs = [-x for x in (await within(job.seconds, job.end, score)).per_token]
        echoed = len(completion.prompt) if self.body.echo else 0
        offsets = [echoed + at for at in offsets]
        return Logprobs(tokens=served.pieces(drawn), token_logprobs=logprobs, text_offset=offsets)

    async def stream(self, job: Job) -> AsyncIterator[str]:
        """Chunks as OpenAI's client reads them."""

        def chunk(answer: CompletionAnswer) -> str:
            return f"data: {answer.model_dump_json()}\n\n"

        try:
            for index, text in enumerate(self.texts if self.body.echo else ()):
                yield chunk(self.answer([self.choice(index, Part(text.prompt, None))]))
            async for part, update in self.parts(job):
                if part.text or part.reason is not None:
                    got = update.result or update.frame
                    assert got is not None
                    yield chunk(self.answer([self.choice(update.index, part, got.nfe)]))
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                yield chunk(self.answer([], usage=True))
            yield "data: [DONE]\n\n"
        except Problem as problem:
            yield f"data: {json.dumps(problem.body)}\n\n"
