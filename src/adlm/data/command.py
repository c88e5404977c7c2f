"""`adlm data list`: the table of corpora. `adlm data prepare`: rows of both splits, ready for training."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from adlm.data.blocks import Blocks, Damaged
from adlm.data.corpora import ALIASES, CORPORA
from adlm.data.preparation import prepare, tokenizer_for
from adlm.errors import choose, require
from adlm.schema import Config

ACTIONS = ("list", "prepare")


def run_data(cfg: Config, args: Sequence[str] = ()) -> dict[str, Any]:
    """`adlm data [list | prepare [split ...]]`; what is printed is also returned."""
    action = choose("adlm data", args[0] if args else "list", ACTIONS)
    if action == "list":
        require(len(args) <= 1, f"adlm data list takes no further word, got {args[1:]}")
        return list_corpora()
    return prepare_splits(cfg, list(args[1:]) or ["train", "valid"])


def list_corpora() -> dict[str, Any]:
    """Print and return the table."""
    table = Table("name", "tokenizer", "length", "rows", "what", box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for name, corpus in CORPORA.items():
        table.add_row(name, corpus.tokenizer, str(corpus.length), "packed" if corpus.wrap else "one each", corpus.about)
    console = Console()
    # A pipe has no width of its own: never break a line that a program reads.
    (console if console.is_terminal else Console(width=200)).print(table)
    return {
        "corpora": {
            name: {
                "about": c.about,
                "hub": f"{c.hub} {c.config}".strip(),
                "tokenizer": c.tokenizer,
                "length": c.length,
                "wrap": c.wrap,
                "detokenizer": c.detokenizer,
            }
            for name, c in CORPORA.items()
        },
        "aliases": ALIASES,
    }


def prepare_splits(cfg: Config, splits: list[str]) -> dict[str, Any]:
    """Prepare (or find) the rows of each split, check every byte, and say where they are."""
    tokenizer = tokenizer_for(cfg.data)
    result: dict[str, Any] = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    for split in splits:
        blocks = prepare(cfg.data, tokenizer, cfg.model.length, split)
        try:
            blocks = Blocks(blocks.folder, check_all=True)
        except Damaged as damage:
            raise ValueError(f"{damage}; remove the folder and prepare again") from None
        facts = {key: blocks.manifest[key] for key in ("documents", "tokens", "rows", "length", "bytes", "seconds")}
        result[split] = {"folder": str(blocks.folder), **facts}
        rate = facts["tokens"] / max(facts["seconds"], 1e-9)
        print(
            f"{split}: {facts['rows']:,} rows of {facts['length']} from {facts['tokens']:,} tokens of "
            f"{facts['documents']:,} documents ({rate:,.0f} tokens/s when made), {facts['bytes'] / 1e6:,.1f} MB"
        )
        print(f"  {blocks.folder}")
    return result
