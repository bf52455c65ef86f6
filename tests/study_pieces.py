"""Small studies and made-up outcomes; and work for a study's processes, in a module that is quickly imported."""

import os

SMALL = [
    "task.group=s3",
    "task.train_sizes=[2, 4]",
    "task.test_sizes=[4, 8]",
    "task.test_problems=8",
    "model.hidden_size=16",
    "model.intermediate_size=16",
    "model.num_hidden_layers=1",
    "training.steps=2",
    "training.batch_size=8",
    "training.checkpoint_every=1",
    "training.validate_every=0",
    "training.device=cpu",
]
ARMS = {"falcon-1": ["model.mixer=falcon-1"], "mamba2": ["model.mixer=mamba2"]}


def outcome(arm, seed, inside, beyond):
    from fastweight.evaluation.outcomes import Outcome

    return Outcome(arm, seed, arm, 1000, (2, 4), [4, 8], 8, {"token": [inside, beyond], "exact": [0.0, 0.0]})


def work(number: int) -> tuple[bool, str]:
    """Piece 1 fails, piece 2 takes its process with it."""
    if number == 2:
        os._exit(7)
    return number != 1, f"{number} by {os.getpid()} on {os.environ['CUDA_VISIBLE_DEVICES']}"
