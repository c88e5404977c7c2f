"""A text drawn in the middle of training, so that people see what the numbers mean."""

from torch import Tensor

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.schedules import make_schedule
from adlm.engine import Request, make_engine
from adlm.models import build_model
from adlm.schema import Config


def sample_text(weights: dict[str, Tensor], tokenizer: Tokenizer, cfg: Config, step: int) -> str:
    """One text with the run's own sampling settings, from a model of its own: the one in training may be wrapped,
    compiled or sharded, and the engine folds constants into the weights it is given."""
    model = build_model(cfg.model, tokenizer.vocab_size, tokenizer.mask_id)
    model.load_state_dict(weights)
    device = next(iter(weights.values())).device
    engine = make_engine(
        model.to(device).eval(), make_schedule(cfg.noise), 1, device, compile="false", tau=cfg.objective.tau
    )
    tokens = [tokenizer.mask_id] * min(cfg.sampling.length or cfg.model.length, cfg.model.length)
    if cfg.model.causal:
        tokens[0] = tokenizer.bos_id
    (result,) = engine.run([Request(tokens, cfg.sampling, seed=cfg.sampling.seed + step)])
    return tokenizer.decode(result.tokens, skip_special=True)
