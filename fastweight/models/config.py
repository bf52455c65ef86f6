"""The configuration of a FastWeight model: flat JSON data from which every mixer is built.

Rule options are fields here under the names they have in `Rule`; `rule()` puts them together. Traps: the default ridge
is "scaled" (carries that do not depend on the scale of the keys), while a bare rule name means "absolute" in the op;
Hugging Face configurations take unknown keywords silently, so a misspelt field is kept and does nothing.
"""

import math
from typing import get_args

from transformers import PreTrainedConfig

from fastweight.layers.mixers import mixer_of
from fastweight.layers.retention import RetentionDecay
from fastweight.memory.rules import RULES, Rule


class FastWeightConfig(PreTrainedConfig):
    """Configuration of `FastWeightModel` and `FastWeightForCausalLM`.

    Fields:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: sizes of the model.
        intermediate_size: width of the SwiGLU MLP; None means 8/3 hidden_size, rounded up to a multiple of 64, and 0
            leaves the MLP and its norm out (Mamba-2's own block).
        mixer: name of the mixer (`fastweight.layers.mixers.MIXERS`), or a list with one name per layer.
        window: pairs per step of the sliding rules; None means the rule's own. The other rules ignore it.
        pairing, timing, ridge, step, read, step_eps, decay_floor: fields of `Rule` (`step_eps` is its `eps`).
        key_dim, value_dim: widths of one head; None means hidden_size // num_attention_heads, twice that for the values
            of retnet and mamba2. The transformer has one width, value_dim; key_dim of mamba2 is its state size.
        num_key_heads: key heads of the memories, shared by groups of value heads (the groups of mamba2); None means
            num_attention_heads, and 1 for mamba2.
        qk_norm: "rms" or "l2". feature_map: "identity", "elu+1" or "relu".
        conv_width: taps of the short convolution of every memory; 0 for none. conv_activation: behind it, "silu" or
            "none". conv_start: its taps at step 0, "random" or "copy" (each token nearly as it is).
        rotary: whether queries and keys of the memories carry rotary positions; None means those of retnet alone.
        value_skip: whether values also go past every memory, o + scale v; None means in mamba2 alone.
        lambda_scale: largest lambda (lambda-bar for ridge "scaled"); None: see `FastWeightAttention`.
        max_gain: largest gain beta of the rules (None: 2) and of the delta rules (None: 1); others have none.
        output_gate, value_norm: of the rules, see `FastWeightAttention`; the baselines are gated as published.
        retention_decay: decays of retnet, "retnet" or "lightning" (see `Retention`).
        form, backend, chunk_size: how the op computes; passed through.
        rope_theta: base of the rotary frequencies, wherever positions are rotary.
        max_position_embeddings: longest sequence that evaluation tools should feed; nothing here depends on it.
        rms_norm_eps: of all norms. initializer_range: standard deviation of the weights at step 0.
        fused_loss: how training finds its loss without all logits at once: "chunked", "liger" (liger-kernel, on a GPU),
            or "none" (with all logits).
        use_cache: whether inference returns a cache. tie_word_embeddings: one matrix for embedding and output.
    """

    model_type = "fastweight"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 (the base class wants a list)

    vocab_size: int = 50_257
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    mixer: str | list[str] = "falcon-1"
    window: int | None = None
    pairing: str = "next-latent"
    timing: str = "read-after-write"
    ridge: str = "scaled"
    step: str = "normalized"
    read: str = "plain"
    step_eps: float = 1e-6
    decay_floor: float = 1e-4
    key_dim: int | None = None
    value_dim: int | None = None
    num_key_heads: int | None = None
    qk_norm: str = "rms"
    feature_map: str = "identity"
    conv_width: int = 4
    conv_activation: str = "silu"
    conv_start: str = "random"
    rotary: bool | None = None
    value_skip: bool | None = None
    lambda_scale: float | None = None
    max_gain: float | None = None
    output_gate: bool = True
    value_norm: bool = False
    retention_decay: str = "retnet"
    form: str = "auto"
    backend: str = "auto"
    chunk_size: int | None = None
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    fused_loss: str = "chunked"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: got {value!r}, expected a whole number, at least 1")
        if self.hidden_size % self.num_attention_heads and None in (self.key_dim, self.value_dim):
            raise ValueError(
                f"num_attention_heads: got {self.num_attention_heads}, expected a divisor of hidden_size "
                f"{self.hidden_size}, or key_dim and value_dim"
            )
        if self.fused_loss not in ("chunked", "liger", "none"):
            raise ValueError(f"fused_loss: got {self.fused_loss!r}, expected 'chunked', 'liger' or 'none'")
        if self.retention_decay not in get_args(RetentionDecay):
            raise ValueError(f"retention_decay: got {self.retention_decay!r}, expected 'retnet' or 'lightning'")
        if self.intermediate_size is None:
            self.intermediate_size = 64 * math.ceil(self.hidden_size * 8 / 3 / 64)
        for name in self.mixers:
            mixer_of(name)
            if name in RULES:
                self.rule(name)
        super().__post_init__(**kwargs)

    @property
    def mixers(self) -> list[str]:
        """The mixer of every layer."""
        if isinstance(self.mixer, str):
            return [self.mixer] * self.num_hidden_layers
        if len(self.mixer) != self.num_hidden_layers:
            raise ValueError(
                f"mixer: got a list of {len(self.mixer)}, expected one name, or one for each of the "
                f"{self.num_hidden_layers} layers"
            )
        return list(self.mixer)

    @property
    def layer_types(self) -> list[str]:
        """What each layer keeps, in the words of transformers."""
        kinds = {"state": "linear_attention", "kv": "full_attention"}
        return [kinds[mixer_of(name).memory] for name in self.mixers]

    def rule(self, name: str) -> Rule:
        """The rule of that name with this configuration's options; ValueError when they do not fit it."""
        rule = RULES[name]
        return rule.replace(
            window=self.window if rule.window > 1 and self.window is not None else rule.window,
            pairing=self.pairing,
            timing=self.timing,
            ridge=self.ridge,
            step=self.step,
            read=self.read,
            eps=self.step_eps,
            decay_floor=self.decay_floor,
        )
