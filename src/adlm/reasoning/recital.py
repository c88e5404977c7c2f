"""Before the first stage, for a network from scratch: stories, told again and thought through.

The methods of the paper start from pretrained GPT-2, which can already look up in its context what was said of a word.
A network from scratch has to form that circuit first, and once more behind itself for two lookups in one pass; but a
question asks for one or two lookups among tokens that need none, and its answer is a coin: the network stays at a
coin's accuracy for thousands of steps. Here every statement is a lookup. A story says of some individuals and some
kinds what each of them is. The row tells some of it again in another order, one lookup a statement, and then what each
of them is two statements away, two lookups each. No question is answered in it: that is left to the stages.
"""

import random
from dataclasses import replace

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.uniforms import Stream, fold
from adlm.errors import require
from adlm.reasoning.examples import Example
from adlm.reasoning.generators import Shape, vocabulary
from adlm.reasoning.logic import either_or, statement
from adlm.reasoning.methods import Plan, encode, lay_out, markers_of
from adlm.reasoning.networks import HuggingFaceNetwork, OwnNetwork
from adlm.reasoning.tasks import shape_of
from adlm.reasoning.thoughts import batch_loss, make_batch
from adlm.schema import Config
from adlm.training.optim import Updater, learning_rate_factor
from adlm.training.parallel import Step, World

NAMES, KINDS = 2, 4
"""Individuals and kinds of a story."""


def story(rng: random.Random, shape: Shape) -> dict[str, str]:
    """Who is what. The kinds stand in a circle, each is the next: so what is two statements away can be said of
    everyone, and no story is the statements of a question."""
    names, kinds = vocabulary(shape)
    circle = rng.sample(kinds, KINDS)
    return dict(zip([*circle, *rng.sample(names, NAMES)], [*circle[1:], circle[0], *rng.sample(circle, NAMES)]))


def retold(rng: random.Random, shape: Shape, plain: bool) -> Example:
    """A story as a question; its trace is the story again, in another order, and its answer is what follows from two
    statements, of everyone, in a third order. If not `plain`, a question ends the story and only some of it is told
    again, as in the rows of the stages. The question is about kinds drawn at random and what comes after it does not
    depend on it: it teaches that a question says nothing of anyone."""
    is_a = story(rng, shape)
    first, second, third = (rng.sample(list(is_a), len(is_a)) for _ in range(3))
    told, again = ([statement(who, is_a[who], shape.terse) for who in order] for order in (first, second))
    follows = [statement(who, is_a[is_a[who]], shape.terse) for who in third]
    if not plain:
        who = rng.choice([name for name in first if name[0].isupper()])
        one, two = rng.sample([kind for kind in first if kind[0].islower()], 2)
        told.append(either_or(who, one, two, shape.terse))
        again = again[: rng.randint(0, len(again))]
    return Example(" ".join(told), (" ".join(again),) if again else (), " ".join(follows), ())


def recite(
    network: OwnNetwork | HuggingFaceNetwork, tokenizer: Tokenizer, cfg: Config, ranks: World, multiple: int = 1
) -> float:
    """Train on new stories for reason.story_steps steps, with optimizers of its own; the loss of the last step per token.
    Rows are padded to a multiple of `multiple` positions.

    Everything is a function of the seed and nothing is saved: a run killed here begins again, and one that has a
    checkpoint has this behind it."""
    shape = shape_of(cfg.reason)
    names, kinds = vocabulary(shape)
    require(
        cfg.reason.task == "prosqa" and len(names) >= NAMES and len(kinds) >= KINDS,
        f"reason.story_steps={cfg.reason.story_steps} tells stories of {NAMES} names and {KINDS} kinds of prosqa",
    )
    module = Step(network, batch_loss)
    update = Updater(cfg.optim, module)
    markers, size = markers_of(tokenizer), cfg.train.global_batch_size
    network.train()
    loss, rate, constant = float("nan"), cfg.reason.story_lr_ratio, replace(cfg.optim, schedule="constant")
    for step in range(cfg.reason.story_steps):
        rng = random.Random(fold(cfg.seed, Stream.TOKEN, step))
        plain = step < cfg.reason.story_steps // 2
        stories = encode([retold(rng, shape, plain) for _ in range(size)], tokenizer)
        layouts = [lay_out(story, Plan(), markers) for story in stories]
        longest = max(len(layout.tokens) for layout in layouts)
        require(
            longest <= network.longest,
            f"a story of reason.story_steps has {longest} tokens and there is room for {network.longest} (model.length)",
        )
        batch = make_batch(layouts, False, 0.0, tokenizer.mask_id, ranks.device, multiple)
        with ranks.autocast():
            mean = module(batch).total / batch.task.count
        mean.backward()
        update(rate * learning_rate_factor(constant, step, cfg.reason.story_steps))
        if step + 1 == cfg.reason.story_steps:
            loss = mean.item()
    return loss
