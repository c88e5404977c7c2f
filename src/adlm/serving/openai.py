"""OpenAI's completions and chat completions: text that only grows, whatever order the model writes it in.

A diffusion model fills its canvas everywhere at once, so only the left part without holes can be streamed. With a
sampler that masks tokens again, nothing is certain before the end, and the text is sent then. The text is the same with
and without streaming.
"""

import asyncio
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

from adlm.api import LanguageModel
from adlm.api.scoring import Parts, TokenLogProbs, left_to_right
from adlm.data.pairs import Turn, prompt_ids, template_of
from adlm.engine import Frame, Request, block_of
from adlm.engine.request import Limit, end_of_text
from adlm.errors import require
from adlm.serving.answers import (
    AssistantMessage,
    ChatAnswer,
    ChatChoice,
    CompletionAnswer,
    CompletionChoice,
    Logprobs,
    Usage,
)
from adlm.serving.bodies import ChatBody, CompletionBody, Problem
from adlm.serving.jobs import Job, Update, within
from adlm.serving.service import Served

# Draws of noise for a completion's logprobs
LOGPROB_DRAWS = 16
# Decoders for which the text of a prefix of the tokens is a prefix of the text (except for half a character)
APPENDING = ("ByteLevel", "Fuse")
HALF = "\ufffd"
SAME_IN_CHAT = ("index", "finish_reason", "seed", "nfe")
T = TypeVar("T")


class Part(NamedTuple):
    """New text of a completion, and why it ended there: None while more may follow."""

    text: str
    reason: Literal["stop", "length"] | None


class CompletionText:
    """One completion: the part of its text that is certain, given a partly filled canvas."""

    def __init__(self, lm: LanguageModel, request: Request, stops: list[str]):
        self.lm, self.request, self.stops = lm, request, stops
        tokens, mask = list(request.tokens), lm.model.mask_id
        self.first = tokens.index(mask)
        self.after = len(tokens) - tokens[::-1].index(mask)
        """Where a suffix begins."""
        self.prompt = lm.text(tokens[: self.first])
        self.sent = 0
        """Characters that were already returned."""

    def grow(self, tokens: list[int], final: bool, settled: int = sys.maxsize) -> Part:
        """The certain text that was not returned before; all the rest if the sequence is final. `settled`: tokens from
        this position on may still change."""
        tokens = [*tokens[:settled], *[self.lm.model.mask_id] * (len(tokens) - settled)]
        end = self.end(tokens)
        if not final and self.lm.model.mask_id in tokens[:end]:
            end = tokens.index(self.lm.model.mask_id)
        over = final or (end is not None and end < len(tokens) and tokens[end] == self.request.stop_id)
        known = tokens[: self.after if end is None else end]
        text = self.lm.text(known)[len(self.prompt) :]
        if not over:
            text = text.rstrip(HALF)
        certain = len(text) if over else len(text) - self.held(text)
        stop = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if stop is not None and stop <= certain:  # otherwise a longer stop may begin before this one
            text, reason = text[:stop], "stop"
        elif over:
            reason = "stop" if end is not None else "length"
        else:
            text, reason = text[:certain], None
        new = text[self.sent :]
        self.sent += len(new)
        return Part(new, reason)

    def end(self, tokens: list[int]) -> int | None:
        """Position of its end-of-text token."""
        return end_of_text(tokens, self.request.stop_id, self.first, min(len(tokens), self.after))

    def drawn(self, tokens: list[int]) -> int:
        """How many tokens were drawn, up to the end-of-text token."""
        end = self.end(tokens)
        return sum(t != self.lm.model.mask_id for t in tokens[self.first : self.after if end is None else end + 1])

    def held(self, text: str) -> int:
        """How many characters at the end may be the beginning of a stop."""
        sizes = range(max((len(s) for s in self.stops), default=1) - 1, 0, -1)
        return next((k for k in sizes if any(len(s) > k and text.endswith(s[:k]) for s in self.stops)), 0)

    def offsets(self, tokens: list[int], text: str) -> list[int]:
        """Where each token begins in the text of the completion."""
        drawn = tokens[: min(len(tokens), self.after)]
        if self.lm.model.mask_id in drawn:
            drawn = drawn[: drawn.index(self.lm.model.mask_id)]
        return token_offsets(self.lm, drawn, self.first, text)


