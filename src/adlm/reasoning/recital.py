"""Before the first stage, for a network from scratch: stories told twice.

The methods of the paper start from pretrained GPT-2, which can already look up in its context what was said of a word.
A network from scratch has to form that circuit first, and a question asks for one or two lookups among tokens that need
none: it stays at a coin's accuracy for thousands of steps. Here every statement is a lookup. A story is a few
statements drawn at random and the row tells it again in another order. Nothing is asked and nothing is concluded in it:
that is left to the stages.
"""

import random
from dataclasses import replace

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.uniforms import Stream, fold
from adlm.errors import require
from adlm.reasoning.examples import Example
from adlm.reasoning.generators import Shape, vocabulary
from adlm.reasoning.methods import Plan, encode, lay_out, markers_of
from adlm.reasoning.networks import HuggingFaceNetwork, OwnNetwork
from adlm.reasoning.tasks import shape_of
from adlm.reasoning.thoughts import batch_loss, make_batch
from adlm.schema import Config
from adlm.training.optim import Updater, learning_rate_factor
from adlm.training.parallel import Step, World

FACTS = 3
"""Statements about individuals in a story, and as many about kinds."""


def retold(rng: random.Random, shape: Shape) -> Example:
    """A story as a question, the same story in another order as its answer."""
    names, kinds = vocabulary(shape)
    whats = rng.sample(kinds, 2 * FACTS)
    individuals = [f"{who} is a {what}." for who, what in zip(rng.sample(names, FACTS), whats)]
    others = [f"Every {who} is a {what}." for who, what in zip(rng.sample(kinds, FACTS), whats[FACTS:])]
    story = individuals + others
    first, second = (" ".join(rng.sample(story, len(story))) for _ in range(2))
    return Example(first, (), second, ())


def recite(network: OwnNetwork | HuggingFaceNetwork, tokenizer: Tokenizer, cfg: Config, ranks: World) -> float:
    """Train on new stories for reason.recite steps, with optimizers of its own; the loss of the last step per token.

    Everything is a function of the seed and nothing is saved: a run killed here begins again, and one that has a
    checkpoint has this behind it."""
    shape = shape_of(cfg.reason)
    names, kinds = vocabulary(shape)
    require(
        cfg.reason.task == "prosqa" and len(names) >= FACTS and len(kinds) >= 2 * FACTS,
        f"reason.recite={cfg.reason.recite} tells stories of {FACTS} names and {2 * FACTS} kinds of prosqa",
    )
    module = Step(network, batch_loss)
    update = Updater(cfg.optim, module)
    markers, size = markers_of(tokenizer), cfg.train.global_batch_size
    network.train()
    loss, rate, constant = float("nan"), cfg.reason.recite_rate, replace(cfg.optim, schedule="constant")
    for step in range(cfg.reason.recite):
        rng = random.Random(fold(cfg.seed, Stream.TOKEN, step))
        stories = encode([retold(rng, shape) for _ in range(size)], tokenizer)
        layouts = [lay_out(story, Plan(), markers) for story in stories]
        batch = make_batch(layouts, False, 0.0, tokenizer.mask_id, ranks.device)
        with ranks.autocast():
            mean = module(batch).total / batch.task.count
        mean.backward()
        update(rate * learning_rate_factor(constant, step, cfg.reason.recite))
        if step + 1 == cfg.reason.recite:
            loss = mean.item()
    return loss
