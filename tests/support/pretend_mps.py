"""An Apple GPU for tests on machines without one: tensors that say they are on `mps`, in the memory of the CPU.

What MPS refuses is refused here: float64, and a tensor of the CPU beside one of the device, unless it is a single
number or an index.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

CPU, MPS = torch.device("cpu"), torch.device("mps")
MIXED = {Tensor.__getitem__, Tensor.__setitem__, Tensor.copy_, Tensor.index_put_}  # may take tensors of the host


class OnMps(Tensor):
    """A tensor that says it is on `mps`."""

    device = property(lambda self: MPS)  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnMps":
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied._is_param = isinstance(self, torch.nn.Parameter)  # type: ignore[attr-defined]
        memo[id(self)] = copied
        return copied  # type: ignore[return-value]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Pretending(TorchFunctionMode):
    """Also what has no tensor of the device among its inputs: torch.zeros(..., device="mps"), x.to("mps")."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function of torch; what it returns is on `mps` if its inputs are, or if its arguments say so."""
    if func in (torch.device, torch._C._nn._parse_to):  # they speak of devices, and take no tensors
        return func(*args, **kwargs)
    if func is torch._has_compatible_shallow_copy_type:  # nn.Module.to asks: may a parameter just take the new data?
        return isinstance(args[0], OnMps) == isinstance(args[1], OnMps)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    there = any(isinstance(x, OnMps) for x in tensors)
    if there and func is Tensor.numpy:
        raise TypeError("can't convert mps:0 device type tensor to numpy")
    in_backward = torch._C._current_graph_task_id() != -1  # gradients come as torch makes them
    beside = [x for x in tensors if not isinstance(x, OnMps) and x.dim()]
    if there and beside and not in_backward and func not in MIXED:
        raise RuntimeError(f"{func}: expected all tensors on mps, found {[tuple(x.shape) for x in beside]} on cpu")
    targets = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
    targets += [torch.device(x) for x in (*args, kwargs.get("device")) if isinstance(x, str) and x in ("cpu", "mps")]
    if targets or func is Tensor.cpu:
        asked = bool(targets) and targets[0].type == "mps"
        if there and not asked:
            refuse_float64([x for x in args if isinstance(x, torch.dtype)] + [kwargs.get("dtype")], "on the way")
        there = asked
    if func is Tensor.copy_:
        there = isinstance(args[0], OnMps)
    args, kwargs = tree_map(lambda x: CPU if is_mps(x) else x, (args, kwargs))
    with torch._C.DisableTorchFunction():
        out = func(*args, **kwargs)
        found = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        if not found:  # a torch.Size would come back from tree_map as a tuple
            return out
        if there:
            refuse_float64([x.dtype for x in found], str(func))
            return tree_map(lambda x: x if not isinstance(x, Tensor) or isinstance(x, OnMps) else wrap(x), out)
        return tree_map(lambda x: x.as_subclass(Tensor) if isinstance(x, OnMps) else x, out)


def wrap(x: Tensor) -> Tensor:
    return x.as_subclass(OnMps)


def is_mps(x: Any) -> bool:
    return (isinstance(x, torch.device) and x.type == "mps") or (isinstance(x, str) and x == "mps")


def refuse_float64(dtypes: list[Any], where: str) -> None:
    if torch.float64 in dtypes:
        raise TypeError(f"the MPS framework doesn't support float64 ({where})")


@contextmanager
def pretend_mps() -> Iterator[None]:
    """Inside, `mps` is a device."""
    with Pretending():
        yield
