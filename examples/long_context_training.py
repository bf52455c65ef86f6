"""Train on sequences longer than one backward can hold: segment by segment, the state handed on (truncated BPTT).

A document names a symbol in its first segment and asks for it in each later one. Whoever starts each segment afresh can
only guess; whoever carries the state can know. Three runs differ in nothing but what happens between segments: carrying
costs no memory, and every segment that gradients may cross costs the memory of one more segment. Run it with
`python examples/long_context_training.py`; half a minute on one core.
"""

import math
import time
from itertools import pairwise

import torch
import torch.nn.functional as F

from fastweight.models import FastWeightCache, FastWeightConfig, FastWeightForCausalLM

SYMBOLS, SEGMENT, SEGMENTS, BATCH, STEPS = 16, 8, 4, 32, 80
NAMES, ASKS = SYMBOLS, SYMBOLS + 1  # the two words that stand before the symbol


def documents(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [BATCH, SEGMENT * SEGMENTS], random but for the questions, and the answers [BATCH]."""
    ids = torch.randint(SYMBOLS, (BATCH, SEGMENTS, SEGMENT), generator=generator)
    answers = torch.randint(SYMBOLS, (BATCH,), generator=generator)
    ids[:, 0, 1], ids[:, 0, 2] = NAMES, answers
    ids[:, 1:, -1] = ASKS
    return ids.flatten(1), answers


def read(model, ids: torch.Tensor, answers: torch.Tensor, carry: bool, cut_every: int) -> float:
    """Reads a batch segment by segment, adds up gradients, and gives the mean loss of the answers.

    Args:
        carry: hand the state on; otherwise every segment starts with an empty one.
        cut_every: segments between two cuts of the graph.
    """
    cache, pending, losses = FastWeightCache(model.config), [], []
    for number, (start, end) in enumerate(pairwise(range(0, SEGMENT * SEGMENTS + 1, SEGMENT)), 1):
        if not carry:
            cache = FastWeightCache(model.config)
        logits = model(ids[:, start:end], cache=cache, logits_to_keep=1).logits[:, -1]
        if number > 1:
            pending.append(F.cross_entropy(logits, answers) / (SEGMENTS - 1))
        if pending and (number % cut_every == 0 or number == SEGMENTS):
            losses += [loss.item() for loss in pending]
            torch.stack(pending).sum().backward()
            pending = []
        if number % cut_every == 0:
            cache.detach()  # the same numbers, cut from the graph
    return sum(losses)


def train(name: str, carry: bool, cut_every: int) -> list[float]:
    """Losses of one run, by step."""
    torch.manual_seed(0)
    config = FastWeightConfig(
        vocab_size=SYMBOLS + 2, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, mixer="falcon-1"
    )
    model = FastWeightForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses, begun = torch.Generator().manual_seed(0), [], time.monotonic()
    for step in range(1, STEPS + 1):
        losses.append(read(model, *documents(generator), carry, cut_every))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            rate = step / (time.monotonic() - begun)
            left = (STEPS - step) / rate
            print(f"{name}: step {step}, loss {losses[-1]:.2f}, {rate:.1f} steps/s, {left:.0f} s left", flush=True)
    return losses


def main() -> None:
    torch.set_num_threads(1)
    runs = {
        "starts afresh": train("starts afresh", carry=False, cut_every=1),
        "carries, cut after each": train("carries, cut after each", carry=True, cut_every=1),
        "carries, never cut": train("carries, never cut", carry=True, cut_every=SEGMENTS),
    }
    print(f"\nLoss of the answers, mean of 10 steps (guessing: {math.log(SYMBOLS):.2f})")
    print(f"{'':<26}{'start':>8}{'middle':>8}{'end':>8}")
    for name, losses in runs.items():
        parts = (losses[:10], losses[STEPS // 2 - 5 : STEPS // 2 + 5], losses[-10:])
        print(f"{name:<26}" + "".join(f"{sum(part) / len(part):>8.2f}" for part in parts))


if __name__ == "__main__":
    main()
