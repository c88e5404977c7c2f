"""A trained run -> the model in the box: bf16 weights, small enough to ship inside the package.

    adlm train experiment=box data.path=WIKIPEDIA out=runs/box
    adlm ppl runs/box eval.draws=4
    python scripts/make_box.py runs/box [FOLDER]

Refuses a model above 40 MB. The card says what the text it learned from is licensed under, and the bits per byte that
`adlm ppl` found.
"""

import json
import sys
from pathlib import Path

from adlm.api import load
from adlm.errors import require
from adlm.io.export import WEIGHTS
from adlm.io.load import BOX

MOST_BYTES = 40_000_000
LICENCE = "cc-by-sa-4.0"  # of Wikipedia's text


def make_box(run: Path, folder: Path = BOX) -> Path:
    found = sorted(run.glob("ppl-*.json"))
    require(len(found) == 1, f"{run} must hold one result of `adlm ppl {run}`, got {[f.name for f in found]}")
    bound = json.loads(found[0].read_text())["continuous"]["bits_per_byte"]
    lm = load(str(run))
    # no path of the machine it was trained on
    words = [word for word in lm.info.get("command", []) if not word.startswith(("data.", "out="))]
    tokenizer = lm.info["tokenizer"] | {"name": f"bpe-{lm.tokenizer.vocab_size}"}
    facts = {"command": [*words, "data.path=WIKIPEDIA"], "data_settings": {}, "tokenizer": tokenizer}
    lm.save(folder, precision="bf16", licence=LICENCE, bits_per_byte=bound, **facts)
    size = (folder / WEIGHTS).stat().st_size
    require(size <= MOST_BYTES, f"{folder / WEIGHTS} has {size:,} bytes, at most {MOST_BYTES:,} are shipped")
    return folder


if __name__ == "__main__":
    try:
        print(make_box(*map(Path, sys.argv[1:])))
    except (TypeError, ValueError) as error:
        raise SystemExit(f"make_box: {error}") from None
