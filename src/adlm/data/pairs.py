"""Prompts and their answers: JSON lines with `prompt` and `completion`, or with `messages`, a conversation.

One sequence for each answer: [BOS], everything before the answer, the answer, [EOS], padding. Only the answer and its
end are learned and scored; where they begin is stored beside the sequences (blocks.py). A conversation with several
answers gives several sequences, since an answer must not see the turns after it. `prompt` and `completion` are
tokenised as they are; a conversation is written with the template of the vocabulary (below).
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adlm.data import formats
from adlm.data.packing import PackedSequences, token_dtype
from adlm.data.tokenizers import Tokenizer
from adlm.errors import choose, require

# ---- conversations as tokens -----------------------------------------------------------------------------------------
# How fine-tuning and the server write conversations as tokens.
#
# A vocabulary with the marks of a known template uses that template (Qwen, SmolLM2 and Dream have ChatML's marks, LLaDA
# and Llama 3 have Llama's); others use plain lines, "User: ..." and "Assistant: ...". Marks are special tokens, and
# message text never becomes one.

ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str


class Piece(NamedTuple):
    """A mark or a text."""

    text: str
    is_mark: bool


@dataclass(frozen=True)
class Template:
    """How a conversation is written: {role} and {Role} stand for the role, {content} for the message text."""

    name: str
    turn: str
    opening: str
    """The text before an answer of the assistant."""
    answer: str
    marks: tuple[str, ...] = ()
    """Special tokens of the template, which the vocabulary must have."""
    stop: str = ""
    """What ends an answer: its last mark, or the beginning of the next turn."""

    def pieces(self, form: str, turn: Turn) -> list[Piece]:
        """A turn, or the text before one, as marks and texts. The content is filled in after the marks are found, so
        that it cannot contain one."""
        parts = re.split(f"({'|'.join(map(re.escape, self.marks))})", form) if self.marks else [form]
        given = {"role": turn.role, "Role": turn.role.capitalize(), "content": turn.content}
        found = [(part, part in self.marks) for part in parts if part]
        return [Piece(part if is_mark else part.format(**given), is_mark) for part, is_mark in found]


PLAIN = Template("plain", "{Role}: {content}\n", "Assistant:", " {content}", stop="\nUser:")
TEMPLATES = (
    Template(
        "chatml",
        "<|im_start|>{role}\n{content}<|im_end|>\n",
        "<|im_start|>assistant\n",
        "{content}<|im_end|>",
        ("<|im_start|>", "<|im_end|>"),
        stop="<|im_end|>",
    ),
    Template(
        "llama",
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{content}<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        stop="<|eot_id|>",
    ),
)


def template_of(tokenizer: Tokenizer) -> Template:
    """The first template whose marks are special tokens of the vocabulary; else plain lines."""
    special = {tokenizer.backend.id_to_token(i) for i in tokenizer.special_ids}
    return next((template for template in TEMPLATES if special.issuperset(template.marks)), PLAIN)


def encode_chat(pieces: Iterable[Piece], tokenizer: Tokenizer) -> list[int]:
    """Ids of the pieces of a template: a mark is one special token; texts between two marks are tokenised together."""
    ids: list[int] = []
    for is_mark, together in itertools.groupby(pieces, key=lambda piece: piece.is_mark):
        texts = [piece.text for piece in together]
        if is_mark:
            ids += [found for text in texts if (found := tokenizer.backend.token_to_id(text)) is not None]
        else:
            ids += tokenizer.encode("".join(texts))
    return ids


def prompt_ids(turns: Iterable[Turn], tokenizer: Tokenizer) -> list[int]:
    """Tokens of a conversation up to the beginning of the assistant's answer, without begin-of-text token."""
    template = template_of(tokenizer)
    written = [piece for turn in turns for piece in template.pieces(template.turn, turn)]
    return encode_chat(written + template.pieces(template.opening, Turn("assistant", "")), tokenizer)


