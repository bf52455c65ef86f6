"""Every rank compares its part with what it computes alone: `python -m tests.parallel_runs PART RANKS`, forked.

A part is a function of this module that takes (rank, size); it raises where they differ. Whatever is compared, the loss
of all ranks together is the loss of one process, so gradients of this rank's tokens must be those of one process, and
gradients of what all ranks hold must add up to them.
"""

import importlib
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import fastweight as fw
from fastweight.kernels import launch_additive, launch_solve
from fastweight.kernels.launch import Walk
from fastweight.memory import borders
from fastweight.models.cache import CACHE_NAME
from fastweight.parallel import context_parallel
from fastweight.training import train
from tests.conftest import assert_close
from tests.lm_runs import finish, processes, run_of, write_data

HEADS = (2, 4)  # of keys and of values
WIDTHS = (5, 3)


def problem(
    rule: fw.Rule, B: int, T: int, rows: int, dtype: torch.dtype, heads: tuple[int, int], seed: int = 0
) -> dict[str, Any]:
    """Inputs and weights of a loss, the state of `rows` sequences that have seen something."""
    rng = torch.Generator().manual_seed(seed)
    (Hk, H), (K, V) = heads, WIDTHS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    gates = (B, T, H, V) if rule.gain == "column" else (B, T, H)
    tokens = {
        "q": normal(B, T, Hk, K),
        "k": normal(B, T, Hk, K),
        "v": normal(B, T, H, V),
        "beta": (0.1 + 1.7 * torch.rand(gates, generator=rng, dtype=torch.float64)).to(dtype),
        "lam": (2 * torch.rand(B, T, H, generator=rng, dtype=torch.float64)).to(dtype),
    }
    seen = {name: tensor[:1].expand(rows, *tensor.shape[1:])[:, :5] for name, tensor in tokens.items()}
    _, state = fw.fast_weight_attention(**seen, rule=rule, output_final_state=True)
    assert state is not None
    return {"tokens": tokens, "state": state, "w_o": normal(B, T, H, V), "w_S": normal(rows, H, K, V)}


def leaves(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in values.items()}


def losses(o, state, w_o, w_S, share: int) -> torch.Tensor:
    """Of outputs, the final memory, and everything else that a state holds."""
    rest = sum((part.double() ** 2).sum() for part in (state.z, state.key, state.tail_x, state.tail_y))
    return (o * w_o).sum() + ((state.S * w_S).sum() + rest) / share


def compare(
    label: str,
    rule: fw.Rule,
    dtype: torch.dtype,
    B: int,
    T: int,
    cu=None,
    mask=None,
    state=True,
    heads=HEADS,
    here="torch",
) -> None:
    """One call on all ranks, on backend `here`, against the same call on one."""
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = B if cu is None else len(cu) - 1
    given = problem(rule, B, T * size, rows, dtype, heads)
    mine = slice(rank * T, (rank + 1) * T)

    def run(tokens, share: int, mask, backend: str):
        tokens, begun = leaves(tokens), leaves(given["state"]._asdict()) if state else None
        start = None if begun is None else fw.State(**begun)
        o, final = fw.fast_weight_attention(
            **tokens, rule=rule, initial_state=start, output_final_state=True, cu_seqlens=cu, mask=mask, backend=backend
        )
        w_o = given["w_o"] if share == 1 else given["w_o"][:, mine]
        losses(o, final, w_o, given["w_S"], share).backward()
        grads = {name: t.grad for name, t in (tokens | (begun or {})).items() if t.is_floating_point()}
        return o, final, grads

    o, final, grads = run(given["tokens"], 1, mask, "torch")
    with context_parallel():
        part = run(
            {name: t[:, mine] for name, t in given["tokens"].items()},
            size,
            None if mask is None else mask[:, mine],
            here,
        )
    assert_close(part[0], o[:, mine], dtype, "forward", f"{label} o")
    for name, ended, whole in zip(fw.State._fields, part[1], final, strict=True):
        assert_close(ended, whole, dtype, "state", f"{label} state.{name}")
    for name, whole in grads.items():
        found = part[2][name]
        found = torch.zeros_like(whole) if found is None else found
        whole = torch.zeros_like(found) if whole is None else whole
        if name in given["tokens"]:
            whole = whole[:, mine]
        else:
            dist.all_reduce(found)
        assert_close(found, whole, dtype, "gradient", f"{label} d{name}")


