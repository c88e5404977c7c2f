"""Conversations as tokens: the one rule by which fine-tuning and the server write them.

A vocabulary with the marks of a known template is written by it (Qwen, SmolLM2 and Dream have ChatML's marks, LLaDA
and Llama 3 Llama's); others as plain lines, "User: ..." and "Assistant: ...". Marks are special tokens and what people
write never becomes one.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from adlm.data.tokenizers import Tokenizer

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
    """How a conversation is written: {role} and {Role} stand for the role, {content} for what was said."""

    name: str
    turn: str
    opening: str
    """What stands before an answer of the assistant."""
    answer: str
    marks: tuple[str, ...] = ()
    """Special tokens in it, which the vocabulary must have."""
    stop: str = ""
    """Text with which the next turn begins, where no special token ends an answer."""

    def pieces(self, form: str, turn: Turn) -> list[Piece]:
        """A turn, or what stands before one, as marks and texts. What was said is put in after the marks are found."""
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
    ),
    Template(
        "llama",
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{content}<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
)


def template_of(tokenizer: Tokenizer) -> Template:
    """The first template whose marks are special tokens of the vocabulary; else plain lines."""
    special = {tokenizer.backend.id_to_token(i) for i in tokenizer.special_ids}
    return next((template for template in TEMPLATES if special.issuperset(template.marks)), PLAIN)


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> list[int]:
    """Ids of what a template wrote: a mark is one special token, and texts between two marks are tokenised together."""
    ids: list[int] = []
    for is_mark, together in itertools.groupby(pieces, key=lambda piece: piece.is_mark):
        texts = [piece.text for piece in together]
        if is_mark:
            ids += [found for text in texts if (found := tokenizer.backend.token_to_id(text)) is not None]
        else:
            ids += tokenizer.encode("".join(texts))
    return ids


def prompt_ids(turns: Iterable[Turn], tokenizer: Tokenizer) -> list[int]:
    """A conversation as the tokens that an answer of the assistant continues, without begin of text."""
    template = template_of(tokenizer)
    written = [piece for turn in turns for piece in template.pieces(template.turn, turn)]
    return encode(written + template.pieces(template.opening, Turn("assistant", "")), tokenizer)


def answer_ids(content: str, tokenizer: Tokenizer) -> list[int]:
    """An answer as the tokens that follow its prompt, without end of text."""
    template = template_of(tokenizer)
    return encode(template.pieces(template.answer, Turn("assistant", content)), tokenizer)
