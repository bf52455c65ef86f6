"""Forward and backward of a training step as a CUDA graph: recorded once, launched as one piece ever after.

A small model's step is hundreds of kernels of a few microseconds, and a GPU waits for the host between them. A graph
holds them all, with the addresses that they read and write, so the host has one thing to launch. What it computes is
what the same kernels compute without it, bit for bit.

    call 1 .. WARMUP     as without a graph, on a side stream: kernels are compiled and tuned
    call WARMUP + 1      recorded, then launched
    later                inputs are copied to where the graph reads them, launched

Gradients are added up where the graph writes them. An optimiser that drops them after its step (set_to_none) finds them
there again, zeroed, so micro-batches add up as they do without a graph.

Traps: nothing on the way may depend on values that the host has to know, and every batch has the shapes of the first;
other shapes raise. Whatever else a forward pass does on the host (counters, hooks) happens while it is recorded only.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from fastweight.recipes import AdditionTask, Run, TextTask

WARMUP = 3  # calls before the recording: autograd, cuBLAS and tuning take what they keep

Inputs = Mapping[str, Tensor]
Step = Callable[[Inputs, Tensor | None], Tensor]


def check_recordable(run: Run, processes: int) -> None:
    """ValueError for settings with which a step cannot be a graph."""
    if not run.engine.graphs:
        return
    name, expected = "engine.graphs: got True", "expected False, or"
    if run.training.device == "cpu" or not torch.cuda.is_available():
        raise ValueError(f"{name} without a GPU, {expected} a CUDA device")
    if processes > 1:
        raise ValueError(f"{name} with {processes} processes, {expected} one: what they exchange is not recorded")
    if run.engine.gradient_checkpointing:
        raise ValueError(f"{name} with engine.gradient_checkpointing, {expected} one of them")
    if isinstance(run.task, TextTask) and run.task.packing == "documents":
        raise ValueError(f"{name} with task.packing 'documents', whose bounds differ, {expected} 'contiguous'")
    if isinstance(run.task, AdditionTask) and run.task.layout == "single":
        raise ValueError(f"{name} with task.layout 'single', whose lengths differ, {expected} 'mixed'")


class RecordedStep:
    """A step as a graph.

    Args:
        parameters: whose gradients it makes.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.calls = 0
        self.side = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: dict[str, Tensor] = {}
        self.count: Tensor | None = None
        self.loss: Tensor | None = None
        self.gradients: list[tuple[Tensor, Tensor]] = []

    def __call__(self, inputs: Inputs, count: Tensor | int | None, step: Step) -> Tensor:
        """The loss of one micro-batch; its gradients are added to those that the parameters have.

        Args:
            inputs: tensors on the device, of the same names and shapes in every call.
            count: number of items that the loss is divided by.
            step: inputs and count into the loss, after backward.

        Raises ValueError for inputs of other shapes than those recorded.
        """
        count = torch.as_tensor(count, device=self.side.device) if count is not None else None
        self.calls += 1
        if self.calls <= WARMUP:
            return self._warm(inputs, count, step)
        if self.graph is None:
            self._record(inputs, count, step)
        self._take(inputs, count)
        graph, loss = self.graph, self.loss
        assert graph is not None
        assert loss is not None
        graph.replay()
        return loss.clone()  # the next call writes over it

    def _warm(self, inputs: Inputs, count: Tensor | None, step: Step) -> Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            loss = step(inputs, count)
        torch.cuda.current_stream().wait_stream(self.side)
        # One that takes no part has no gradient, and so no weight decay; zeros would give it some.
        self.parameters = [p for p in self.parameters if p.grad is not None]
        return loss

    def _record(self, inputs: Inputs, count: Tensor | None, step: Step) -> None:
        """Record `step`; what it adds to gradients while it is recorded is nothing, for nothing is computed."""
        self.inputs = {name: value.clone() for name, value in inputs.items()}
        self.count = None if count is None else count.clone()
        held = [(p, p.grad) for p in self.parameters]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for p, gradient in held:  # the graph adds to these from now on
            p.grad = torch.zeros_like(p) if gradient is None else gradient.clone()
        graph = torch.cuda.CUDAGraph()
        # Other threads (readers of data that pin memory) may do meanwhile what a recording may not.
        with torch.cuda.graph(graph, stream=self.side, capture_error_mode="thread_local"):
            loss = step(self.inputs, self.count)
        self.graph, self.loss = graph, loss
        self.gradients = [(p, p.grad) for p in self.parameters if p.grad is not None]

    def _take(self, inputs: Inputs, count: Tensor | None) -> None:
        """Bring what the graph reads, and the gradients that it adds to, up to date."""
        if {name: t.shape for name, t in inputs.items()} != {name: t.shape for name, t in self.inputs.items()}:
            shapes = {name: tuple(t.shape) for name, t in inputs.items()}
            expected = {name: tuple(t.shape) for name, t in self.inputs.items()}
            raise ValueError(f"inputs: got the shapes {shapes}, expected those recorded for engine.graphs, {expected}")
        if (count is None) != (self.count is None):
            raise ValueError(f"num_items_in_batch: got {count}, expected what was recorded, {self.count}")
        for name, value in inputs.items():
            self.inputs[name].copy_(value, non_blocking=True)
        if self.count is not None and count is not None:
            self.count.copy_(count, non_blocking=True)
        dropped = [gradient for p, gradient in self.gradients if p.grad is None]
        if dropped:
            torch._foreach_zero_(dropped)  # pyright: ignore[reportPrivateImportUsage]
        for p, gradient in self.gradients:
            if p.grad is not None and p.grad is not gradient:
                raise ValueError("gradients: got others than the graph adds to, expected them untouched or None")
            p.grad = gradient
