"""`python -m fastweight` is `fastweight`; torchrun starts it as `torchrun ... -m fastweight train lm ...`."""

from fastweight.cli import main

main()
