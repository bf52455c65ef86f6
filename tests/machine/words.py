"""The words of Triton's language that only compute, over PyTorch tensors; layouts are left to Triton's compiler."""

import types
from typing import Any

import torch

WORDS: dict[str, Any] = {}  # by the name that kernels know them by


def word(function: Any) -> Any:
    WORDS[function.__name__] = function
    return function


class Tile(torch.Tensor):
    """What kernels hold in registers; numbers too."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Tile":  # pyright: ignore
        return self.view(dtype) if bitcast else super().to(dtype)  # pyright: ignore

    @property
    def type(self) -> Any:  # pyright: ignore
        return types.SimpleNamespace(layout=None)

    # A kernel's a += b makes a new value, which what else has the name of the old one does not see.
    __iadd__ = torch.Tensor.__add__
    __isub__ = torch.Tensor.__sub__
    __imul__ = torch.Tensor.__mul__
    __iand__ = torch.Tensor.__and__


def tile(value: Any) -> Tile:
    return torch.as_tensor(value).as_subclass(Tile)


@word
def arange(start: int, end: int, layout: Any = None) -> Tile:
    return tile(torch.arange(start, end, dtype=torch.int32))


@word
def where(keep: Any, a: Any, b: Any) -> Tile:
    return tile(torch.where(torch.as_tensor(keep), a, b))


@word
def minimum(a: Any, b: Any) -> Any:
    tensors = [part for part in (a, b) if isinstance(part, torch.Tensor)]
    return min(a, b) if not tensors else tile(torch.minimum(*(torch.as_tensor(part) for part in (a, b))))


@word
def maximum(a: Any, b: Any) -> Any:
    tensors = [part for part in (a, b) if isinstance(part, torch.Tensor)]
    return max(a, b) if not tensors else tile(torch.maximum(*(torch.as_tensor(part) for part in (a, b))))


@word
def inline_asm_elementwise(asm: str, constraints: str, args: list[Any], **_: Any) -> Tile:
    known = {"rcp.approx": torch.reciprocal, "ex2.approx": torch.exp2, "lg2.approx": torch.log2}
    for name, function in known.items():
        if asm.startswith(name):
            return tile(function(args[0]))
    assert asm.startswith("mov."), f"moves and {', '.join(known)} only"
    return args[0] if args else tile(torch.tensor(0, dtype=torch.int32))


@word
def associative_scan(value: Tile, axis: int, combine: Any) -> Tile:
    assert float(combine(tile(2.0), tile(3.0))) == 5, "sums only"
    return tile(torch.cumsum(value, axis))


@word
def xor_sum(value: Tile, axis: int) -> Tile:
    total = torch.zeros_like(value.select(axis, 0))
    for part in value.unbind(axis):
        total = total ^ part
    return tile(total)


@word
def reduce(values: tuple[Tile, ...], axis: int, combine: Any) -> tuple[Tile, ...]:
    pairs = [*(tile(2.0 + at) for at in range(len(values))), *(tile(3.0) for _ in values)]
    assert [float(value) for value in combine(*pairs)] == [5.0 + at for at in range(len(values))], "sums only"
    return tuple(tile(value.sum(axis)) for value in values)


@word
def dot(a: Tile, b: Tile, acc: Any = None, input_precision: str = "") -> Tile:
    made = a.float() @ b.float()
    return tile(made if acc is None else made + acc)


@word
def mma_v2(a: Tile, b: Tile, acc: Any, input_precision: str = "") -> Tile:
    return dot(a, b, acc)


def _reduce(name: str) -> Any:
    def reduce(value: Tile, axis: int) -> Tile:
        return tile(getattr(torch, name)(value, dim=axis))

    return reduce


def _full(shape: Any, value: Any, dtype: torch.dtype, layout: Any = None) -> Tile:
    return tile(torch.full(tuple(shape), value, dtype=dtype))


WORDS |= {
    "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype),
    "full": _full,
    "zeros_like": lambda value: tile(torch.zeros_like(value)),
    "exp2": torch.exp2,
    "log2": torch.log2,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "sum": _reduce("sum"),
    "min": _reduce("amin"),
    "max": _reduce("amax"),
    "cumsum": lambda value, axis: tile(torch.cumsum(value, axis)),
    "gather": lambda value, index, axis: tile(torch.gather(value, axis, index.long())),
    "reshape": lambda value, shape: value.reshape(tuple(shape)),
    "permute": lambda value, order: value.permute(tuple(order)),
    "trans": lambda value: value.transpose(0, 1),
    "cdiv": lambda a, b: -(-a // b),
    "static_range": range,
    "range": lambda *ends, **_: range(*map(int, ends)),
    "join": lambda a, b: torch.stack((a, b), -1),
    "split": lambda value: (value[..., 0], value[..., 1]),
    "debug_barrier": lambda: None,
    "convert_layout": lambda value, layout: value,
    "fast_dividef": lambda a, b: a / b,
    "fast_log2f": torch.log2,
    "constexpr": lambda value: value,
    "SliceLayout": lambda *_, **__: None,
    "BlockedLayout": lambda *_, **__: None,
    "DotOperandLayout": lambda *_, **__: None,
    "NVMMADistributedLayout": lambda *_, **__: None,
    "SwizzledSharedLayout": lambda *_, **__: "rows",
    "PaddedSharedLayout": types.SimpleNamespace(with_identity_for=lambda *_, **__: "rows"),
    "NVMMASharedLayout": types.SimpleNamespace(get_default_for=lambda *_, **__: "tiled"),
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
}
