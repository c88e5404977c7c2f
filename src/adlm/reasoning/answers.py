"""Answers: greedy generation for many questions at once, grading, and how sure an accuracy is."""

import math
from typing import Any, NamedTuple

import torch

from adlm.data.tokenizers import Tokenizer
from adlm.reasoning.examples import Example, written_answer
from adlm.reasoning.methods import Encoded, Plan, lay_out, markers_of
from adlm.reasoning.networks import Network
from adlm.reasoning.tasks import TaskSpec
from adlm.reasoning.thoughts import Rows, make_rows, read_rows
from adlm.training.parallel import World


class Score(NamedTuple):
    """How a network did on a set of questions."""

    n: int
    correct: int
    tokens: float
    """Sequential steps per answer: tokens written (without end of text) and continuous thoughts."""
    unfinished: int
    """Texts that had not ended when there was no room left."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.n

    def __str__(self) -> str:
        low, high = wilson(self.correct, self.n)
        return (
            f"accuracy {100 * self.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f}, {self.correct} of {self.n}),"
            f" {self.tokens:.1f} tokens per answer"
        )

    def facts(self) -> dict[str, float | int]:
        low, high = wilson(self.correct, self.n)
        return {
            "n": self.n,
            "correct": self.correct,
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "tokens": self.tokens,
            "unfinished": self.unfinished,
        }


def wilson(correct: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: sensible at 0 and n right answers, where the usual one has no width."""
    p, zz = correct / n, z * z / n
    centre, half = p + zz / 2, z * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(0.0, (centre - half) / (1 + zz)), min(1.0, (centre + half) / (1 + zz))


@torch.inference_mode()
def generate(network: Network, rows: Rows, max_new_tokens: int, eos_id: int, mask_id: int) -> list[list[int]]:
    """The most probable continuation of every row, token by token, up to and with the end of text if it is reached."""
    B, device = len(rows.tokens_BL), rows.tokens_BL.device
    room = network.longest - int(rows.length_B.max())
    steps = min(max_new_tokens, room)
    memory = network.remember(B, min(network.longest, rows.tokens_BL.shape[1] + steps), gradients=False)
    row_B, one_B = torch.arange(B, device=device), torch.ones_like(rows.length_B)
    hidden_BD = read_rows(network, rows, memory)[row_B, rows.length_B - 1]
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


def evaluate(
    network: Any,
    task: TaskSpec,
    examples: list[Example],
    encoded: list[Encoded],
    plan: Plan,
    tokenizer: Tokenizer,
    max_new_tokens: int,
    batch_size: int,
    ranks: World,
) -> tuple[Score, list[str]]:
    """Answer every question under a plan; the score and what was written, in the order of the examples."""
    was_training = network.training
    network.eval()
    markers = markers_of(tokenizer)
    layouts = [lay_out(example, plan, markers) for example in encoded]
    order = sorted(range(len(layouts)), key=lambda i: layouts[i].prompt)  # like lengths together: less padding
    written: list[list[int]] = [[] for _ in layouts]
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        prompts = [layouts[i].tokens[: layouts[i].prompt] for i in part]
        rows = make_rows(prompts, [layouts[i].slots for i in part], plan.fed_back, ranks.device)
        with ranks.autocast():
            answers = generate(network, rows, max_new_tokens, tokenizer.eos_id, tokenizer.mask_id)
        for i, answer in zip(part, answers):
            written[i] = answer
    network.train(was_training)
    ended = [tokens[-1:] == [tokenizer.eos_id] for tokens in written]
    texts = [tokenizer.decode(tokens, skip_special=True) for tokens in written]
    correct = sum(is_right(task, text, example) for text, example in zip(texts, examples))
    thoughts = plan.slots if plan.fed_back else 0
    tokens = (sum(map(len, written)) - sum(ended)) / len(written) + thoughts
    return Score(len(examples), correct, tokens, ended.count(False)), texts


def is_right(task: TaskSpec, text: str, example: Example) -> bool:
    answer = written_answer(text)
    return answer is not None and task.same_answer(answer, example.answer)
