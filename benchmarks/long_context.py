"""How far rounding drifts along a very long sequence: `python -m benchmarks.long_context`.

    results/long-context/drift.json, drift.png     relative error of outputs and of the memory, by position and rule
    --merge A/drift.json B/drift.json              one file and picture of several runs, of a rule each

One head of one sequence is read segment by segment, the State carried on, once in bfloat16 by the path that training
takes (kernels on a GPU, and nothing else there; float32 arithmetic on a CPU) and once in float64 from the same rounded
inputs. A memory that accumulated errors would show a line that rises. The judge in float64 is the chunk form, because
a million tokens one by one take minutes; on the first JUDGED tokens it must equal the recurrence itself. Traps: inputs
are drawn segment by segment from one generator, so the sequence can be as long as one likes; carries go up to 1 - 1e-4,
so that a memory reaches ten thousand tokens back.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastweight as fw
from fastweight.evaluation.provenance import made_by

SEED = 0
JUDGED, SAME = 1024, 1e-11


def segments(rule: fw.Rule, T: int, length: int, K: int, V: int, device: Any) -> Any:
    """Inputs of each segment, bfloat16 tokens and float32 gates, one head."""
    rng = torch.Generator(device).manual_seed(SEED)
    for _ in range(T // length):
        q, k, v = (torch.randn(1, length, 1, n, generator=rng, device=device) for n in (K, K, V))
        q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
        gates = (1, length, 1, V) if rule.gain == "column" else (1, length, 1)
        beta = 0.1 + 0.9 * torch.rand(gates, generator=rng, device=device)
        lam = 10 ** (-4 + 2 * torch.rand(1, length, 1, generator=rng, device=device))
        yield [t.bfloat16() for t in (q, k, v)] + [beta, lam]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def judged(rule: fw.Rule, inputs: list[Tensor]) -> float:
    """How far the chunk form in float64 is from one token at a time; more than rounding raises RuntimeError."""
    wide = [t[:, :JUDGED].double() for t in inputs]
    by_chunk, by_token = (
        fw.fast_weight_attention(*wide, rule=rule, output_final_state=True, backend="torch", form=form)
        for form in ("chunk", "recurrent")
    )
    assert by_chunk[1] is not None, "it was asked for"
    assert by_token[1] is not None, "it was asked for"
    worst = max(error(by_chunk[0], by_token[0]), error(by_chunk[1].S, by_token[1].S))
    if not worst <= SAME:
        raise RuntimeError(f"{rule.name}: the chunk form in float64 is {worst} from the recurrence, expected {SAME}")
    return worst


def drift(rule: fw.Rule, T: int, length: int, K: int, V: int, device: Any, limit: float) -> dict[str, Any]:
    """Errors of outputs and memory at the end of every segment; stops after `limit` seconds."""
    found: dict[str, Any] = {"rule": rule.name, "position": [], "o": [], "S": []}
    backend = "triton" if device == "cuda" else "auto"
    state = exact_state = None
    begun = told = time.monotonic()
    for turn, inputs in enumerate(segments(rule, T, length, K, V, device), 1):
        with torch.no_grad():
            if turn == 1:
                found["judge"] = judged(rule, inputs)
            o, state = fw.fast_weight_attention(
                *inputs, rule=rule, initial_state=state, output_final_state=True, backend=backend
            )
            exact, exact_state = fw.fast_weight_attention(
                *(t.double() for t in inputs),
                rule=rule,
                initial_state=exact_state,
                output_final_state=True,
                backend="torch",
            )
        assert state is not None, "it was asked for"
        assert exact_state is not None, "it was asked for"
        found["position"].append(turn * length)
        found["o"].append(error(o, exact))
        found["S"].append(error(state.S, exact_state.S))
        now = time.monotonic()
        if now - told > 10:
            rate, told = turn * length / (now - begun), now
            left = (T - turn * length) / rate
            print(f"{rule.name}: {turn * length:,} tokens, {rate:,.0f} tokens/s, {left:.0f} s left", flush=True)
        if now - begun > limit:
            break
    return found


def picture(results: list[dict[str, Any]], path: Path, title: str) -> None:
    """One line for each rule; the memory's error and that of outputs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharex=True)
    for axis, key, what in zip(axes, ("S", "o"), ("memory", "outputs"), strict=True):
        for result in results:
            axis.plot(result["position"], result[key], label=result["rule"], linewidth=1.2)
        top = 1.2 * max(max(result[key]) for result in results)
        axis.set(xscale="log", ylim=(0, top), xlabel="tokens read", ylabel=f"relative error of the {what}")
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8, loc="lower right")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw(about: dict[str, Any], directory: Path) -> None:
    path = "kernels in bfloat16" if about["device"] == "cuda" else "bfloat16 in and out, float32 inside, on a CPU"
    picture(about["results"], directory / "drift.png", f"Error against float64: {path}")


def write(about: dict[str, Any], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "drift.json").write_text(json.dumps(about) + "\n")
    draw(about, directory)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rules", default=",".join(fw.RULES))
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--segment", type=int, default=2**13)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--limit", type=float, default=600, help="seconds for a rule; it then stops where it is")
    parser.add_argument("--out", type=Path, default=Path("results/long-context"))
    parser.add_argument("--draw-only", action="store_true", help="the picture again, from the JSON")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="JSON files that become one; measure nothing")
    chosen = parser.parse_args(arguments)
    if chosen.draw_only:
        return draw(json.loads((chosen.out / "drift.json").read_text()), chosen.out)
    if chosen.merge:
        parts = [json.loads(path.read_text()) for path in chosen.merge]
        made = parts[0]["made"] | {"command": "; ".join(part["made"]["command"] for part in parts)}
        results = [result for part in parts for result in part["results"]]
        return write(parts[0] | {"made": made, "results": results}, chosen.out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for name in chosen.rules.split(","):
        results.append(
            drift(fw.RULES[name], chosen.tokens, chosen.segment, chosen.width, chosen.width, device, chosen.limit)
        )
        last = {key: f"{results[-1][key][-1]:.2e}" for key in ("o", "S")}
        print(f"{name}: after {results[-1]['position'][-1]:,} tokens {last}", flush=True)
        made = made_by("python -m benchmarks.long_context " + " ".join(arguments or sys.argv[1:]))
        write({"made": made, "device": device, "width": chosen.width, "results": results}, chosen.out)
    return None


if __name__ == "__main__":
    main()
