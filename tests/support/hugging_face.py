"""Folders as transformers writes them."""

import pytest
import torch


def make_folder(path, tokenizer, **options):
    transformers = pytest.importorskip("transformers")
    cfg = transformers.GPT2Config(
        vocab_size=tokenizer.vocab_size, n_positions=64, n_embd=16, n_layer=1, n_head=2, **options
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(cfg).save_pretrained(path)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    fast.save_pretrained(path)
