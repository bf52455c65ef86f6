"""Kernels that agree with the recurrence when interpreted and have not been compared on a device as they are now.

A CUDA call does not get them unless FASTWEIGHT_UNPROVEN=1 asks for them, as their device tests do: falcon-2 with
gradients or options, falcon-3, and the quick form of falcon-2a. What has passed there leaves this list.
"""

import os

SWITCH = "FASTWEIGHT_UNPROVEN"


def asked_for() -> bool:
    return os.environ.get(SWITCH) == "1"
