"""Install an adapted model in four bits as the model that ships in the package ("box").

    adlm export runs/box runs/box-4bit --four-bit
    adlm ppl runs/box-4bit eval.block_length=1,4,16,64,0
    python scripts/make_box.py runs/box-4bit [1,4,16,64,0]

The weights are copied unchanged, so the bounds on the card are those of the shipped model. The last argument reorders
the block lengths of model.block_length; the first one is the default. Refuses a model that does not support every block
length, is larger than 80 MB, has not been measured, or was not made from the model that the licence names.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file

from adlm.errors import require
from adlm.io.export import CARD, TOKENIZER, WEIGHTS, Loaded, load_folder, place_for_export, read_shapes, save_folder
from adlm.io.load import BOX, SMOLLM2
from adlm.io.quantised import CODES

MOST_BYTES = 80_000_000
BASE = "SmolLM2-135M-Instruct"
NEW_TOKENS = 128
"""Default number of new tokens of a text: takes seconds on a CPU."""
DATA = "wikipedia and pydocs"
LICENCE = "cc-by-sa-4.0"
LICENCE_TEXT = f"""\
The language model in this folder (model.safetensors, tokenizer.json, config.json, README.md)

It is made of three works:

1. Its weights began as those of {BASE} by Hugging Face, and its tokenizer is that model's
   (https://huggingface.co/HuggingFaceTB/{BASE}). Both are available under the Apache License 2.0
   (SPDX: Apache-2.0), whose text is the file LICENSE at the root of the source tree of adlm. Changed: the network reads
   and writes blocks of masked tokens, its weights were trained further, and they were rounded to four bits.
2. It was trained further on articles of the English Wikipedia (https://en.wikipedia.org), written by the contributors
   to Wikipedia, whose text is available under the Creative Commons Attribution-ShareAlike 4.0 International License
   (SPDX: CC-BY-SA-4.0, https://creativecommons.org/licenses/by-sa/4.0/legalcode).
3. And on the documentation inside Python's standard library (https://www.python.org), copyright the Python Software
   Foundation, under the PSF License Version 2 (SPDX: PSF-2.0).

The model as it is here is available under CC BY-SA 4.0. What it has from {BASE} stays under Apache-2.0.
You may share and adapt it, also commercially, if you give credit, say what you changed, and distribute what you make
of it under the same licence. Credit: "the model of the adlm package, by the adlm authors, made of
{BASE} by Hugging Face and trained on English Wikipedia and Python's
documentation". The model is offered as it is, without warranties; the legal code has the terms.

The code of adlm is under Apache-2.0.
"""


def make_box(source: Path, order: str = "", folder: Path = BOX) -> Path:
    """Write the folder. `order`: order of the block lengths; empty: that of model.block_length."""
    loaded = load_folder(source)
    words = check(source, loaded)
    found = bounds(source)
    model = loaded.model.config
    order = order or model.block_length
    lengths = replace(model, block_length=order).block_lengths
    same = set(lengths) == set(model.block_lengths)  # training may repeat one; here each is named once
    require(same, f"{order} is no order of the block lengths of {source}, which are {model.block_length}")
    missing = ",".join(str(length) for length in sorted(set(lengths)) if length not in found)
    require(not missing, f"{source} was not measured for K={missing}: adlm ppl {source} eval.block_length={missing}")
    info: dict[str, Any] = loaded.info | {
        "model": loaded.info["model"] | {"block_length": order},
        "tokenizer": loaded.info["tokenizer"] | {"name": BASE},
        "command": words, "data": DATA, "data_settings": {}, "licence": LICENCE, "base": f"{BASE} (Apache-2.0)",
        "new_tokens": NEW_TOKENS, "bits_per_byte": found[lengths[0]].bits_per_byte, "valid_nll": found[lengths[0]].nats,
        "bounds": ", ".join(f"{length}: {found[length].bits_per_byte:.3f}" for length in sorted(set(lengths))),
    }  # fmt: skip
    save_folder(place_for_export(folder), load_file(source / WEIGHTS), loaded.tokenizer, info)
    (folder / "LICENSE").write_text(LICENCE_TEXT, encoding="utf-8")
    return folder


def check(source: Path, loaded: Loaded) -> list[str]:
    """Refuse models that cannot be shipped; return the command that made the model, without paths of its machine."""
    model = loaded.model.config
    whole = {1, model.length} <= set(model.block_lengths)
    require(whole, f"{source} has model.block_length={model.block_length!r}: the box continues texts, and fills holes")
    four_bit = any(name.endswith(CODES) for name in read_shapes(source / WEIGHTS))
    require(four_bit, f"{source} is not in four bits: adlm export {source} FOLDER --four-bit")
    size = sum((source / name).stat().st_size for name in (WEIGHTS, TOKENIZER, CARD))
    require(size <= MOST_BYTES, f"{source} has {size:,} bytes, at most {MOST_BYTES:,} are shipped")
    command = loaded.info.get("command", [])
    words = [word for word in command if not word.startswith(("data=", "data.", "out="))]
    words = [Path(word).name if "=" not in word else word for word in words]
    is_known = any(BASE in word or word == SMOLLM2 for word in words)
    require(is_known, f"{source} was not made of {BASE}, which the licence names, but by {' '.join(words) or '?'}")
    return [*words, "data.path=WIKIPEDIA-AND-PYDOCS"]


class Bound(NamedTuple):
    bits_per_byte: float
    nats: float
    """Per token."""


def bounds(source: Path) -> dict[int, Bound]:
    """The bound for each block length."""
    files = sorted(source.glob("ppl-*.json"))
    what = f"{source} must hold one result of `adlm ppl {source}`, got {[file.name for file in files]}"
    require(len(files) == 1, what)
    result = json.loads(files[0].read_text(encoding="utf-8"))
    return {
        int(name[2:]): Bound(value["bits_per_byte"], value["nats_per_token"])
        for name, value in result.items()
        if name.startswith("K=")
    }


if __name__ == "__main__":
    try:
        print(make_box(Path(sys.argv[1]), *sys.argv[2:3]))
    except (IndexError, TypeError, ValueError) as error:
        raise SystemExit(f"make_box: {error}") from None
