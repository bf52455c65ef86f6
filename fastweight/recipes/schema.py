"""The shape of a recipe: nested records with checks, so that a wrong setting fails before anything is trained.

Widths are digits per summand, steps are optimizer steps, batch_size counts problems per step over all devices.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


def _require(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name}: got {got!r}, expected {expected}")


@dataclass(frozen=True)
class AdditionTask:
    """Which problems a run trains, validates and is tested on.

    Fields:
        train_widths: smallest and largest training width.
        test_widths: smallest and largest width of the extrapolation test; above the training widths.
        layout: "mixed" (a width for each problem) or "single" (a width for each micro-batch).
        test_problems: problems per width in the test.
        validation_problems: problems per training width in the validation during training.
        test_seed: of the held-out problems, the same for every model.
    """

    train_widths: tuple[int, int] = (1, 32)
    test_widths: tuple[int, int] = (33, 48)
    layout: Literal["mixed", "single"] = "mixed"
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
class Optimizer:
    """AdamW with linear warm-up and a cosine to zero; no weight decay on gates, norms and biases.

    Fields:
        learning_rate: at the peak, after warm-up.
        betas, eps: of AdamW.
        weight_decay: of weight matrices.
        clip: largest global gradient norm; 0 turns clipping off.
        warmup_steps: steps from 0 to the peak.
    """

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "a number above 0")
        _require(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "two numbers in [0, 1)")
        for name in ("eps", "weight_decay", "clip", "warmup_steps"):
            _require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "at least 0")


@dataclass(frozen=True)
class Training:
    """How long, how wide and how watched a run is.

    Fields:
        steps: optimizer steps; the cosine ends here.
        batch_size: problems per step, all devices together.
        micro_batch_size: problems per forward pass; None means the whole batch on one device.
        precision: "fp32", or "bf16" autocast with float32 parameters.
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
    precision: Literal["fp32", "bf16"] = "fp32"
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
class Run:
    """Everything that decides a training run; `fastweight.training.train` turns it into a trained model.

    Fields:
        name: of the recipe.
        about: one sentence for people.
        model: keywords of FastWeightConfig; vocab_size follows from the task.
    """

    name: str
    about: str = ""
    task: AdditionTask = field(default_factory=AdditionTask)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)


def to_dict(run: Run) -> dict[str, Any]:
    """Plain nested data (tuples as lists), ready for JSON or YAML."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    return plain(asdict(run))
