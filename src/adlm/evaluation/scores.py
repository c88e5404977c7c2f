"""Stage 2 of `adlm evaluate`: what a judge says of many rows, kept on disk in pieces.

Rows are judged in pieces of fixed size, each written whole when it is done and named by its place; ranks take every
size-th piece. A run that was killed goes on at the first missing piece, the judge is only loaded if one is missing, and
no number depends on the number of ranks.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adlm.data import Tokenizer
from adlm.evaluation.judge import Judge, Scored, check_rule, identity, locate, read_row, score_rows
from adlm.evaluation.perplexity import progress
from adlm.io.paths import write_atomically
from adlm.training.parallel import World

PIECE = 64


def judge_key(name: str, rule: str, length: int) -> str:
    """What a score depends on beside the row: the judge, the rule, and the length rows are cut to."""
    return digest([identity(locate(name)), rule, length if rule == "release" else 0])


def digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


def judge_samples(
    judge: Callable[[], Judge],
    rule: str,
    tokenizer: Tokenizer,
    samples: Sequence[tuple[int, Sequence[int]]],
    length: int,
    folder: Path,
    batch_size: int,
    ranks: World,
    label: str,
) -> Scored:
    """Scores of (id, tokens) rows in their order; `judge` opens the judge and is called only when needed."""
    pieces = [samples[a : a + PIECE] for a in range(0, len(samples), PIECE)]
    todo = [c for c, piece in enumerate(pieces) if read_piece(folder, c, piece) is None]
    ranks.barrier()  # every rank looks before any rank writes
    mine = todo[ranks.rank :: ranks.size]
    opened = open_together(judge, bool(mine), rule, tokenizer, ranks)
    with progress(f"judging {label}", len(mine), ranks) as advance:
        for c in mine:
            assert opened is not None
            rows = [read_row(opened, rule, tokenizer, tokens, length) for _, tokens in pieces[c]]
            write_piece(folder, c, [i for i, _ in pieces[c]], score_rows(opened, rows, batch_size))
            advance()
    ranks.barrier()
    found = [read_piece(folder, c, piece) for c, piece in enumerate(pieces)]
    complete = [f for f in found if f is not None]
    assert len(complete) == len(found), f"{folder} lost a piece while it was read"
    return Scored(*(np.concatenate(column) for column in zip(*complete)))


def open_together(
    judge: Callable[[], Judge], needed: bool, rule: str, tokenizer: Tokenizer, ranks: World
) -> Judge | None:
    """The judge where it is needed. If it cannot be opened on one rank, or not read by the rule, all ranks fail: none
    waits for another."""
    opened, problem = None, None
    try:
        if needed:
            opened = judge()
            check_rule(opened, rule, tokenizer)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        problem = error
    if ranks.any(problem is not None):
        raise problem or ValueError("the judge cannot be opened on another rank")
    return opened


def piece_path(folder: Path, c: int) -> Path:
    return folder / f"{c:05d}.npz"


def write_piece(folder: Path, c: int, ids: Sequence[int], scored: Scored) -> None:
    write_atomically(piece_path(folder, c), lambda file: np.savez(file, ids=np.array(ids), **scored._asdict()))


def read_piece(folder: Path, c: int, piece: Sequence[tuple[int, Sequence[int]]]) -> Scored | None:
    """None unless the piece is there, whole, and about these rows."""
    try:
        with np.load(piece_path(folder, c)) as found:
            if found["ids"].tolist() != [i for i, _ in piece]:
                return None
            return Scored(*(found[name] for name in Scored._fields))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
