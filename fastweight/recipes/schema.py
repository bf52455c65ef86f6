"""The shape of a recipe: nested records with checks, so that a wrong setting fails before anything is trained.

Widths are digits per summand, lengths are tokens, steps are optimizer steps, batch_size counts sequences (problems of
drawn tasks) per step over all devices. `task` is one of four records, told apart by its `kind`.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fastweight.recipes.synthetic import RecallTask, TrackingTask


def _require(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name}: got {got!r}, expected {expected}")


@dataclass(frozen=True)
class AdditionTask:
    """Which problems a run trains, validates and is tested on.

    Fields:
        kind: "addition", which is also what a task without a kind is.
        train_widths: smallest and largest training width.
        test_widths: smallest and largest width of the extrapolation test; above the training widths.
        layout: "mixed" (a width for each problem) or "single" (a width for each micro-batch).
        least_first: write the summands, like the sum, with the least significant digit first; not in the paper, where
            digits that belong together are at distances that change from step to step.
        mean_over: what the loss of a step is the mean over: "tokens", of which wide sums have more, or "problems", each
            with the mean over its own tokens.
        test_problems: problems per width in the test.
        validation_problems: problems per training width in the validation during training.
        test_seed: of the held-out problems, the same for every model.
    """

    kind: Literal["addition"] = "addition"
    train_widths: tuple[int, int] = (1, 32)
    test_widths: tuple[int, int] = (33, 48)
    layout: Literal["mixed", "single"] = "mixed"
    least_first: bool = False
    mean_over: Literal["tokens", "problems"] = "tokens"
    test_problems: int = 100
    validation_problems: int = 32
    test_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("train_widths", "test_widths"):
            low, high = getattr(self, name)
            _require(1 <= low <= high, f"task.{name}", (low, high), "[smallest, largest], from 1 digit up")
        _require(
            self.test_widths[0] > self.train_widths[1],
            "task.test_widths",
            self.test_widths,
            f"widths above the training widths {self.train_widths}",
        )
        for name in ("test_problems", "validation_problems"):
            _require(getattr(self, name) >= 1, f"task.{name}", getattr(self, name), "at least 1 problem")


@dataclass(frozen=True)
class TextTask:
    """Which tokens a language model is trained and validated on: a directory that `fastweight prepare` wrote.

    Fields:
        kind: "text".
        data: directory of token shards; None in a recipe, to be named when it is trained (`--data`).
        sequence_length: tokens in one sequence; all but the first are predicted.
        packing: "contiguous" (windows of the token stream; documents in one window see each other) or "documents"
            (the same, but no document sees another).
        validation_sequences: from the validation split, always the same ones.
    """

    kind: Literal["text"] = "text"
    data: str | None = None
    sequence_length: int = 1024
    packing: Literal["contiguous", "documents"] = "contiguous"
    validation_sequences: int = 256

    def __post_init__(self) -> None:
        _require(self.sequence_length >= 2, "task.sequence_length", self.sequence_length, "at least 2 tokens")
        name = "validation_sequences"
        _require(self.validation_sequences >= 1, f"task.{name}", self.validation_sequences, "at least 1")


@dataclass(frozen=True)
class Optimizer:
    """AdamW with linear warm-up and a cosine to zero; no weight decay on gates, norms and biases.

    Fields:
        learning_rate: at the peak, after warm-up.
        betas, eps: of AdamW.
        weight_decay: of weight matrices.
        clip: largest global gradient norm; 0 turns clipping off.
        warmup_steps: steps from 0 to the peak.
        base_width: hidden_size at which learning_rate was tuned. The matrices between hidden activations then learn at
            learning_rate * base_width / hidden_size, as muP asks of AdamW; embedding, convolutions, gates and norms at
            learning_rate. None: one rate for all.
    """

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup_steps: int = 0
    base_width: int | None = None

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "a number above 0")
        _require(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "two numbers in [0, 1)")
        for name in ("eps", "weight_decay", "clip", "warmup_steps"):
            _require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "at least 0")
        base = self.base_width
        _require(base is None or base >= 1, "optimizer.base_width", base, "at least 1, or nothing")


@dataclass(frozen=True)
class Training:
    """How long, how wide and how watched a run is.

    Fields:
        steps: optimizer steps; the cosine ends here.
        batch_size: sequences per step, all devices together.
        micro_batch_size: sequences per forward pass; None means the whole batch on one device.
        precision: "fp32"; "bf16", autocast with float32 parameters and optimizer; or "bf16-weights", parameters and
            optimizer in bfloat16, which is faster, takes half the memory and rounds small updates away. Gates stay
            float32 in all three.
        device: "auto" takes an accelerator when there is one, "cpu" never does.
        threads: CPU threads while training; None leaves torch's choice. Sums, and so results, depend on it.
        seed: of the parameters and of the data.
        checkpoint_every, keep_checkpoints: steps between checkpoints, and how many stay (at least 2, so that one is
            complete while the next is being written).
        log_every, validate_every: steps between lines of metrics and between validations (0: none).
    """

    steps: int = 2000
    batch_size: int = 256
    micro_batch_size: int | None = None
    precision: Literal["fp32", "bf16", "bf16-weights"] = "fp32"
    device: Literal["auto", "cpu"] = "auto"
    threads: int | None = None
    seed: int = 0
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    log_every: int = 10
    validate_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "checkpoint_every", "log_every"):
            _require(getattr(self, name) >= 1, f"training.{name}", getattr(self, name), "at least 1")
        _require(self.threads is None or self.threads >= 1, "training.threads", self.threads, "at least 1, or nothing")
        _require(self.validate_every >= 0, "training.validate_every", self.validate_every, "at least 0")
        _require(self.keep_checkpoints >= 2, "training.keep_checkpoints", self.keep_checkpoints, "at least 2")
        micro = self.micro_batch_size
        _require(
            micro is None or (micro >= 1 and self.batch_size % micro == 0),
            "training.micro_batch_size",
            micro,
            f"a divisor of batch_size {self.batch_size}",
        )


@dataclass(frozen=True)
class Engine:
    """How the work is spread and watched; nothing here changes what is computed beyond rounding.

    Fields:
        compile: torch.compile of the blocks.
        graphs: forward and backward of a step as one CUDA graph, for models so small that a GPU waits for the host.
        gradient_checkpointing: compute activations twice instead of keeping them.
        parallel: "ddp" or "fsdp2" when torchrun starts several processes; one process needs neither.
        context_parallel: processes that share each sequence, a part each, for text too long for one device.
        workers: processes that read the data ahead, for each training process; 0 reads between steps.
        report: "tensorboard", "wandb" or "none", beside metrics.jsonl, which is always written. None means tensorboard
            for text and none for addition.
    """

    compile: bool = False
    graphs: bool = False
    gradient_checkpointing: bool = False
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    context_parallel: int = 1
    workers: int = 0
    report: Literal["tensorboard", "wandb", "none"] | None = None

    def __post_init__(self) -> None:
        _require(self.workers >= 0, "engine.workers", self.workers, "at least 0")
        _require(self.context_parallel >= 1, "engine.context_parallel", self.context_parallel, "at least 1 process")


@dataclass(frozen=True)
class Run:
    """Everything that decides a training run; `fastweight.training.train` turns it into a trained model.

    Fields:
        name: of the recipe.
        about: one sentence for people.
        task: of kind "addition", "text", "mqar" or "tracking".
        model: keywords of FastWeightConfig; vocab_size follows from the task unless a text recipe names it.
    """

    name: str
    about: str = ""
    task: AdditionTask | TextTask | RecallTask | TrackingTask = field(default_factory=AdditionTask)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    engine: Engine = field(default_factory=Engine)


def to_dict(run: Run) -> dict[str, Any]:
    """Plain nested data (tuples as lists), ready for JSON or YAML."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    return plain(asdict(run))
