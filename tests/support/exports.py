"""A tiny untrained model over bytes, as an exported folder."""

from tiny import tiny_model

from adlm.data.tokenizers import raw_bytes
from adlm.io.export import describe, save_folder
from adlm.schema import Config, DataConfig, ObjectiveConfig

L = 24


def export(folder, tokenizer=None, **options):
    """A tiny untrained model over bytes, or over another vocabulary, as an exported folder."""
    tokenizer = tokenizer or raw_bytes()
    model = tiny_model(tokenizer.vocab_size, tokenizer.mask_id, **{"length": L, **options})
    name = "autoregressive" if model.config.causal else "anelbo" if model.config.anchored else "nelbo"
    objective = ObjectiveConfig() if name == "anelbo" else ObjectiveConfig(name=name, gamma=0.0)
    cfg = Config(algo="test", model=model.config, objective=objective, data=DataConfig(name="none", tokenizer="bytes"))
    save_folder(folder, model.state_dict(), tokenizer, describe(cfg, tokenizer, step=3))
    return folder
