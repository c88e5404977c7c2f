"""Settings of a tiny reasoning run."""

from adlm import config

TINY = [
    "algo=ar", "model=nano", "task=prosqa-2hop", "model.hidden_size=32", "model.n_blocks=1", "model.n_heads=2",
    "reason.story_steps=0", "reason.n_train=40", "reason.n_valid=8", "reason.n_test=8", "reason.slots=2",
    "reason.epochs=8", "reason.epochs_per_stage=2", "train.valid_every=12", "train.global_batch_size=16",
    "train.log_every=1", "train.device=cpu", "optim.warmup=0", "data.tokenizer=bpe-420",
]  # fmt: skip


def settings(path, *overrides):
    return config.load([*TINY, f"out={path}", *overrides])
