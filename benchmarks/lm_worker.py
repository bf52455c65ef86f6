"""Cases of the language-model benchmark in a process of their own: `python -m benchmarks.lm_worker CASE [CASE ...]`.

A case is "train NAME BATCH LENGTH" or "decode NAME BATCH,... PROMPT,..." (every batch after every prompt). NAME is a
recipe, "fla" (FLA's GatedDeltaNet model, 12 layers, 6 heads of 128, expand_v 1, fused cross-entropy, its Triton kernels
tuned among at most FLA_CONFIGURATIONS, without FlashQLA) or "llama" (transformers' Llama, 12 layers of width 768, SDPA,
torch.compile). All of them hold bfloat16 weights (our gates float32) and train on random tokens with fused AdamW and
clipping at 1.0, float32 products in TF32. The process imports, compiles and warms up at once, says so, and measures
when its input says "go", so that one process at a time uses the device for what is timed. A long prompt of many rows is
read once and its state repeated.

With LM_REHEARSE=1 everything runs on a CPU, eagerly, with tiny models and few tokens: whether it runs, not how fast.

Traps: seconds to the first step count from the start of the process, imports included, with other cases compiling
beside it unless the parent holds them back. A training loss that is not near log(vocabulary) after the first step means
that something else was measured; the worker refuses it.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("FLA_FLASH_QLA", "0")  # FLA's own kernels, and TileLang's where its own are wrong (on Hopper)
VOCAB, NEW_TOKENS, WARM_STEPS, STEPS, ROUNDS = 50_257, 64, 4, 6, 4
PROFILE_ROWS = 28
FLA_CONFIGURATIONS = 3  # all of them take minutes
REHEARSE = os.environ.get("LM_REHEARSE") == "1"
DEVICE = "cpu" if REHEARSE else "cuda"
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MOST_READ = 2**20  # tokens of prompts


def age() -> float:
    """Seconds since this process started, its imports included."""
    clock_ticks = os.sysconf("SC_CLK_TCK")
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / clock_ticks
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


CASE: dict[str, str] = {}  # the one at hand, said with everything


def say(kind: str, **what: Any) -> None:
    print("@" + json.dumps({"kind": kind} | CASE | what), flush=True)


def wait_for_go() -> None:
    if sys.stdin.readline().strip() != "go":
        raise SystemExit(0)


def model_of(name: str, compiled: bool) -> Any:
    """The model on the device, in bfloat16."""
    torch.manual_seed(0)
    compiled = compiled and not REHEARSE
    if name == "fla":
        return _fla().to(DEVICE, torch.bfloat16)
    if name == "llama":
        model = _llama().to(DEVICE, torch.bfloat16)
        return torch.compile(model) if compiled else model
    from fastweight.recipes import load_recipe
    from fastweight.training.model import build_model

    settings = ["training.precision=bf16-weights", f"engine.compile={str(compiled).lower()}", "model.backend=auto"]
    settings += [f"model.{key}={size}" for key, size in SMALL.items()] if REHEARSE else []
    return build_model(load_recipe(name, settings)).to(DEVICE)


def _fla() -> Any:
    from benchmarks.peers import few_configurations

    if "fla" not in sys.modules:
        few_configurations(FLA_CONFIGURATIONS)
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM  # type: ignore[import-not-found]

    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_heads": 6, "head_dim": 128, "expand_v": 1}
    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(vocab_size=VOCAB, tie_word_embeddings=True, **sizes))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    } | (SMALL if REHEARSE else {})
    config = LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=65_536, **sizes)
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def optimizer_of(name: str, model: Any) -> torch.optim.Optimizer:
    if name in ("fla", "llama"):
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    from fastweight.recipes import Optimizer
    from fastweight.training.groups import parameter_groups

    return torch.optim.AdamW(parameter_groups(model, Optimizer(learning_rate=1e-4)), fused=True)


def train(name: str, batch: int, length: int, profile: bool) -> None:
    """Tokens/s, peak memory, seconds to the first step."""
    model = model_of(name, compiled=name != "fla").train()
    optimizer, parameters = optimizer_of(name, model), list(model.parameters())
    ids = random_ids(batch, length)
    built = age()

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    loss = float(step())
    first = age()
    if not math.log(VOCAB) - 0.5 < loss < math.log(VOCAB) + 1.5:
        raise RuntimeError(f"the first loss is {loss}, expected about {math.log(VOCAB):.2f}")
    for _ in range(WARM_STEPS):
        step()
    forget()
    say("ready", built_s=round(built, 1), first_step_s=round(first, 1), first_loss=round(loss, 3))
    wait_for_go()
    _seconds(lambda: (step(), step()))
    reset_peak()  # and no more than that: what the allocator holds, the timed steps take
    seconds = [_seconds(lambda: [step() for _ in range(STEPS)]) / STEPS for _ in range(ROUNDS)]
    last = float(step())
    if not last < loss:  # the same batch again and again: a loss that does not fall, or is NaN, is a fault
        raise RuntimeError(f"the loss went from {loss} to {last} on one batch")
    say(
        "result",
        batch=batch,
        length=length,
        last_loss=round(last, 3),
        parameters=sum(p.numel() for p in parameters),
        tokens_per_second=[round(batch * length / s) for s in sorted(seconds)],
        peak_gib=round(peak_memory() / 2**30, 2),
    )
    if profile:
        print(profiled(step), flush=True)


def random_ids(batch: int, length: int) -> Tensor:
    batch, length = (min(batch, 2), min(length, 64)) if REHEARSE else (batch, length)
    random = torch.Generator(DEVICE).manual_seed(0)
    return torch.randint(VOCAB, (batch, length), generator=random, device=DEVICE)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_memory() -> int:
    """Bytes of the device, since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def reset_peak() -> None:
    """Memory that was used counts no more."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def forget() -> None:
    """`reset_peak`, and what the allocator holds goes back to the device."""
    synchronize()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    reset_peak()


def _seconds(run: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def profiled(step: Callable[[], Any]) -> str:
    """A table of the kernels of one step by time on the device, with the step's wall time beside their sum."""
    from torch.profiler import ProfilerActivity, profile

    wall = _seconds(step)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        _seconds(step)
    kernels = [
        event for event in trace.key_averages() if event.self_device_time_total > 0 and event.cpu_time_total == 0
    ]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels) / 1e3
    lines = [f"step {1e3 * wall:.1f} ms, kernels {total:.1f} ms in {sum(e.count for e in kernels)} launches"]
    for event in kernels[:PROFILE_ROWS]:
        lines.append(f"{event.self_device_time_total / 1e3:8.2f} ms {event.count:5d}x  {event.key[:110]}")
    return "\n".join(lines)


