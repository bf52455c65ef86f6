"""What has not been compared on a device as it is now; kernels in Triton among it agree when interpreted.

A CUDA call does not get it unless FASTWEIGHT_UNPROVEN=1 asks for it, as its device tests do: with a gain per value
column, and of regression over a window, all but what dispatch.py lists as compared, the latter's walks on Hopper, and
falcon-2's of scaled columns with their token gradients; widths above 128 with a carried key, a mask or cu_seqlens; the
backward pass of falcon-1a and linear attention in one walk in float16, that of falcon-3a in one walk, and all of these
with tiles that come a chunk ahead; their walk forward where products go on while the state is read; decoding with all
loads at once; and copies of training batches to the device that do not wait for it. What has passed there leaves the
list.
"""

import os

SWITCH = "FASTWEIGHT_UNPROVEN"


def asked_for() -> bool:
    """Whether the switch is 1; ValueError where it is neither 0 nor 1."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}: got {value!r}, expected 0 or 1")
    return value == "1"
