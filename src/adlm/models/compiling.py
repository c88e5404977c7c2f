"""What torch's compiler has to be told before a network is handed to it."""

from typing import Any

import torch
import torch._dynamo
import torch._inductor.config

VARIANTS = 64


def allow_variants() -> None:
    """Compiled forms (of training and inference, of first, middle and last blocks, of every shape) are counted by
    function, over all models of a process; beyond torch's limit of 8 a function just runs uncompiled."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)


def training_options(most: bool) -> dict[str, Any]:
    """`most`: try several kernels for each product."""
    options: dict[str, Any] = {"max_autotune": True} if most else {}
    # Sums along rows and along columns in one kernel (torch 2.11, CUDA): if the column sums are parts of one gradient,
    # as shift and scale of a modulation are, that gradient is never written. tests/test_gpu.py has the case.
    if hasattr(torch._inductor.config.triton, "mix_order_reduction"):
        options["triton.mix_order_reduction"] = False
    return options