@torch.no_grad()
def decode(name: str, batches: list[int], prompts: list[int]) -> None:
    """Tokens/s of greedy decoding after prompts, tokens/s of the prompts, peak memory."""
    model = model_of(name, compiled=False).eval()
    for batch, prompt in ((batches[0], prompts[0]), (batches[0], prompts[-1]), (batches[-1], prompts[0])):
        if name == "llama":
            break
        _decoder(name, model, torch.zeros_like(random_ids(batch, prompt)))(3)
    say("ready", first_step_s=round(age(), 1))
    wait_for_go()
    for prompt in prompts:
        for batch in batches:
            say("result", batch=batch, length=prompt, **_decoded(name, model, batch, prompt))


class _StaticLlama:
    """Llama on transformers' static key-value cache, a CUDA graph a token. The prompt is not read: the cache counts as
    filled with it (of zeros), which takes as long to attend to as any other."""

    graph = True

    def __init__(self, model: Any, batch: int, prompt: int) -> None:
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=prompt + 2 * NEW_TOKENS)
        token = torch.zeros(batch, 1, dtype=torch.long, device=DEVICE)

        def step() -> None:
            token.copy_(model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1))

        step()
        for layer in cache.layers:
            layer.cumulative_length.fill_(prompt)  # type: ignore[union-attr]
        step()
        synchronize()
        self.replay, self.cache, self.prompt = step if REHEARSE else self._recorded(step), cache, prompt

    @staticmethod
    def _recorded(step: Callable[[], None]) -> Callable[[], None]:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            step()
        return recorded.replay

    def __call__(self, num_tokens: int) -> None:
        before = int(self.cache.layers[0].cumulative_length)  # type: ignore[union-attr]
        for _ in range(num_tokens):
            self.replay()
        after = int(self.cache.layers[0].cumulative_length)  # type: ignore[union-attr]
        if before < self.prompt or after != before + num_tokens:
            raise RuntimeError(f"the cache went from {before} to {after} in {num_tokens} tokens")


