"""Triton kernels of the memory, split by algebraic class and imported only when called.

`dispatch` is the one door: it says whether a call is supported and runs it. Importing this package needs no Triton.
"""
