"""Context parallelism: one long sequence spread over processes, each holding the tokens after those of the one before.

    with context_parallel(group):
        o, state = fast_weight_attention(q, k, v, beta, lam, rule)     # q, k, v: this process's tokens

Inside, the op, the layers and the models compute what one process would with all tokens: what reaches across a border
(memory, pairing key, window, inputs of the short convolution) is exchanged. `group` holds that; `layout` says which
documents lie where; `attend` is the op over ranks; `scan` its fast form on kernels.
"""

from fastweight.parallel.group import Place, Traffic, context_parallel, current, entered

__all__ = ["Place", "Traffic", "context_parallel", "current", "entered"]
