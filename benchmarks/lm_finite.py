"""Does training stay finite on a GPU, and if not, which part is it? `python -m benchmarks.lm_finite`, about a minute.

A few steps of the 130M falcon-1.3 recipe under bfloat16 autocast, on skewed random tokens, with the Hopper kernels,
with their walks but the plain gradient, without any of them, and of the softmax Transformer. Printed are the loss, the
gradient norm, parameters whose gradient is not finite and the first modules whose output is not; a case ends where
one shows.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fastweight.kernels import launch_hopper, launch_hopper_gradient
from fastweight.recipes import load_recipe
from fastweight.training.groups import parameter_groups
from fastweight.training.model import build_model

STEPS, BATCH, LENGTH, WARM_UP, SHOWN = 6, 32, 1024, 4, 3
CASES = {  # name: recipe, whether Hopper kernels are asked for, whether their gradient is taken
    "hopper": ("falcon-1.3", True, True),
    "hopper, plain gradient": ("falcon-1.3", True, False),
    "plain": ("falcon-1.3", False, False),
    "transformer": ("transformer", False, False),
}


def tokens(vocab_size: int) -> Iterator[torch.Tensor]:
    """Batches in which few ids are frequent."""
    random = np.random.default_rng(0)
    while True:
        drawn = random.random((BATCH, LENGTH)) ** 3 * (vocab_size - 1)
        yield torch.from_numpy(1 + drawn.astype(np.int64)).cuda()


def watch(model: torch.nn.Module) -> list[str]:
    """Names of modules, in the order in which they gave something that is not finite."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: Any, given: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and not first.isfinite().all():
                found.append(name)

        return hook

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(look(name))
    return found


def run(name: str, recipe: str) -> bool:
    """Whether all steps were finite."""
    settings = load_recipe(recipe, ["training.precision=bf16"])
    model: Any = build_model(settings).cuda().train()
    optimizer = torch.optim.AdamW(parameter_groups(model, settings.optimizer), betas=(0.9, 0.95), fused=True)
    outputs, batches = watch(model), tokens(model.config.vocab_size)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = settings.optimizer.learning_rate * min(1.0, step / WARM_UP)
        ids = next(batches)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found = f"gradients {gradients[-SHOWN:]}, outputs {outputs[:SHOWN]}" if gradients or outputs else "finite"
        print(
            f"{name:24s} step {step + 1}  loss {float(loss):8.4f}  gradient norm {float(norm):8.4f}  {found}",
            flush=True,
        )
        if gradients or outputs:
            return False
        optimizer.step()
        optimizer.zero_grad()
    return True


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.lm_finite: needs a CUDA device")
    fits = launch_hopper_gradient.fits
    for name, (recipe, hopper, gradient) in CASES.items():
        os.environ[launch_hopper.SWITCH] = str(int(hopper))
        launch_hopper_gradient.fits = fits if gradient else _never
        run(name, recipe)
        torch.cuda.empty_cache()


def _never(*_: Any) -> bool:
    return False


if __name__ == "__main__":
    main()
