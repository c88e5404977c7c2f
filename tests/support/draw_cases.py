"""Rows of logits with every mixture of settings, drawn by the kernel and by its reference implementation."""

import torch

from adlm.engine.drawing import Filters, draw


def check_draws(V: int, device: str, N: int = 48, seed: int = 0) -> None:
    """The same tokens from the same sets of tokens; log-probabilities equal but for rounding."""
    from adlm.models.kernels import draw_rows

    g = torch.Generator().manual_seed(seed)

    def pick(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(0, len(values), (N,), generator=g)]

    for dtype in (torch.float32, torch.bfloat16):
        logits = (3 * torch.randn(N, V, generator=g)).to(dtype)
        logits[: N // 4] = logits[: N // 4].round()  # many equal ones
        banned = torch.rand(3, V, generator=g) < 0.2
        banned[:, 0], banned[:, V - 1] = False, True
        top_k = torch.randint(0, V + 5, (N,), generator=g) * (pick(0, 1) > 0)
        slot, position, step = (torch.randint(0, n, (N,), generator=g) for n in (3, 1000, 99))
        request = torch.randint(0, 2**62, (N,), generator=g)
        ints = torch.stack([slot, position, request, step, top_k, pick(0, 0, 1).long()]).to(device)
        floats = torch.stack([pick(0, 1e-39, 0.5, 1, 1.7), pick(0.1, 0.5, 0.9, 1), pick(0, 0.05)]).to(device)
        logits, banned, tokens = logits.to(device), banned.to(device), torch.arange(V, device=device)
        plain = draw(lambda x: x, banned, tokens, logits, ints, floats, Filters(True, True, True, True))
        token, log_p = draw_rows(logits, banned, ints, floats)
        same = (log_p.isfinite() == plain.log_p.isfinite()).all(-1)
        # a float32 quotient or exponential rounded another way can move an edge: on a GPU, in a row at most
        allowed = 0 if device == "cpu" else 1
        assert (~same).sum() <= allowed and (token != plain.token)[same].sum() <= allowed
        torch.testing.assert_close(log_p[same], plain.log_p[same], rtol=1e-5, atol=1e-5)
