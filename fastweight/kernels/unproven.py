"""What has not been compared on a device as it is now; kernels in Triton among it agree when interpreted.

A CUDA call does not get it unless FASTWEIGHT_UNPROVEN=1 asks for it, as its device tests do: falcon-2 with gradients or
options, falcon-3, the quick form of falcon-2a, and the backward pass of falcon-1a and linear attention in one walk;
of the regression class, long sequences whose pieces pass over what has faded (reach.py), and state gradients that lie
where those of q and k will; context parallelism in one message each way, also by its name alone
(FASTWEIGHT_UNPROVEN=borders); and copies of training batches to the device that do not wait for it. What has passed
there leaves the list.
"""

import os

SWITCH = "FASTWEIGHT_UNPROVEN"
NAMES = ("borders",)  # what can be asked for alone


def asked_for(name: str | None = None) -> bool:
    """Whether the switch is 1, or lists this name, with commas between several; ValueError for a name that is none."""
    value = os.environ.get(SWITCH, "")
    if value in ("", "0", "1"):
        return value == "1"
    asked = value.split(",")
    if not all(one in NAMES for one in asked):
        raise ValueError(f"{SWITCH}: got {value!r}, expected 0, 1 or names among {', '.join(NAMES)}")
    return name in asked
