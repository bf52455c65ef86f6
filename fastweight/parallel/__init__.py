"""Context parallelism: one long sequence spread over processes, each holding the tokens after those of the one before.

    with context_parallel(group):
        o, state = fast_weight_attention(q, k, v, beta, lam, rule)     # q, k, v: this process's tokens

Inside, the op, the layers and the models compute what one process would with all tokens: what reaches across a border
(memory, pairing key, window, inputs of the short convolution) is exchanged. `group` holds the exchanges, `layout` says
which documents lie where, `convolve` is the short convolution over ranks; the op over ranks is memory/across.py.
"""

from fastweight.parallel.group import Place, Traffic, context_parallel, current, entered

__all__ = ["Place", "Traffic", "context_parallel", "current", "entered"]
