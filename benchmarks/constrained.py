"""The cost of a constraint: seconds of a step with and without one, with a large vocabulary; one JSON line.

    python benchmarks/constrained.py                           # CPU, vocabulary 49,152, 256 positions
    python benchmarks/constrained.py --device cuda --length 1024

Weights are random. The vocabulary consists of random pieces of text, so no file is needed.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

from adlm.constrain.automaton import byte_automaton, lift  # noqa: E402
from adlm.constrain.json_schema import schema_regex  # noqa: E402
from adlm.constrain.matching import Constraint, backward  # noqa: E402
from adlm.engine import Engine, Request  # noqa: E402
from adlm.models import build_model  # noqa: E402
from adlm.schema import ModelConfig, SamplingConfig  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 4},
        "kind": {"enum": ["person", "place", "thing"]},
    },
    "required": ["name", "age"],
}


def vocabulary(size: int) -> list[bytes]:
    """Special tokens 0 to 3 (the end of a text is 1, the mask 3), all bytes, and random pieces of text."""
    rng, pieces = random.Random(0), {bytes([i]) for i in range(256)}
    letters = b'abcdefghijklmnopqrstuvwxyz0123456789{}[]",: '
    while len(pieces) < size - 4:
        pieces.add(bytes(rng.choice(letters) for _ in range(rng.randint(2, 9))))
    return [b""] * 4 + sorted(pieces)


def seconds_per_step(engine: Engine, request: Request) -> float:
    began, (result,) = time.perf_counter(), engine.run([request])
    if engine.evaluator.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / result.nfe


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--vocab", type=int, default=49152)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--device", default="cpu")
    args = p.parse_args()
    spelled = vocabulary(args.vocab)
    began = time.perf_counter()
    byte = byte_automaton(schema_regex(SCHEMA))
    bytes_at = time.perf_counter()
    automaton = lift(byte, spelled, eos_id=1)
    made = time.perf_counter()
    cfg = ModelConfig(
        hidden_size=args.hidden, n_heads=4, n_blocks=4, n_denoiser_blocks=2, length=args.length, dropout=0.0
    )
    torch.manual_seed(0)
    engine = Engine(build_model(cfg, args.vocab, 3), slots=1, device=args.device)
    c = SamplingConfig(sampler="mdlm", steps=args.steps)
    tokens, constraint = [0] + [3] * (args.length - 1), Constraint(automaton)
    times = {}
    for name, more in {"free": {}, "constrained": {"constraint": constraint}}.items():
        seconds_per_step(engine, Request(tokens, c, 0, **more))  # warm-up
        times[name] = min(seconds_per_step(engine, Request(tokens, c, seed, **more)) for seed in range(3))
    mass = np.log(np.random.default_rng(0).random((args.length, automaton.every + 1)))
    began_fb = time.perf_counter()
    backward(automaton, mass, np.zeros(len(automaton.accepting_S)))
    print(
        json.dumps(
            {
                "benchmark": "constrained",
                "vocabulary": args.vocab,
                "length": args.length,
                "device": args.device,
                "states": len(automaton.accepting_S),
                "letters": automaton.every + 1,
                "edges": len(automaton.letter_E),
                "byte_automaton_s": round(bytes_at - began, 3),
                "token_automaton_s": round(made - bytes_at, 3),
                "step_free_s": round(times["free"], 4),
                "step_constrained_s": round(times["constrained"], 4),
                "overhead_s": round(times["constrained"] - times["free"], 4),
                "of_which_messages_s": round(time.perf_counter() - began_fb, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
