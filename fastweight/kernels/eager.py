"""Whether a call may go to its kernels without PyTorch's dispatcher, whose Python side takes longer than small kernels.

Trap: whoever traces, fakes, records or transforms operators (torch.compile, export, FakeTensor, torch.func, selective
checkpointing, profilers of FLOPs) must see registered operators, so nothing is skipped while any of them listens.
"""

import torch
from torch import _C


def nobody_listens() -> bool:
    if torch.compiler.is_compiling():
        return False
    # pyright: ignore[reportAttributeAccessIssue]
    return _C._len_torch_dispatch_stack() == 0 and not _C._are_functorch_transforms_active()
