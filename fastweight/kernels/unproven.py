"""Kernels that have not been compared on a device as they are now; those in Triton agree when interpreted.

A CUDA call does not get them unless FASTWEIGHT_UNPROVEN=1 asks for them, as their device tests do: falcon-2 with
gradients or options, falcon-3, the quick form of falcon-2a, and the backward pass of falcon-1a and linear attention in
one walk; long sequences of the regression class whose pieces pass over what has faded (reach.py); and copies of
training batches to the device that do not wait for it. What has passed there leaves the list.
"""

import os

SWITCH = "FASTWEIGHT_UNPROVEN"


def asked_for(name: str | None = None) -> bool:
    """Whether the switch is 1, or lists this name, with commas between several."""
    value = os.environ.get(SWITCH, "")
    return value == "1" or name in value.split(",")
