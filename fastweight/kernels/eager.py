"""Whether a call may go to its kernels without PyTorch's dispatcher, whose Python side takes longer than small kernels.

Trap: whoever traces, fakes or records operators (torch.compile, export, FakeTensor, selective checkpointing, profilers
of FLOPs) must see registered operators, so nothing is skipped while any of them listens.
"""

import torch
from torch._C import _len_torch_dispatch_stack  # pyright: ignore[reportAttributeAccessIssue]


def nobody_listens() -> bool:
    return not torch.compiler.is_compiling() and _len_torch_dispatch_stack() == 0
