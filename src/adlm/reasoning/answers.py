"""A trained network that answers: how it is asked and graded, and how sure an accuracy is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from adlm.data.tokenizers import Tokenizer
from adlm.errors import require
from adlm.reasoning.examples import Example, written_answer
from adlm.reasoning.methods import IGNORE, Encoded, StagePlan, encode, laid_out_length, lay_out, markers_of
from adlm.reasoning.networks import PaddedSequences, ReasoningNetwork, pad_sequences, read_sequences
from adlm.reasoning.tasks import ReasoningTask
from adlm.training.parallel import World

TOGETHER = 128
"""Questions answered together where eval.batch_size does not say how many."""


class Slot(NamedTuple):
    """What a network says at one [ANT] position."""

    token: int
    """The most probable one."""
    label: int
    """The anchor; IGNORE where the example has none left."""
    nats: float
    """-log of the anchor's probability; 0 without one."""


class Reply(NamedTuple):
    """What a network answered to one question."""

    text: str
    correct: bool
    tokens: int
    """Sequential steps: tokens written (without end of text) and continuous thoughts."""
    ended: bool
    slots: tuple[Slot, ...] = ()
    """Of a method whose slots are trained to be anchors."""


class Accuracy(NamedTuple):
    """How a network did on a set of questions."""

    n: int
    correct: int
    tokens: float
    """Sequential steps per answer."""
    unfinished: int
    """Texts that had not ended when there was no room left."""
    slots: tuple[float, ...] = ()
    """Fraction of the anchors that each slot finds, in order, where some question has one."""
    anchor_nats: float = 0.0
    """Loss per anchor."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.n

    def __str__(self) -> str:
        low, high = wilson(self.correct, self.n)
        anchors = f"; anchors {'/'.join(f'{100 * x:.0f}' for x in self.slots)} %"
        anchors += f", {self.anchor_nats:.2f} nats each" if self.anchor_nats else ""
        return (
            f"accuracy {100 * self.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f}, {self.correct} of {self.n}),"
            f" {self.tokens:.1f} tokens per answer{anchors if self.slots else ''}"
        )

    def facts(self) -> dict[str, float | int]:
        low, high = wilson(self.correct, self.n)
        anchors: dict[str, float | int] = {f"slot_{i}": found for i, found in enumerate(self.slots, 1)}
        return {
            "n": self.n,
            "correct": self.correct,
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "tokens": self.tokens,
            "unfinished": self.unfinished,
        } | (anchors | {"anchor_nats": self.anchor_nats} if anchors else {})


def wilson(correct: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a fraction: sensible at 0 and n right answers, where the usual one has no width."""
    p, zz = correct / n, z * z / n
    centre, half = p + zz / 2, z * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(0.0, (centre - half) / (1 + zz)), min(1.0, (centre + half) / (1 + zz))


def score(replies: Sequence[Reply]) -> Accuracy:
    """The accuracy of answers, of the slots before them, and what they cost."""
    n = len(replies)
    by_slot = [[s for s in slots if s.label != IGNORE] for slots in zip(*(reply.slots for reply in replies))]
    labelled = [slot for slots in by_slot for slot in slots]
    return Accuracy(
        n,
        sum(reply.correct for reply in replies),
        sum(reply.tokens for reply in replies) / n,
        sum(not reply.ended for reply in replies),
        tuple(sum(s.token == s.label for s in slots) / len(slots) for slots in by_slot if slots),
        sum(slot.nats for slot in labelled) / len(labelled) if labelled else 0.0,
    )


@torch.inference_mode()
def read_slots(
    network: ReasoningNetwork, prompts: PaddedSequences, labels: list[list[int]], mask_id: int
) -> list[tuple[Slot, ...]]:
    """What the slots of every prompt say, beside the labels they are given, IGNORE or an anchor."""
    label_BS = torch.tensor(labels, device=prompts.tokens_BL.device)
    each_B = torch.arange(len(labels), device=label_BS.device)
    at_BS = prompts.first_slot_B[:, None] + torch.arange(label_BS.shape[1], device=label_BS.device)
    with torch.compiler.set_stance("force_eager"):  # prompts come in too many shapes
        hidden_BLD = read_sequences(network, prompts)
    logits_BSV = network.head(hidden_BLD[each_B[:, None], at_BS]).float()
    logits_BSV[..., mask_id] = -torch.inf
    found_BS = logits_BSV.argmax(-1)
    nats_BS = -logits_BSV.log_softmax(-1).gather(-1, label_BS.clamp(min=0)[..., None])[..., 0]
    nats_BS = nats_BS.where(label_BS != IGNORE, 0.0)
    rows = zip(found_BS.tolist(), labels, nats_BS.tolist())
    return [tuple(Slot(*slot) for slot in zip(*row)) for row in rows]


