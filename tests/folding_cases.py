"""Problems for the backward pass of `folding.fold`, and the kernels against their slow twin."""

import torch

from adlm.models.folding import Maps, Parts, unfold


def problem(
    D: int, C: int, bias: bool, dtype=torch.float32, products=torch.float32, device="cpu"
) -> tuple[Maps, Parts]:
    """Gradients of the folded maps, and what was folded."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, as_type: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, as_type)

    own = [(1, C), (6 * D, C), (6 * D,), (D,), (3 * D, D), (D, D), (D,), (4 * D, D), (D, 4 * D)]
    made = [(3 * D, D), (3 * D,), (D, D), (4 * D, D), (4 * D,), (D, 4 * D)]
    if bias:
        own, made = [*own, (4 * D,), (D,)], [*made, (D,)]
    maps, parts = (draw(*shape, as_type=products) for shape in made), (draw(*shape, as_type=dtype) for shape in own)
    return Maps(*maps), Parts(*parts)


def check_kernels(device: str) -> None:
    from adlm.models.folding_kernels import unfold_block

    sizes = [(8, 4), (36, 5), (160, 20)] if device == "cpu" else [(8, 4), (36, 5), (768, 128), (1000, 33)]
    for D, C in sizes:
        for bias, products in ((True, torch.bfloat16), (False, torch.float32)):
            maps, parts = problem(D, C, bias, products=products, device=device)
            vectors = parts.modulation_bias + 0.5
            got = unfold_block(maps, parts, vectors)
            expected = unfold(*(tuple(x.cpu() for x in t if x is not None) for t in (maps, parts)), vectors.cpu())
            for a, b in zip(got, expected, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
                assert (a.cpu() - b).norm() <= 1e-5 * b.norm()
            again = unfold_block(maps, parts, vectors)
            assert all(torch.equal(a, b) for a, b in zip(got, again)), "sums are taken in one order"


if __name__ == "__main__":
    """On the CPU, in a process where TRITON_INTERPRET=1."""
    check_kernels("cpu")