def op(rank: int, size: int) -> None:
    """Every rule: dense, masked, packed, carried states, parts shorter than a window; two ranks see some of it."""
    T, total = 5, 5 * size
    dtypes = (torch.float64, torch.float32)
    names = list(fw.RULES) if size > 2 else ["falcon-1", "falcon-2", "falcon-3a"]
    for name, rule in ((name, fw.RULES[name]) for name in names):
        compare(f"{name} dense", rule, dtypes[size % 2], B=2, T=7)
        packings: list[tuple[int, ...]] = [(0, 2, 2, total - 6, total), (0, total)]
        if size > 2:
            compare(f"{name} fresh", rule.replace(timing="read-before-write"), torch.float64, B=1, T=3, state=False)
            compare(f"{name} same-step", rule.replace(pairing="same-step", ridge="scaled"), torch.float64, B=2, T=2)
            packings = [(0, 0, 5, 6, total - 1, total, total), (0, 3, total - 2, total)]
        compare(f"{name} masked", rule, torch.float64, B=2, T=T, mask=holes(total)[size % 2])
        for cu in packings:
            bounds = torch.tensor(cu, dtype=torch.int32)
            compare(f"{name} packed {cu}", rule, torch.float64, B=1, T=T, cu=bounds)
        compare(f"{name} packed, masked", rule, torch.float64, B=1, T=T, cu=bounds, mask=holes(total)[0][:1])
    read = fw.RULES["falcon-1a"].replace(read="normalized", read_eps=1.0)
    compare("normalised read", read, torch.float64, B=2, T=5)


def holes(total: int) -> list[torch.Tensor]:
    """Masks of two rows: at random, and one that leaves nothing of whole ranks."""
    some = torch.rand(2, total, generator=torch.Generator().manual_seed(3)) > 0.4
    few = torch.zeros(2, total, dtype=torch.bool)
    few[:, 1:3], few[0, -1] = True, True
    return [some, few]


def model(rank: int, size: int) -> None:
    """Tiny models of every memory: losses, logits, caches and the gradients of all parameters, packed and not."""
    packed = torch.tensor([0, 2, 2, 9, 11, 6 * size], dtype=torch.int32)
    for mixer in ("falcon-2", "retnet"):
        compare_models(mixer, B=2)
    for mixer in ("falcon-3a", "retnet", "mamba2", "gated-deltanet"):
        compare_models(mixer, B=1, cu_seqlens=packed)
    compare_models("retnet", B=2, padded=True)
    compare_models("falcon-1", B=2, padded=True, checkpointed=True)
    for mixer in ("falcon-3", "falcon-1a", "gated-deltanet"):
        compare_models(mixer, B=2, padded=True, rotary=True, value_skip=True, conv_start="copy")
    compare_models("falcon-3a", B=1, cu_seqlens=packed, rotary=True, value_skip=True, conv_activation="none")
    with context_parallel(), pytest.raises(ValueError, match="mixer: got 'transformer'"):
        tiny("transformer")(torch.zeros(1, 3, dtype=torch.long))


def tiny(mixer: str, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"vocab_size": 19, "initializer_range": 0.2}
    return fw.FastWeightForCausalLM(fw.FastWeightConfig(mixer=mixer, **sizes, **options))


