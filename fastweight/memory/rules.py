"""The six rules as rows of one table: the only file that knows their names.

A rule is an objective (regression writes a residual, inner-product writes the target), a gain (one step per head or one
per value column), and a window (how many recent pairs each step uses). Everything else is an option with the same
meaning for every row. Nothing below `rule_of` ever asks for a rule by name.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

Objective = Literal["regression", "inner-product"]
Gain = Literal["scalar", "column"]
Pairing = Literal["next-latent", "same-step"]
Timing = Literal["read-after-write", "read-before-write"]
Ridge = Literal["absolute", "scaled"]
Step = Literal["normalized", "direct"]
Read = Literal["plain", "normalized"]


@dataclass(frozen=True)
class Rule:
    """One memory update rule (paper, section 3), validated when it is built.

    Fields:
        name: what the table calls it; free for rules of your own.
        objective: "regression" writes y - S^T x (the delta rule), "inner-product" writes y (Hebbian).
        gain: "scalar" is one step size per head, "column" is one per value column.
        window: number R of recent pairs in each step (1 = the current pair only).
        pairing: "next-latent" pairs the previous token's key with this token's value; "same-step" this token's own key.
        timing: whether o_t reads S_t ("read-after-write") or S_{t-1} ("read-before-write").
        ridge: "absolute": lam is lambda; "scaled": lam is lambda-bar and lambda = lambda-bar * E.
        step: "normalized": beta is the dimensionless gain, eta = beta / (E + lambda + eps); "direct": beta is eta.
        eps: added to the denominator of the normalised step (feature energy units); > 0 when window > 1.
        decay_floor: smallest carry gamma (eps_gamma); the decay fraction is clamped to 1 - decay_floor.
        read: "normalized" divides the read by z^T q (appendix C.1); scalar inner-product rules only.
        read_eps: smallest magnitude of that denominator.
    """

    name: str
    objective: Objective
    gain: Gain = "scalar"
    window: int = 1
    pairing: Pairing = "next-latent"
    timing: Timing = "read-after-write"
    ridge: Ridge = "absolute"
    step: Step = "normalized"
    eps: float = 1e-6
    decay_floor: float = 1e-4
    read: Read = "plain"
    read_eps: float = 1e-6

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            allowed, value = get_args(hints[field.name]), getattr(self, field.name)
            if allowed and value not in allowed:
                raise ValueError(f"rule.{field.name}: got {value!r}, expected one of {', '.join(map(repr, allowed))}")
        if not isinstance(self.window, int) or isinstance(self.window, bool) or self.window < 1:
            raise ValueError(f"rule.window: got {self.window!r}, expected a whole number of pairs, at least 1")
        for name in ("eps", "decay_floor", "read_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"rule.{name}: got {value!r}, expected a finite number, at least 0")
        if not 0 < self.decay_floor < 1:
            raise ValueError(f"rule.decay_floor: got {self.decay_floor!r}, expected a carry strictly between 0 and 1")
        if self.window > 1 and self.eps == 0:
            raise ValueError(f"rule.eps: got 0 with window {self.window}, expected eps > 0 for a window rule")
        if self.window > 1 and self.gain == "column":
            raise ValueError(
                f"rule.window: got {self.window} with column gain, expected window 1 (no rule combines them)"
            )
        if self.read == "normalized" and (self.gain != "scalar" or self.objective != "inner-product"):
            raise ValueError(
                f"rule.read: got 'normalized' for {self.objective} with {self.gain} gain, "
                "expected a scalar inner-product rule (falcon-1a, falcon-3a) or read='plain'"
            )

    def replace(self, **changes: Any) -> "Rule":
        """A copy with some fields changed; unknown fields raise ValueError."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(f"rule.replace: got unknown field {name!r}, expected one of {', '.join(known)}")
        return replace(self, **changes)


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("falcon-1", "regression", "scalar"),
        Rule("falcon-2", "regression", "column"),
        Rule("falcon-3", "regression", "scalar", window=4),
        Rule("falcon-1a", "inner-product", "scalar"),
        Rule("falcon-2a", "inner-product", "column"),
        Rule("falcon-3a", "inner-product", "scalar", window=4),
    )
}


def rule_of(rule: "str | Rule") -> Rule:
    """A Rule from a name or a Rule; anything else raises ValueError."""
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"rule: got {rule!r}, expected a fastweight Rule or one of {', '.join(RULES)}")
    return RULES[rule]
