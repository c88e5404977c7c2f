"""What depends on the machine: the attention kernel of a GPU, what torch's compiler has to be told, peak FLOP/s.

Flash and cuDNN compute the same function; which is faster depends on shape, card and version (cuDNN
won by a quarter on an H200 at length 1024), so it is timed once, forward and backward, at the start.
"""

from typing import Any

import torch
import torch.nn.functional as F

from adlm.schema import ModelConfig

VARIANTS = 64


def use(kernel: str) -> None:
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(kernel in ("flash", "any"))
    cuda.enable_cudnn_sdp(kernel in ("cudnn", "any"))
    cuda.enable_mem_efficient_sdp(True)  # masks (the KV cache) and odd shapes
    cuda.enable_math_sdp(True)


def choose_attention(batch: int, cfg: ModelConfig, device: torch.device, backward: bool = True) -> dict[str, float]:
    """Select the faster kernel for this process. Returns the milliseconds measured."""
    times = {}
    for kernel in ("flash", "cudnn"):
        try:
            use(kernel)
            times[kernel] = milliseconds(batch, cfg, device, backward)
        except RuntimeError:  # not built for this card or shape
            continue
    use(min(times, key=lambda k: times[k]) if times else "any")
    return times


def milliseconds(batch: int, cfg: ModelConfig, device: torch.device, backward: bool, repeats: int = 10) -> float:
    """One attention in bf16, forward or both ways."""
    heads = (cfg.n_heads, cfg.kv_heads, cfg.kv_heads)
    shape = (batch, cfg.length, sum(heads), cfg.head_width)
    qkv = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=backward)

    def run() -> None:
        q, k, v = qkv.transpose(1, 2).split(heads, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=cfg.causal, enable_gqa=heads[0] != heads[1])
        if backward:
            out.sum().backward()

    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / repeats


def allow_variants() -> None:
    """Compiled forms (of training and inference, of first, middle and last blocks, of every shape) are counted by
    function, over all models of a process; beyond torch's limit of 8 a function just runs uncompiled."""
    import torch._dynamo  # the compiler takes longer to import than the rest of torch: only where something is compiled

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)


def training_options(most: bool) -> dict[str, Any]:
    """`most`: try several kernels for each product."""
    import torch._inductor.config

    options: dict[str, Any] = {"max_autotune": True} if most else {}
    # Sums along rows and along columns in one kernel (torch 2.11, CUDA): if the column sums are parts of one gradient,
    # as shift and scale of a modulation are, that gradient is never written. tests/plumbing/test_gpu.py has the case.
    if hasattr(torch._inductor.config.triton, "mix_order_reduction"):
        options["triton.mix_order_reduction"] = False
    return options


# Dense bf16 peak of a device, FLOP/s, by a part of its name (vendor data sheets, without sparsity).
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40": 181e12,
    "L4": 121e12,
    "4090": 165e12,
    "3090": 71e12,
}


def peak_flops(device_name: str) -> float | None:
    """Peak of a device by its name; None if unknown (MFU is then not reported)."""
    matches = [part for part in PEAK_FLOPS if part in device_name]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None
