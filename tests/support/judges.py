"""Tiny models to judge, and tiny causal models that stand for a judge."""

from pathlib import Path

import pytest
import torch
from runs import run_config

from adlm.training.loop import train


def save_gpt2(folder: Path) -> None:
    """A GPT-2 of two tiny blocks over bytes, with an end-of-text token, as transformers stores it."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end)
    torch.manual_seed(0)
    cfg = transformers.GPT2Config(
        vocab_size=len(vocabulary), n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        initializer_range=0.5,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(cfg).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_judged(folder: Path) -> Path:
    """A diffusion model and a causal one, trained on the same file, and a Hugging Face folder with random weights."""
    for algo in ("adlm", "ar"):
        train(run_config(folder, algo=algo, out=folder / algo, train__steps=4))
    save_gpt2(folder / "gpt2")
    return folder