@torch.inference_mode()
def generate(
    network: ReasoningNetwork, prompts: PaddedSequences, max_new_tokens: int, eos_id: int, mask_id: int
) -> list[list[int]]:
    """The most probable continuation of every prompt, token by token, with the end of text if it is reached."""
    B, device = len(prompts.tokens_BL), prompts.tokens_BL.device
    room = network.longest - int(prompts.length_B.max())
    steps = min(max_new_tokens, room)
    memory = network.remember(B, min(network.longest, prompts.tokens_BL.shape[1] + steps), gradients=False)
    each_B, one_B = torch.arange(B, device=device), torch.ones_like(prompts.length_B)
    hidden_BD = read_sequences(network, prompts, memory)[each_B, prompts.length_B - 1]
    ended_B = torch.zeros(B, dtype=torch.bool, device=device)
    written = []
    for step in range(steps):
        logits_BV = network.head(hidden_BD).float()
        logits_BV[:, mask_id] = -torch.inf
        token_B = logits_BV.argmax(-1).masked_fill(ended_B, eos_id)
        written.append(token_B)
        ended_B = ended_B | (token_B == eos_id)
        if step + 1 == steps or bool(ended_B.all()):
            break
        hidden_BD = network.read(network.embed(token_B[:, None]), memory, one_B)[:, 0]
    if not written:
        return [[] for _ in range(B)]
    texts = torch.stack(written, dim=1).tolist()
    return [text[: text.index(eos_id) + 1] if eos_id in text else text for text in texts]


@dataclass
class Answerer:
    """A network, and how a stage of its method asks it."""

    network: Any
    tokenizer: Tokenizer
    task: ReasoningTask
    plan: StagePlan
    max_new_tokens: int
    batch_size: int = 0
    """Questions answered together; 0: TOGETHER."""
    anchor_tokens: str = "first"
    """How anchors label the slots (reason.anchor_tokens)."""

    def check_room(self, encoded: list[Encoded], what: str = "questions") -> None:
        """Refuse questions that the network has no room for, instead of counting them as wrong."""
        lengths = [laid_out_length(example, self.plan) for example in encoded]
        longest = max(lengths, default=0)
        require(
            longest <= self.network.longest,
            f"{what}: example {lengths.index(longest) if lengths else 0} has {longest} tokens with its answer, and the"
            f" model reads {self.network.longest} (model.length, or what reason.base was made for); leave it out",
        )

    def answer(self, examples: list[Example], ranks: World) -> tuple[Accuracy, list[Reply]]:
        """Answer every question; the accuracy and the replies, in the order of the examples."""
        encoded = encode(examples, self.tokenizer)
        self.check_room(encoded)
        was_training = self.network.training
        self.network.eval()
        markers, eos_id, mask_id = markers_of(self.tokenizer), self.tokenizer.eos_id, self.tokenizer.mask_id
        layouts = [lay_out(example, self.plan, markers, self.anchor_tokens) for example in encoded]
        order = sorted(range(len(layouts)), key=lambda i: layouts[i].prompt)  # like lengths together: less padding
        written: list[list[int]] = [[] for _ in layouts]
        slots: list[tuple[Slot, ...]] = [() for _ in layouts]
        together = self.batch_size or TOGETHER
        for start in range(0, len(order), together):
            part = order[start : start + together]
            prompts = [layouts[i].tokens[: layouts[i].prompt] for i in part]
            padded = pad_sequences(prompts, [layouts[i].slots for i in part], self.plan.fed_back, ranks.device)
            with ranks.autocast():
                answers = generate(self.network, padded, self.max_new_tokens, eos_id, mask_id)
                said = [()] * len(part)
                if self.plan.anchored and self.plan.slots:
                    labels = [[layouts[i].anchors[at] for at in layouts[i].slots] for i in part]
                    said = read_slots(self.network, padded, labels, mask_id)
            for i, answer, anchors in zip(part, answers, said):
                written[i], slots[i] = answer, anchors
        self.network.train(was_training)
        replies = [self.reply(*each) for each in zip(written, examples, slots)]
        return score(replies), replies

    def reply(self, written: list[int], example: Example, slots: tuple[Slot, ...]) -> Reply:
        """Grade the tokens written to a question."""
        ended = written[-1:] == [self.tokenizer.eos_id]
        text = self.tokenizer.decode(written, skip_special=True)
        answer = written_answer(text)
        correct = answer is not None and self.task.same_answer(answer, example.answer)
        thoughts = self.plan.slots if self.plan.fed_back else 0
        return Reply(text, correct, len(written) - ended + thoughts, ended, slots)

    def anchor_words(self, reply: Reply) -> list[str]:
        """What the slots said, in words."""
        return [self.tokenizer.decode([slot.token]).strip() for slot in reply.slots]
