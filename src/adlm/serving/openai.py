"""The shape of OpenAI's completions: text that only grows, whatever order the model writes it in.

A diffusion model fills its row everywhere at once, so what can be streamed is the left part that has no holes any more.
With a sampler that masks again nothing is settled before the end, and the text is sent then. Streamed or not, the text
is the same.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from adlm.api import LanguageModel
from adlm.diffusion.schedules import make_schedule
from adlm.engine import Request
from adlm.engine.windows import end_of_text
from adlm.errors import require
from adlm.samplers.base import make_sampler
from adlm.serving.models import Served
from adlm.serving.problems import Problem
from adlm.serving.schemas import CompletionAnswer, CompletionBody, CompletionChoice, Logprobs, Usage
from adlm.serving.worker import Job, Update, sound, within

# Draws of noise behind a completion's logprobs
LOGPROB_DRAWS = 16
# Decoders whose text of a row begins with the text of any beginning of the row (but for half a character)
GROWING = ("ByteLevel", "Fuse")
HALF = "\ufffd"


class Ended(NamedTuple):
    text: str
    reason: Literal["stop", "length"] | None
    """stop, length, or None while it goes on."""


class Text:
    """One completion: what of it is certain, given a row that is only partly filled."""

    def __init__(self, lm: LanguageModel, request: Request, stops: list[str]):
        self.lm, self.request, self.stops = lm, request, stops
        tokens, mask = list(request.tokens), lm.model.mask_id
        self.first = tokens.index(mask)
        self.after = len(tokens) - 1 - tokens[::-1].index(mask) + 1
        """Where a suffix begins."""
        self.prompt = lm.text(tokens[: self.first])
        self.sent = 0

    def read(self, tokens: list[int], final: bool) -> Ended:
        """The certain part of the completion; all of it, if the row is final."""
        end = end_of_text(tokens, self.request.stop_id, self.first, min(len(tokens), self.after))
        if not final and self.lm.model.mask_id in tokens[:end]:
            end = tokens.index(self.lm.model.mask_id)
        over = final or (end is not None and end < len(tokens) and tokens[end] == self.request.stop_id)
        known = tokens[: self.after if end is None else end]
        text = self.lm.text(known)[len(self.prompt) :]
        if not over:
            text = text.rstrip(HALF)
        settled = len(text) if over else len(text) - self.held(text)
        cut = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if cut is not None and cut <= settled:  # else a longer stop may turn out to begin before this one
            return Ended(text[:cut], "stop")
        if over:
            return Ended(text, "stop" if end is not None else "length")
        return Ended(text[:settled], None)

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

    def grow(self, tokens: list[int], final: bool) -> Ended:
        """What `read` adds to what was sent."""
        now = self.read(tokens, final)
        new = now.text[self.sent :]
        self.sent += len(new)
        return Ended(new, now.reason)


class Completion:
    """One request to /v1/completions."""

    def __init__(self, served: Served, body: CompletionBody):
        self.served, self.body, self.requests = served, body, served.completions(body)
        self.id, self.created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        stops = [body.stop] if isinstance(body.stop, str) else body.stop if isinstance(body.stop, list) else []
        require(all(stops), "stop holds an empty text")
        self.stops = stops
        self.texts = [Text(served.lm, r, stops) for r in self.requests]
        self.drawn = 0
        if self.settles and (body.stream or stops):  # frames: to send text as it settles, or to end at a stop
            self.requests = [replace(r, watch=True) for r in self.requests]
        require(
            not (self.wants_logprobs and (body.stream or body.suffix)),
            "logprobs are computed for a finished completion after its prompt: not with stream or suffix",
        )

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs is not None and self.body.logprobs is not False

    @property
    def settles(self) -> bool:
        """Whether text is certain before the end: nothing is masked again, and decoding only appends."""
        r, lm = self.requests[0], self.served.lm
        locks = lm.model.config.causal or make_sampler(r.settings, make_schedule(lm.loaded.noise)).writes_once
        # A banned phrase, and an end of text before the last required word, are drawn again.
        early_end = bool(r.required) and r.stop_id is not None
        repaired = (early_end or any(len(word) > 1 for word in r.banned)) and not lm.model.config.causal
        return locks and not repaired and type(lm.tokenizer.backend.decoder).__name__ in GROWING

    def usage(self) -> Usage:
        # what is given counts once a prompt, as OpenAI counts it
        given = sum(len(t.request.tokens) - (t.after - t.first) for t in self.texts[:: self.body.n])
        return Usage(prompt_tokens=given, completion_tokens=self.drawn, total_tokens=given + self.drawn)

    def answer(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionAnswer:
        return CompletionAnswer(id=self.id, created=self.created, model=self.served.id, choices=choices, usage=usage)

    def choice(self, row: int, ended: Ended, nfe: int | None = None, **more: Any) -> CompletionChoice:
        text = self.texts[row].prompt + ended.text if more.pop("echo", False) else ended.text
        return CompletionChoice(
            text=text, index=row, finish_reason=ended.reason, seed=self.requests[row].seed, nfe=nfe, **more
        )  # fmt: skip

    async def parts(self, job: Job) -> AsyncIterator[tuple[int, Ended, Update]]:
        """(row, new text, update it came from) until every row has ended; a row that met a stop is not waited for."""
        open_rows = set(range(len(self.requests)))
        while open_rows:
            update = await job.next()
            if update.row not in open_rows:
                continue
            if update.result is not None:
                tokens = sound(update.result).tokens
            else:
                assert update.frame is not None
                tokens = update.frame.tokens
            ended = self.texts[update.row].grow(tokens, update.result is not None)
            if ended.reason is not None:
                open_rows.remove(update.row)
                self.count(update)
                self.served.worker.cancel(job, update.row)
            yield update.row, ended, update

    def count(self, update: Update) -> None:
        text = self.texts[update.row]
        tokens = (update.result or update.frame).tokens  # type: ignore[union-attr]
        self.drawn += sum(t != self.served.lm.model.mask_id for t in tokens[text.first : text.after])

    async def whole(self, job: Job) -> CompletionAnswer:
        """Everything at once."""
        told: dict[int, str] = {}
        choices: dict[int, CompletionChoice] = {}
        async for row, ended, update in self.parts(job):
            told[row] = told.get(row, "") + ended.text
            if ended.reason is None:
                continue
            got = update.result or update.frame
            assert got is not None
            logprobs = await self.logprobs(job, row, told[row], got.tokens) if self.wants_logprobs else None
            last = Ended(told[row], ended.reason)
            choices[row] = self.choice(row, last, got.nfe, logprobs=logprobs, echo=self.body.echo)
        return self.answer([choices[row] for row in sorted(choices)], self.usage())

    async def logprobs(self, job: Job, row: int, text: str, tokens: list[int]) -> Logprobs:
        """Minus each token's share of the bound on -log p(completion | prompt); exact for causal models."""
        completion, served = self.texts[row], self.served
        given = tokens[1 : completion.first]
        offsets = await asyncio.to_thread(completion.offsets, tokens, text)
        drawn = tokens[completion.first : completion.first + len(offsets)]
        if not drawn:
            return Logprobs(tokens=[], token_logprobs=[], text_offset=[])
        score = served.worker.call(lambda: served.lm.score(drawn, LOGPROB_DRAWS, context=given), admitted=True)
        shares = [-x for x in (await within(job.seconds, job.end, score)).per_token]
        echoed = len(completion.prompt) if self.body.echo else 0
        offsets = [echoed + at for at in offsets]
        return Logprobs(tokens=served.pieces(drawn), token_logprobs=shares, text_offset=offsets)

    async def stream(self, job: Job) -> AsyncIterator[str]:
        """Chunks as OpenAI's client reads them."""

        def chunk(answer: CompletionAnswer) -> str:
            return f"data: {answer.model_dump_json()}\n\n"

        try:
            if self.body.echo:
                for row in range(len(self.requests)):
                    yield chunk(self.answer([self.choice(row, Ended("", None), echo=True)], None))
            async for row, ended, update in self.parts(job):
                if ended.text or ended.reason is not None:
                    got = update.result or update.frame
                    assert got is not None
                    yield chunk(self.answer([self.choice(row, ended, got.nfe)], None))
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                yield chunk(self.answer([], self.usage()))
            yield "data: [DONE]\n\n"
        except Problem as problem:
            yield f"data: {json.dumps(problem.body)}\n\n"
