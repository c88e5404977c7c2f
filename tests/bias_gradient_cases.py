"""Both backward kernels against autograd of the plain formulas in float64: in Triton's interpreter, and on a GPU."""

import torch
import torch.nn.functional as F

from adlm.models import backward_kernels

GROUPS = 3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def check(got, sums, expected):
    """A gradient and its partial sums; those have to be better than sums of rounded numbers would be."""
    rough = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=rough, atol=rough)
    assert sums.dtype == torch.float32 and sums.shape == (GROUPS, expected.shape[-1])
    total = expected.flatten(0, -2)
    bound = 1e-5 * (1 + total.abs().sum(0))
    assert ((sums.sum(0).double() - total.sum(0)).abs() <= bound).all()


def check_gelu(shape, dtype, device):
    x, g = (2 * torch.randn(shape, device=device).to(dtype) for _ in "xg")
    wide = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(F.gelu(wide, approximate="tanh"), wide, g.double())
    check(*backward_kernels.gelu_backward(g, x, GROUPS), expected)


def turn(x, angle):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def check_heads(B, L, N, H, dtype, device):
    """Gradients in three orders, one of them with the numbers of a head apart; angles by position, and by row, too."""
    gq = torch.randn(B, L, N, H, device=device).to(dtype)
    gk = torch.randn(B, N, L, H, device=device).to(dtype).transpose(1, 2)
    gv = torch.randn(B, L, H, N, device=device).to(dtype).transpose(2, 3)
    for angle in (3 * torch.randn(L, 1, H // 2, device=device), 3 * torch.randn(B, L, 1, H // 2, device=device)):
        qkv = torch.randn(B, L, 3 * N * H, dtype=torch.float64, device=device, requires_grad=True)
        q, k, v = (part.unflatten(-1, (N, H)) for part in qkv.chunk(3, dim=-1))
        outputs = turn(q, angle.double()), turn(k, angle.double()), v
        for gradients in ((gq, gk, gv), (gv, gq, gk), (gk, gv, gq)):
            (expected,) = torch.autograd.grad(outputs, qkv, [g.double() for g in gradients], retain_graph=True)
            check(*backward_kernels.heads_backward(*gradients, angle.cos(), angle.sin(), GROUPS), expected)


def check_kernels(device):
    torch.manual_seed(0)
    for dtype in TOLERANCE:
        for shape in ((2, 3, 40), (1, 53, 300), (1, 0, 16), (97, 128)):
            check_gelu(shape, dtype, device)
        for shape in ((2, 5, 3, 8), (1, 37, 2, 64), (3, 20, 4, 12), (3, 1, 1, 4)):
            check_heads(*shape, dtype, device)
