"""Tiny token shards and recipes, and a driver that trains in processes of its own: `python -m tests.lm_runs DIR`.

The driver imports everything once and forks a process for each run, so that real SIGKILLs at many moments and two gloo
processes cost seconds. It prints nothing; what the runs have left under DIR is what tests compare.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tokenizers import Tokenizer, models

from fastweight.data.writer import SplitWriter
from fastweight.recipes import Run
from fastweight.recipes.loader import build_run
from fastweight.training import train

VOCAB = 24
SETTINGS: dict[str, Any] = {
    "name": "lm",
    "task": {"kind": "text", "sequence_length": 16, "validation_sequences": 5},
    "model": {
        "mixer": "falcon-3a",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "initializer_range": 0.1,
    },
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
    "training": {
        "steps": 8,
        "batch_size": 8,
        "micro_batch_size": 4,
        "checkpoint_every": 2,
        "keep_checkpoints": 2,
        "log_every": 3,
        "validate_every": 4,
        "threads": 1,
        "device": "cpu",
    },
    "engine": {"report": "none"},
}


def run_of(data: Path, **changes: dict[str, Any]) -> Run:
    """The tiny run on `data`, with sections changed."""
    raw = {key: value | changes.get(key, {}) if isinstance(value, dict) else value for key, value in SETTINGS.items()}
    raw["task"] = raw["task"] | {"data": str(data)}
    return build_run(raw)


def write_data(directory: Path, seed: int = 0, documents: int = 40) -> Path:
    """Shards "train" and "validation" of random documents that repeat themselves, and a tokenizer of words."""
    words = ["<|endoftext|>", *(f"w{i}" for i in range(1, VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w1"))
    tokenizer.add_special_tokens(words[:1])
    (directory / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer" / "tokenizer.json"))
    random, splits = np.random.default_rng(seed), {}
    for split in ("train", "validation"):
        writer = SplitWriter(directory, split, np.dtype("<u2"), shard_tokens=200)
        for _ in range(documents):
            phrase = random.integers(1, VOCAB, random.integers(2, 7))
            writer.append(np.array([*phrase, *phrase, *phrase, 0]), num_bytes=0, num_words=0)
        splits[split] = vars(writer.close())
    meta = {"format": 1, "tokenizer": {"vocab_size": VOCAB, "fingerprint": "words"}, "splits": splits}
    (directory / "meta.json").write_text(json.dumps(meta))
    return directory


def forked(work: Callable[[], Any]) -> int:
    """The id of a process that does `work` and is gone."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return child


def finish(children: list[int]) -> None:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * len(codes), codes


def kill_when(child: int, moment: Callable[[], bool]) -> None:
    """SIGKILL at that moment; the process must still be there."""
    deadline = time.monotonic() + 120
    while not moment() and time.monotonic() < deadline:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended before it could be killed"
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def saving(run_dir: Path, step: int) -> bool:
    """Whether a checkpoint is being written."""
    checkpoint = run_dir / f"checkpoint-{step}"
    return (checkpoint / "model.safetensors").exists() and not (checkpoint / "complete.json").exists()


def lines(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def processes(work: Callable[[], Any], number: int) -> list[int]:
    """As torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def one(rank: int) -> None:
        os.environ.update(place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        work()

    return [forked(lambda rank=rank: one(rank)) for rank in range(number)]


def sharded(run: Run, path: Path) -> None:
    """The loss of a model that FSDP2 has sharded as accelerate does, and how far its gradients are from the plain
    model's; here in torch's own words, because accelerate takes no CPU for it."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from fastweight.models import loss as losses
    from fastweight.training.arguments import sharding_policy
    from fastweight.training.model import build_model, config_of

    calls, whole = [], losses.causal_loss
    losses.causal_loss = lambda *args, **kwargs: calls.append(1) or whole(*args, **kwargs)
    ids = torch.arange(32).reshape(2, 16) % VOCAB
    torch.distributed.init_process_group("gloo")
    rank, model = torch.distributed.get_rank(), build_model(run, config_of(run, VOCAB)).train()

    def loss_of(rows: torch.Tensor, mean_over: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=rows, labels=rows, num_items_in_batch=torch.tensor(30.0) / mean_over).loss
        loss.backward()
        return loss.detach()

    expected = loss_of(ids, 1)
    gradients = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad()
    for block in model.model.layers:
        fully_shard(block, mp_policy=sharding_policy())
    fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], mp_policy=sharding_policy())
    fully_shard(model, mp_policy=sharding_policy())
    loss = loss_of(ids[rank : rank + 1], 2)
    dtype = str(loss.dtype)
    torch.distributed.all_reduce(loss)
    gaps = {
        name: float((value.grad.full_tensor() - gradients[name]).norm() / gradients[name].norm())
        for name, value in model.named_parameters()
    }
    if rank == 0:
        found = {
            "loss": float(loss) / 2,
            "expected": float(expected),
            "dtype": dtype,
            "chunked": len(calls),
            "gaps": gaps,
        }
        path.write_text(json.dumps(found))


def main(directory: Path) -> None:
    run = run_of(directory / "data")
    quiet = Console(quiet=True)

    def begin(name: str) -> int:
        return forked(lambda: train(run, directory / name, console=quiet))

    cut = directory / "cut"
    finish([begin("whole")])
    moments = [
        lambda: (cut / "run.json").exists(),
        lambda: lines(cut) >= 1,
        lambda: saving(cut, 2),
        lambda: (cut / "checkpoint-2" / "complete.json").exists(),
        lambda: saving(cut, 4),
        lambda: lines(cut) >= 4,
        lambda: saving(cut, 6),
        lambda: (cut / "checkpoint-6" / "complete.json").exists(),
        lambda: saving(cut, 8),
    ]
    for moment in moments:
        kill_when(begin("cut"), moment)
    finish([begin("cut")])
    finish(processes(lambda: train(run, directory / "two", console=quiet), 2))
    finish(processes(lambda: sharded(run, directory / "sharded.json"), 2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
