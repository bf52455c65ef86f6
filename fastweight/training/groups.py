"""A model's parameters into the groups of AdamW: who decays, and at which rate who learns.

                            weight decay    learning rate
    hidden matrices         yes             lr * base_width / hidden_size
    embedding, output       yes             lr
    convolutions            yes             lr
    gates, norms, biases    no              lr

Hidden matrices are those between two activations whose width grows with the model (projections of the mixers and of
the MLP). With AdamW their change of an activation grows with the width at a fixed rate, so muP divides it out: a rate
that is right at base_width is right, to first order, at every width. Of muP this is the learning rate alone: initial
values and the scale of logits are the configuration's business. AdamW multiplies weight decay by the group's rate.

Trap: the first group learns at the plain rate, which is the one that logs show.
"""

from typing import Any

from torch import nn

from fastweight.layers.parts import no_weight_decay
from fastweight.recipes import Optimizer


def decayed_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters with weight decay: matrices, without those that the layers exempt (gates, norms)."""
    exempt = set(no_weight_decay(model))
    return [name for name, value in model.named_parameters() if value.ndim >= 2 and name not in exempt]


def hidden_matrices(model: Any) -> list[str]:
    """Names of the matrices between hidden activations: weights of linear layers, without the output matrix."""
    output = model.get_output_embeddings()
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    ]


def parameter_groups(model: Any, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of the table above, without empty ones; every trainable parameter is in exactly one."""
    decayed = set(decayed_parameters(model))
    hidden = set(hidden_matrices(model)) if optimizer.base_width is not None else set()
    scale = 1.0 if optimizer.base_width is None else optimizer.base_width / model.config.hidden_size
    groups = [
        {"params": [], "lr": optimizer.learning_rate, "weight_decay": optimizer.weight_decay},
        {"params": [], "lr": optimizer.learning_rate, "weight_decay": 0.0},
        {"params": [], "lr": optimizer.learning_rate * scale, "weight_decay": optimizer.weight_decay},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[2 if name in hidden and name in decayed else 0 if name in decayed else 1]["params"].append(parameter)
    return [group for group in groups if group["params"]]
