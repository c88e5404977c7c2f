"""Does the fast step have the same loss curve as the dense reference implementation?

Both have the same starting weights, the same text (GPT-2 tokens) and the same noise.

    python benchmarks/loss_parity.py FOLDER [steps=200] [out=FILE] [key=value ...]     # FOLDER: of `adlm data prepare`

Dropout and rounding make two runs of the same step differ, too. So the fast step is also run with another seed: the
difference between the two implementations must be smaller than the difference between the seeds. The learning rate
has a warmup: without it all curves spike early, and a spike multiplies every difference. Prints one JSON document: the
root mean square of both differences in the first ten steps and over the last half; FILE also has all losses.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from adlm.bench.train import measure

from adlm import config
from adlm.data.blocks import Blocks
from adlm.errors import require
from adlm.training.parallel import world

WARMUP = 40  # steps


def main(argv: list[str]) -> None:
    if not argv or "=" in argv[0]:
        raise SystemExit(__doc__)
    folder, *words = argv
    options = dict(word.split("=", 1) for word in words)
    steps, out = int(options.pop("steps", 200)), options.pop("out", "")
    blocks = Blocks(Path(folder))
    settings = ["model=small", *(f"{key}={value}" for key, value in options.items())]
    settings += ["bench.warmup=0", f"bench.steps={steps}", f"bench.dense_steps={steps}"]
    batch = int(config.load(settings).bench.batches)
    require(len(blocks) >= steps * batch, f"{folder} has {len(blocks)} sequences, {steps} steps of {batch} need more")
    tokens = torch.from_numpy(np.asarray(blocks.rows(np.arange(steps * batch)))).long().view(steps, batch, -1)
    curves: dict[str, list[float]] = {}
    for name, which, seed in (("fast", "ours", 1), ("dense", "dense", 1), ("fast, another seed", "ours", 2)):
        cfg = config.load([*settings, f"seed={seed}", f"model.length={tokens.shape[-1]}"])
        with world(cfg.train) as ranks:
            result = measure(cfg, batch, which, ranks, tokens, WARMUP)
        curves[name] = result["losses"]
        print(f"{name}: {result['losses'][0]:.4f} .. {np.mean(result['losses'][-10:]):.4f} (last ten)", file=sys.stderr)
        torch._dynamo.reset()
    fast, dense, other = (np.array(curve) for curve in curves.values())
    half = slice(steps // 2, None)
    found = {
        f"{name}, {where}": float(np.sqrt(np.mean((fast - b)[part] ** 2)))
        for name, b in (("reference", dense), ("seed", other))
        for where, part in (("first ten", slice(10)), ("last half", half))
    }
    line = {"benchmark": "loss parity", "steps": steps, "batch": batch, "torch": torch.__version__, "rms": found}
    print(json.dumps(line))
    if out:
        Path(out).write_text(json.dumps(line | {"losses": curves}))


if __name__ == "__main__":
    main(sys.argv[1:])