def _decoded(name: str, model: Any, batch: int, prompt: int) -> dict[str, Any]:
    ids = random_ids(batch, prompt)
    forget()
    holder: dict[str, Any] = {}
    once = name not in ("llama", "fla") and batch * prompt > MOST_READ
    ids, rows = (ids[:1], batch) if once else (ids, 1)
    make = (
        (lambda: _StaticLlama(model, batch, prompt)) if name == "llama" else (lambda: _decoder(name, model, ids, rows))
    )
    prefill = _seconds(lambda: holder.update(more=make()))
    holder["more"](4)
    seconds = _seconds(lambda: holder["more"](NEW_TOKENS))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_second": [round(batch * NEW_TOKENS / seconds, 1)],
        "prefill_tokens_per_second": None if name == "llama" or once else round(batch * prompt / prefill),
        "peak_gib": round(peak_memory() / 2**30, 2),
        "cuda_graph": holder["more"].graph,
    }


class _Decoder:
    """After the prompt; called with a number, it decodes so many tokens greedily."""

    graph = False

    def __init__(self, model: Any, cache: Any, token: Tensor) -> None:
        self.model, self.cache, self.token, self.call = model, cache, token, model

    def __call__(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            named: dict[str, Any] = {_cache_name(): self.cache}
            output = self.call(input_ids=self.token, use_cache=True, **named)
            after = getattr(output, _cache_name())
            self.cache = self.cache if after is None else after
            self.token = output.logits[:, -1:].argmax(-1)


def _cache_name() -> str:
    from fastweight.models.cache import CACHE_NAME

    return CACHE_NAME


def _decoder(name: str, model: Any, ids: Tensor, repeats: int = 1) -> _Decoder:
    """The prompt, read in pieces so that 64 long ones fit, and what decodes after it in `repeats` copies."""
    cache: Any = None
    graph = name not in ("fla", "llama")
    if graph:
        from fastweight.models.cache import FastWeightCache

        cache = FastWeightCache(model.config, static=True, max_cache_len=ids.shape[1] + 2 * NEW_TOKENS)
    piece = max(64, 2**17 // len(ids))
    logits = None
    for part in ids.split(piece, dim=1):
        named: dict[str, Any] = {_cache_name(): cache}
        output = model(input_ids=part, use_cache=True, logits_to_keep=1, **named)
        cache, logits = getattr(output, _cache_name()), output.logits
    assert logits is not None, "a prompt has tokens"
    if repeats > 1:
        cache.batch_repeat_interleave(repeats)
    decoder = _Decoder(model, cache, logits[:, -1:].argmax(-1).repeat_interleave(repeats, 0))
    if graph:
        from fastweight.models.decoding import GraphedForward

        decoder.call, decoder.graph = GraphedForward(model), True
    return decoder


def main() -> None:
    torch.set_float32_matmul_precision("high")
    for case in [word for word in sys.argv[1:] if not word.startswith("--")]:
        what, name, *sizes = case.split()
        batches, lengths = ([int(size) for size in text.split(",")] for text in sizes)
        CASE.update(case=case, what=what, name=name)
        if what == "train":
            train(name, batches[0], lengths[0], "--profile" in sys.argv)
        else:
            decode(name, batches, lengths)
        say("done")
        forget()


if __name__ == "__main__":
    main()