def token_offsets(lm: LanguageModel, tokens: list[int], first: int, text: str) -> list[int]:
    """Where each token after the `first` ones begins in the text after them. That is where the text before it ends:
    tokens may be parts of one character, and a part has no text of its own. Tokens after the end are left out."""
    found, skipped = [], len(lm.text(tokens[:first]))
    for at in range(first, len(tokens)):
        before = lm.text(tokens[:at])[skipped:]
        # an incomplete character at the end shows as a different one
        begins = next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), min(len(before), len(text)))
        if begins >= len(text):
            break
        found.append(begins)
    return found


class Completion:
    """One request to /v1/completions."""

    kind = "cmpl"

    def __init__(self, served: Served, body: CompletionBody):
        self.served, self.body = served, body
        self.prompts, self.requests = served.completions(body)
        self.id, self.created = f"{self.kind}-{secrets.token_hex(12)}", int(time.time())
        stops = [body.stop] if isinstance(body.stop, str) else body.stop if isinstance(body.stop, list) else []
        require(all(stops), "stop holds an empty text")
        self.texts = [CompletionText(served.lm, r, stops) for r in self.requests]
        self.drawn = 0
        """Number of drawn tokens, in completions that have ended."""
        self.of_prompts: dict[int, list[TokenLogProbs]] = {}
        """Prompt -> the log-probabilities of its tokens, once they are known."""
        require(
            not (body.wants_logprobs and (body.stream or body.suffix)),
            "logprobs are computed for a finished completion after its prompt: not with stream or suffix",
        )
        if body.wants_logprobs and body.echo:
            longest = max(
                len(tokens) for tokens in [*(p.tokens for p in self.prompts), *(r.tokens for r in self.requests)]
            )
            Limit(served.lm.length).check(longest, "a sequence with echo and logprobs")
        if (body.stream or stops) and self.requests and self.certain_early:
            # frames are needed to send text as it becomes certain, or to end at a stop
            self.requests = [replace(r, watch=True) for r in self.requests]

    @property
    def certain_early(self) -> bool:
        """Whether text is certain before the end: drawn tokens, or finished blocks, are never masked again, and
        decoding only appends."""
        r, lm = self.requests[0], self.served.lm
        # A banned phrase, or an end of text before the last required word, is drawn again.
        repaired = (bool(r.required) and r.stop_id is not None) or any(len(word) > 1 for word in r.banned)
        in_order = block_of(r, lm.model) > 0 or (self.served.writes_once(r.settings) and not repaired)
        return type(lm.tokenizer.backend.decoder).__name__ in APPENDING and in_order

    @property
    def usage(self) -> Usage:
        """Token counts; the given tokens count once per prompt, as OpenAI counts them."""
        given = sum(len(t.request.tokens) - (t.after - t.first) for t in self.texts[:: self.body.n])
        given = given or sum(len(p.tokens) for p in self.prompts)
        return Usage(prompt_tokens=given, completion_tokens=self.drawn, total_tokens=given + self.drawn)

    def answer(self, choices: list[CompletionChoice]) -> CompletionAnswer | ChatAnswer:
        """An answer that is sent as a whole."""
        facts = {"id": self.id, "created": self.created, "model": self.served.id}
        return CompletionAnswer(**facts, choices=choices, usage=self.usage)

    def chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> str:
        """An event of a stream, in the form that OpenAI's client reads."""
        facts = {"id": self.id, "created": self.created, "model": self.served.id}
        return f"data: {CompletionAnswer(**facts, choices=choices, usage=usage).model_dump_json()}\n\n"

    def choice(self, index: int, part: Part, nfe: int | None = None, **more: Any) -> CompletionChoice:
        seed = self.requests[index].seed if self.requests else 0
        return CompletionChoice(text=part.text, index=index, finish_reason=part.reason, seed=seed, nfe=nfe, **more)

    async def parts(self, job: Job) -> AsyncIterator[tuple[Part, Update]]:
        """(new text, the update it came from) until every completion has ended; a completion ends at its first
        stop."""
        while job.open:
            update = await job.next()
            text, got = self.texts[update.index], update.result or update.frame
            assert got is not None
            final = update.result is not None
            part = text.grow(got.tokens, final, got.settled if isinstance(got, Frame) else sys.maxsize)
            if part.reason is not None:
                job.open.discard(update.index)
                self.served.worker.cancel(job, update.index)
                self.drawn += text.drawn(got.tokens)
            yield part, update

    async def whole(self, job: Job) -> CompletionAnswer | ChatAnswer:
        """The whole answer at once."""
        told = [""] * len(self.requests)
        choices: dict[int, CompletionChoice] = {}
        for index in range(len(self.prompts) * self.body.n if not self.requests else 0):  # max_tokens=0
            choices[index] = await self.finished(job, index, "", "length", [], 0)
        async for part, update in self.parts(job):
            index, got = update.index, update.result or update.frame
            told[index] += part.text
            if part.reason is not None:
                assert got is not None
                choices[index] = await self.finished(job, index, told[index], part.reason, got.tokens, got.nfe)
        return self.answer([choices[index] for index in sorted(choices)])

    async def finished(
        self, job: Job, index: int, text: str, reason: Literal["stop", "length"], tokens: list[int], nfe: int
    ) -> CompletionChoice:
        prompt = self.prompts[index // self.body.n].tokens
        echo = self.served.lm.text(prompt) if self.body.echo else ""
        logprobs = None
        if self.body.wants_logprobs:
            known = self.echoed_logprobs if self.body.echo else self.logprobs
            logprobs = await known(job, index, text, tokens)
        return self.choice(index, Part(echo + text, reason), nfe, logprobs=logprobs)

    async def logprobs(self, job: Job, index: int, text: str, tokens: list[int]) -> Logprobs:
        """The negative of each token's contribution to the bound on -log p(completion | prompt); exact for causal
        models."""
        completion, served = self.texts[index] if self.texts else None, self.served
        offsets = await asyncio.to_thread(completion.offsets, tokens, text) if completion is not None else []
        if completion is None or not offsets:
            return Logprobs(tokens=[], token_logprobs=[], text_offset=[])
        given, drawn = tokens[1 : completion.first], tokens[completion.first : completion.first + len(offsets)]
        score = await self.evaluate(job, served.lm.score_in_parts(drawn, LOGPROB_DRAWS, context=given))
        logprobs: list[float | None] = [-x for x in score.per_token]
        return Logprobs(tokens=served.pieces(drawn), token_logprobs=logprobs, text_offset=offsets)

    async def echoed_logprobs(self, job: Job, index: int, text: str, tokens: list[int]) -> Logprobs:
        """The log-probability of every token that the client sent or that was drawn, given the tokens before it."""
        number, top, served = index // self.body.n, int(self.body.logprobs or 0), self.served
        prompt, own = self.prompts[number]
        if number not in self.of_prompts:
            self.of_prompts[number] = await self.evaluate(job, self.left_to_right(prompt[1:], prompt[:1], top))
        offsets = await asyncio.to_thread(self.texts[index].offsets, tokens, text) if text else []
        drawn = tokens[len(prompt) : len(prompt) + len(offsets)]
        known = [*self.of_prompts[number], *(await self.evaluate(job, self.left_to_right(drawn, prompt, top)))]
        echo = served.lm.text(prompt)
        at = await asyncio.to_thread(token_offsets, served.lm, prompt, 1, echo)
        at += [len(echo)] * (len(prompt) - 1 - len(at))  # end-of-text tokens at its end have no text
        shown = [*prompt[1:], *drawn]
        found = Logprobs(
            tokens=served.pieces(shown),
            token_logprobs=[k.log_p for k in known],
            text_offset=[*at, *(len(echo) + o for o in offsets)],
            top_logprobs=[self.alternatives(token, k) for token, k in zip(shown, known)],
        )
        if own == 0:  # no token comes before the client's own begin token
            assert found.top_logprobs is not None
            found.tokens.insert(0, served.piece(prompt[0]))
            found.token_logprobs.insert(0, None)
            found.text_offset.insert(0, 0)
            found.top_logprobs.insert(0, None)
        return found

    def left_to_right(self, tokens: list[int], given: list[int], top: int) -> Parts[list[TokenLogProbs]]:
        lm = self.served.lm
        return lm.in_turns(left_to_right(lm.model, tokens, given, lm.schedule, top))

    def alternatives(self, token: int, known: TokenLogProbs) -> dict[str, float]:
        """Text -> log-probability of the likeliest tokens and of the given one; the likeliest token for each text."""
        found: dict[str, float] = {}
        for other, log_p in [*known.best, (token, known.log_p)]:
            found.setdefault(self.served.piece(other), log_p)
        return found

    async def evaluate(self, job: Job, use: Parts[T]) -> T:
        """A use of the network that belongs to the job."""
        return await within(job.seconds, job.end, self.served.worker.call(use, admitted=True))

    def opening(self) -> list[CompletionChoice]:
        """The beginning of a stream: the prompts."""
        number = len(self.prompts) * self.body.n if self.body.echo else 0
        texts = [self.served.lm.text(self.prompts[index // self.body.n].tokens) for index in range(number)]
        return [self.choice(index, Part(text, None)) for index, text in enumerate(texts)]

    async def stream(self, job: Job) -> AsyncIterator[str]:
        """Chunks until every completion has ended."""
        try:
            for choice in self.opening():
                yield self.chunk([choice])
            for index in range(len(self.prompts) * self.body.n if not self.requests else 0):  # max_tokens=0
                yield self.chunk([self.choice(index, Part("", "length"), 0)])
            async for part, update in self.parts(job):
                if part.text or part.reason is not None:
                    got = update.result or update.frame
                    assert got is not None
                    yield self.chunk([self.choice(update.index, part, got.nfe)])
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                yield self.chunk([], self.usage)
            yield "data: [DONE]\n\n"
        except Problem as problem:
            yield f"data: {json.dumps(problem.body)}\n\n"


class Chat(Completion):
    """One request to /v1/chat/completions: the completion of a conversation in the template of the model's vocabulary
    (data/pairs.py), up to the end of the answer or the user's next line."""

    kind = "chatcmpl"

    def __init__(self, served: Served, body: ChatBody):
        stops = [body.stop] if isinstance(body.stop, str) else body.stop if isinstance(body.stop, list) else []
        same = {name: getattr(body, name) for name in CompletionBody.model_fields if name in ChatBody.model_fields}
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        tokenizer = served.lm.tokenizer
        stop = [*stops, template_of(tokenizer).stop] if body.stop is not False else False
        turns = [Turn(m.role, m.text) for m in body.messages]
        served.check_text("".join(turn.content for turn in turns), "the prompt")
        prompt = prompt_ids(turns, tokenizer)
        super().__init__(served, CompletionBody(**same | {"prompt": prompt, "max_tokens": most, "stop": stop}))
        self.begun: set[int] = set()
        """Indices of answers whose text has begun."""

    async def parts(self, job: Job) -> AsyncIterator[tuple[Part, Update]]:
        """As in a completion, without the space that plain lines have after the colon."""
        async for part, update in super().parts(job):
            text = part.text if update.index in self.begun else part.text.lstrip()
            if text:
                self.begun.add(update.index)
            yield Part(text, part.reason), update

    def answer(self, choices: list[CompletionChoice]) -> ChatAnswer:
        found = [
            ChatChoice(message=AssistantMessage(content=c.text), **c.model_dump(include={*SAME_IN_CHAT}))
            for c in choices
        ]
        return ChatAnswer(id=self.id, created=self.created, model=self.served.id, choices=found, usage=self.usage)

    def opening(self) -> list[CompletionChoice]:
        return [self.choice(index, Part("", None)) for index in range(self.body.n)]

    def chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> str:
        found = []
        for c in choices:
            opens = c.nfe is None
            delta = {"role": "assistant", "content": ""} if opens else {"content": c.text} if c.text else {}
            found.append({"delta": delta, **c.model_dump(include={*SAME_IN_CHAT})})
        facts = {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.served.id}
        usage_now = {} if usage is None else {"usage": usage.model_dump()}
        return f"data: {json.dumps(facts | {'choices': found} | usage_now, ensure_ascii=False)}\n\n"
