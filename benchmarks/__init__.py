"""What to time, as data; a gate on values and gradients first; then the time.

cases -> gate (against the float64 recurrence) -> timing (interleaved) and scaling (memory, time per token) -> report.
A contestant whose gate is red gets no time at all: a fast wrong answer is not a speed.
"""