def answer_ids(content: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens of an answer after its prompt, without end-of-text token."""
    template = template_of(tokenizer)
    return encode_chat(template.pieces(template.answer, Turn("assistant", content)), tokenizer)


# ---- pairs as sequences ----------------------------------------------------------------------------------------------

ROUND = 16
"""Sequences of pairs are padded to a multiple of this."""
AT_ONCE = 1024
"""Sequences that are packed at a time."""


class Pair(NamedTuple):
    """A prompt (a text, or the conversation before an answer) and its answer."""

    prompt: str | tuple[Turn, ...]
    answer: str

    @property
    def text(self) -> str:
        """The pair as a document, for training a tokenizer."""
        said = [self.prompt] if isinstance(self.prompt, str) else [turn.content for turn in self.prompt]
        return "\n".join([*said, self.answer])


def are_pairs(path: Path, text_key: str) -> bool:
    """Whether a file holds pairs: JSON lines whose first object has a field of pairs, and no field `text_key`."""
    if not formats.plain_name(path).endswith((".jsonl", ".ndjson", ".json")):
        return False
    _, first = next(formats.records(path), (0, {}))
    return text_key not in first and not first.keys().isdisjoint({"messages", "prompt", "completion"})


def read(path: Path) -> Iterator[Pair]:
    """The pairs of a file, in order."""
    for number, record in formats.records(path):
        where = f"{path} record {number}"
        if "messages" in record:
            yield from answers_of(turns_of(record["messages"], where), where)
            continue
        for key in ("prompt", "completion"):
            require(key in record, f"{where} has no field {key!r}: a pair has prompt and completion, or messages")
        if isinstance(record["prompt"], list):
            last = record["completion"]
            turns = turns_of([*record["prompt"], *(last if isinstance(last, list) else [last])], where)
            yield Pair(tuple(turns[:-1]), turns[-1].content)
        else:
            yield Pair(formats.field(record, "prompt", where), formats.field(record, "completion", where))


def turns_of(messages: Any, where: str) -> list[Turn]:
    """The messages of a conversation, each an object with `role` and `content`."""
    require(isinstance(messages, list) and messages != [], f"{where}: messages must be a list of objects")
    turns = []
    for message in messages:
        fits = isinstance(message, dict) and isinstance(message.get("role"), str)
        require(fits, f"{where}: a message needs role and content, got {message!r:.60}")
        role = choose(f"{where}: role", message["role"], ROLES)
        turns.append(Turn(role, formats.field(message, "content", where)))
    return turns


def answers_of(turns: list[Turn], where: str) -> Iterator[Pair]:
    """One pair for each assistant message that follows another message."""
    found = [i for i, turn in enumerate(turns) if turn.role == "assistant" and i > 0]
    require(found != [], f"{where}: messages hold no answer: none of role assistant follows another message")
    for i in found:
        yield Pair(tuple(turns[:i]), turns[i].content)


def encode(pair: Pair, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens of the prompt and of the answer, tokenised separately, as when the model generates."""
    if isinstance(pair.prompt, str):
        return tokenizer.encode(pair.prompt), tokenizer.encode(pair.answer)
    return prompt_ids(pair.prompt, tokenizer), answer_ids(pair.answer, tokenizer)


def sequence(prompt: list[int], answer: list[int], length: int, bos: int, eos: int) -> tuple[list[int], int]:
    """(tokens, where the answer begins). A prompt that is too long loses its beginning; an answer that is too long
    loses its end, including the end-of-text token."""
    answer = [*answer, eos][: length - 1]
    kept = prompt[max(0, len(prompt) - (length - 1 - len(answer))) :]
    return [bos, *kept, *answer], 1 + len(kept)


def padded_length(pairs: Iterable[Pair], tokenizer: Tokenizer, length: int) -> int:
    """The length of the longest pair, rounded up to a multiple of ROUND, at most `length`: padding costs time, too."""
    found = (sequence(*encode(pair, tokenizer), length, tokenizer.bos_id, tokenizer.eos_id) for pair in pairs)
    longest = max((len(tokens) for tokens, _ in found), default=1)
    return min(length, -(-longest // ROUND) * ROUND)


def pack(pairs: Iterable[Pair], tokenizer: Tokenizer, length: int, pad: int) -> Iterator[PackedSequences]:
    """Sequences of pairs, padded on the right, with the position where each answer begins."""
    items, dtype = iter(pairs), token_dtype(tokenizer.vocab_size)
    while some := list(itertools.islice(items, AT_ONCE)):
        rows = np.full((len(some), length), pad, dtype=dtype)
        lengths, starts = np.zeros(len(some), dtype=np.int64), np.zeros(len(some), dtype=np.int64)
        for i, pair in enumerate(some):
            tokens, starts[i] = sequence(*encode(pair, tokenizer), length, tokenizer.bos_id, tokenizer.eos_id)
            rows[i, : len(tokens)], lengths[i] = tokens, len(tokens)
        yield PackedSequences(rows, lengths, starts)


def packing_name(tokenizer: Tokenizer) -> str:
    """How pairs are packed, for the fingerprint of prepared data."""
    return f"pairs-{template_of(tokenizer).name}"
