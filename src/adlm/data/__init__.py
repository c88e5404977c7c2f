"""Text in, batches of token rows out. Nothing here imports torch.

    cfg = DataConfig(name="pydocs")
    tokenizer = tokenizer_for(cfg)
    blocks = prepare(cfg, tokenizer, length=128, split="train")
    for batch in Batches(blocks, seed=1, global_batch_size=32): ...

Adding a corpus = one line in CORPORA (corpora.py), and a reader in FORMATS (formats.py) if its files are of a new kind.
"""

from adlm.data.blocks import Blocks
from adlm.data.corpora import CORPORA, defaults, find_local
from adlm.data.loader import Batch, Batches, RowOrder
from adlm.data.preparation import prepare, tokenizer_for
from adlm.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "CORPORA",
    "Batch",
    "Batches",
    "Blocks",
    "RowOrder",
    "Tokenizer",
    "defaults",
    "find_local",
    "load_tokenizer",
    "prepare",
    "tokenizer_for",
]
