"""`python -m fastweight` is `fastweight`; torchrun starts it as `torchrun ... -m fastweight train lm ...`."""

from fastweight.cli import main

if __name__ == "__main__":  # workers of a study import this module again
    main()