def compare_models(
    mixer: str, B: int, cu_seqlens=None, padded: bool = False, checkpointed: bool = False, **options: Any
) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    T = 6
    here = slice(rank * T, (rank + 1) * T)
    ids = torch.randint(19, (B, T * size), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.2, -100)
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        labels[0, :4] = -100  # and what a masked token, whose output means nothing, would predict
    found: list[Any] = []
    for share in (1, size):
        at = slice(None) if share == 1 else here
        net = tiny(mixer, **options).train()
        if checkpointed:
            net.gradient_checkpointing_enable({"use_reentrant": False})
        around = {"cu_seqlens": cu_seqlens, "attention_mask": None if mask is None else mask[:, at]}
        with nullcontext() if share == 1 else context_parallel():
            loss = net(ids[:, at], labels=labels[:, at], **around).loss
        loss.backward()  # outside: checkpoints remember the group
        with torch.no_grad(), nullcontext() if share == 1 else context_parallel():
            told = net.eval()(ids[:, at], use_cache=True, **around)
        found.append((loss.detach(), {n: p.grad for n, p in net.named_parameters()}, told))
    (loss, grads, told), (part, parts, told_here) = found
    dist.all_reduce(part)
    assert_close(part, loss, torch.float32, "forward", f"{mixer} loss")
    for name, whole in grads.items():
        mine = torch.zeros_like(whole) if parts[name] is None else parts[name]
        dist.all_reduce(mine)
        assert_close(mine, whole, torch.float32, "gradient", f"{mixer} d{name}")
    real = torch.ones_like(ids)[:, here, None] if mask is None else mask[:, here, None]
    assert_close(told_here.logits * real, told.logits[:, here] * real, torch.float32, "forward", f"{mixer} logits")
    caches = [output.get(CACHE_NAME) for output in (told, told_here)]
    for whole, mine in zip(*(cache.layers for cache in caches), strict=True):
        expected = whole.load().tensors()
        for name, tensor in mine.load().tensors().items():
            assert_close(tensor, expected[name], torch.float32, "state", f"{mixer} cached {name}")


def kernels(rank: int, size: int) -> None:
    """The exchange inside the kernels, in Triton's interpreter, with two pieces on each of two ranks."""
    importlib.import_module("tests.interpreter")  # mends what the interpreter lacks
    for module in (launch_solve, launch_additive):
        engine = module._engine
        module._engine = lambda given, where, *_, engine=engine: (engine(given, where)[0], Walk(where, 3, 1))
    Walk.of = classmethod(lambda cls, where, programs: cls(where, 3, 1))
    served: list[bool] = []
    fits = borders.fits
    borders.fits = lambda *call: served.append(fits(*call)) or served[-1]
    for name, options, T in MIDDLE if size > 2 else ENDS:
        compare(
            f"{name} {options}", fw.RULES[name].replace(**options), torch.float32, 1, T, heads=(1, 1), here="triton"
        )
    if size > 2:
        compare(
            "grouped heads", fw.RULES["falcon-3a"].replace(window=2), torch.float32, 2, 5, heads=(1, 2), here="triton"
        )
        compare("fresh", fw.RULES["falcon-1"], torch.float32, 1, 9, state=False, heads=(1, 1), here="triton")
    assert served == [True] * (len(MIDDLE) + 2 if size > 2 else len(ENDS)), served


ENDS: list[tuple[str, dict[str, Any], int]] = [
    ("falcon-1", {"ridge": "scaled"}, 66),
    ("falcon-1a", {}, 66),
    ("falcon-3a", {}, 66),
    ("falcon-2a", {}, 66),
    ("falcon-3a", {"pairing": "same-step", "window": 3, "step": "direct"}, 20),
]
MIDDLE: list[tuple[str, dict[str, Any], int]] = [
    ("falcon-1", {"pairing": "same-step"}, 9),
    ("falcon-1a", {"step": "direct"}, 9),
    ("falcon-3a", {"ridge": "scaled"}, 9),
    ("falcon-2a", {"pairing": "same-step"}, 9),
]


PARTS = {"op": op, "model": model, "kernels": kernels}


def training(directory: Path) -> None:
    """Two steps of `train` by one process, and by two that share each sequence; with documents too."""
    data = write_data(directory / "data")
    for packing in ("contiguous", "documents"):
        for ranks in (1, 2):
            changes = {
                "task": {"packing": packing},
                "training": {"steps": 2, "micro_batch_size": 4, "log_every": 1, "validate_every": 2},
                "engine": {"context_parallel": ranks},
            }
            run, out = run_of(data, **changes), directory / f"{packing}-{ranks}"
            finish(processes(lambda run=run, out=out: train(run, out, console=Console(quiet=True)), ranks))


def main(part: str, size: int) -> None:
    def one() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        try:
            for name in part.split(","):
                PARTS[name](dist.get_rank(), size)
        except Exception:
            traceback.print_exc()
            raise
        dist.destroy_process_group()

    finish(processes(one, size))


if __name__ == "__main__":
    training(Path(sys.argv[2])) if sys.argv[1] == "training" else main(sys.argv[1], int(sys.argv[2]))
