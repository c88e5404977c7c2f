"""Bodies of answers, except errors (bodies.py); and the conversion of tokens' bytes to characters."""

import codecs
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

# ---- bytes of tokens as characters -----------------------------------------------------------------------------------
# A byte-level token may be a part of a character, or end inside one.
#
# A character belongs to the token that completes it. Bytes that wait for a masked token show as nothing, and bytes that
# no other token can complete show as U+FFFD, so the joined texts of a finished sequence are its text.

UTF8 = codecs.getincrementaldecoder("utf-8")


def characters(pieces: Sequence[bytes | None]) -> list[str | None]:
    """The text that each token adds; None is a hole."""
    found: list[str | None] = []
    decoder, after_hole = UTF8("replace"), False
    for i, piece in enumerate(pieces):
        if piece is None:
            decoder.reset()  # the token of this hole may complete the pending bytes
            found.append(None)
            after_hole = True
            continue
        if after_hole:
            # drop the rest of a character that began in the hole
            rest = piece.lstrip(bytes(range(0x80, 0xC0)))
            after_hole, piece = not rest, rest
        found.append(decoder.decode(piece, final=i == len(pieces) - 1))
    return found


# ---- answers ---------------------------------------------------------------------------------------------------------

Ids = list[int]


class Defaults(BaseModel):
    sampler: str
    steps: int
    top_p: float
    temperature: float


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "adlm"
    length: int
    vocab_size: int
    mask: int
    anchored: bool
    causal: bool
    block_lengths: list[int] = Field(description="Lengths of the blocks it writes in, its own first; none: the whole.")
    samplers: list[str]
    parameters: int
    default: Defaults = Field(description="Settings of a request that names none.")
    page: Defaults = Field(description="Settings the page starts with.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Pieces(BaseModel):
    tokens: Ids
    texts: list[str]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class InfillChoice(BaseModel):
    index: int
    text: str
    tokens: Ids
    texts: list[str]
    seed: int
    nfe: int


class InfillAnswer(BaseModel):
    id: str
    model: str
    choices: list[InfillChoice]
    usage: Usage


class ScoreAnswer(BaseModel):
    nll: float = Field(description="Nats per token: an upper bound, or exact.")
    ppl: float
    stderr: float | None = Field(description="Of nll, over draws of noise; null: one draw cannot tell.")
    exact: bool
    tokens: Ids
    texts: list[str]
    per_token: list[float]


class Candidate(BaseModel):
    id: int
    text: str
    probability: float


class SlotCandidate(Candidate):
    stderr: float | None = Field(description="Of the probability, over two or more draws of the other holes.")


class SlotAnswer(BaseModel):
    position: int
    entropy: float = Field(description="Of the whole distribution, nats.")
    candidates: list[SlotCandidate]


class SlotsAnswer(BaseModel):
    tokens: list[int | None]
    texts: list[str | None]
    slots: list[SlotAnswer]


class HoleGuess(BaseModel):
    position: int
    candidates: list[Candidate]


class AnchorsAnswer(BaseModel):
    tokens: list[int | None]
    texts: list[str | None]
    anchor: list[bool]
    count: list[int]
    tau: int
    guesses: list[HoleGuess]


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(BaseModel):
    text: str
    index: int
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    seed: int
    nfe: int | None = None


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None
    seed: int
    nfe: int | None = None


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
