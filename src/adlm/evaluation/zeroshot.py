"""`adlm zeroshot`: perplexity on eight public data sets the model was not trained on, in one command.

Each set is read from data.root if its published files lie there, else from the hub; detokenizer, split and packing are
those of the table of corpora, so that numbers compare with the literature. A set that cannot be read is reported and
does not stop the others, and the result file is written after each set.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from adlm.data.blocks import Blocks
from adlm.data.corpora import defaults
from adlm.data.preparation import prepare
from adlm.data.sources import resolve
from adlm.data.tokenizers import Tokenizer
from adlm.errors import choose, require
from adlm.evaluation import data_facts, model_facts, result_path, versions, write_result
from adlm.evaluation.intervals import Estimate
from adlm.evaluation.perplexity import measure, open_checkpoint, settings
from adlm.evaluation.published import PAPER, published
from adlm.io.export import Loaded, section
from adlm.schema import Config, DataConfig
from adlm.training.parallel import world

# The sets: what the paper has a value of, but for the text that its models are trained on.
SETS = [name for name in PAPER["adlm"].perplexities if name != "openwebtext"]


def run_zeroshot(cfg: Config, args: Sequence[str] = ()) -> dict[str, Any]:
    """`adlm zeroshot CHECKPOINT [set ...]`: a table on the terminal, a JSON file, and the same as a dictionary."""
    names = [choose("zero-shot set", name, SETS) for name in args] or SETS
    path = result_path(cfg.out, cfg.eval.checkpoint, "zeroshot.json")
    with world(cfg.train) as ranks:
        loaded = open_checkpoint(cfg, ranks)
        known = published(cfg.eval.checkpoint, loaded)
        paper = known.perplexities if known else {}
        result: dict[str, Any] = {
            **model_facts(loaded, cfg.eval.checkpoint, cfg.eval.ema),
            "comparable_with_the_paper": bool(paper),
            "published": known.source if known else None,
            "settings": settings(cfg.eval, ranks),
            "versions": versions(ranks.device),
            "sets": {},
        }
        found: dict[str, dict[str, Estimate]] = {}
        for name in names:
            try:
                with ranks.main_first():
                    blocks = sequences_of(name, loaded, cfg.data)
            except (ValueError, OSError, ModuleNotFoundError) as error:
                result["sets"][name] = {"error": " ".join(str(error).split())}
                if ranks.is_main:
                    print(f"{name}: {result['sets'][name]['error']}", file=sys.stderr)
            else:
                found[name] = measure(loaded, blocks, cfg.eval, ranks)
                result["sets"][name] = {
                    **{kind: estimate.as_dict() for kind, estimate in found[name].items()},
                    "paper_perplexity": paper.get(name),
                    "data": data_facts(blocks),
                }
            if ranks.is_main:
                write_result(path, result)
        require(bool(found), "no set could be read; give data.root=FOLDER with local copies")
        if ranks.is_main:
            show(found, result["sets"], paper)
            if known:
                print(f"published: {known.source}")
            print(f"written to {path}")
        return result


def sequences_of(name: str, loaded: Loaded, wishes: DataConfig) -> Blocks:
    """A set's validation sequences for this model: packed, unless it was trained on one document a sequence."""
    trained = section(DataConfig, loaded.info.get("data_settings") or {})
    data = defaults(
        name,
        packing="documents" if trained.packing == "documents" else wishes.packing,
        root=wishes.root,
        cache_dir=wishes.cache_dir,
        max_sequences=wishes.max_sequences,
    )
    return prepare_fitting(data, loaded.tokenizer, loaded.model.config.length)


def prepare_fitting(data: DataConfig, tokenizer: Tokenizer, length: int) -> Blocks:
    """Sequences of `length`; where a set does not fill one, a single shorter one of everything there is."""
    try:
        return prepare(data, tokenizer, length, "valid")
    except ValueError:
        have = 2  # begin and end of the sequence
        for document in resolve(data, "valid").documents(length):
            have += len(tokenizer.encode(document)) + 1
            if have >= length:
                raise
        if have < 4:
            raise
        return prepare(replace(data, packing="stream"), tokenizer, have, "valid")


def show(found: dict[str, dict[str, Estimate]], sets: dict[str, Any], paper: dict[str, float]) -> None:
    """Print the table: one line per set and estimator."""
    table = Table("set", "tokens", "sequences", "length", "perplexity", "95% over sequences", "Monte Carlo", box=None)
    if paper:
        table.add_column("published")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, estimates in found.items():
        for kind, e in estimates.items():
            ends = e.perplexity_interval
            label = name if len(estimates) == 1 else f"{name} {kind}"
            line = [
                label,
                f"{e.tokens:,}",
                f"{e.rows:,}",
                f"{sets[name]['data']['row_length']}",
                f"{e.perplexity:,.2f}",
                "" if ends is None else f"{ends[0]:,.2f} - {ends[1]:,.2f}",
                "" if not e.monte_carlo_error else f"+-{e.perplexity * e.monte_carlo_error:,.2f}",
            ]
            table.add_row(*line, *([f"{paper[name]:.2f}" if name in paper else ""] if paper else []))
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(table)
