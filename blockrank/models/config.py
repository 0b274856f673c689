"""Sizes and switches of decoders and encoders. Readers of foreign formats produce them; nothing else does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
EncoderFamily = Literal["bert", "distilbert"]
Activation = Literal["gelu", "gelu_tanh", "relu"]


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name}={getattr(config, name)} must be positive")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `kind` and its parameters follow Hugging Face's `rope_parameters`.

    linear: `factor`. llama3: `factor`, `low_freq_factor`, `high_freq_factor`, `original_max_positions`.
    yarn: `factor`, `original_max_positions`, `beta_fast`, `beta_slow`, `attention_factor` (None: 0.1 ln(factor) + 1,
    or the ratio of `mscale` to `mscale_all_dim` when both are given), `truncate`.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "theta", "factor")
        if self.original_max_positions is not None:
            _check_positive(self, "original_max_positions")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}"
            )


@dataclass(frozen=True)
class DecoderConfig:
    """A pre-norm decoder of the Mistral / Llama / Qwen kind.

    `num_heads` = K * G query heads share `num_kv_heads` = K key heads. `windows[i]` is layer i's sliding window in
    tokens (None: global); the tuple's length is the number of layers. The input embedding of `padding_id` is not
    trained, as in Hugging Face models, whose pad token may be one that prompts contain (SmolLM2's is `<|im_end|>`).
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope: RopeConfig = RopeConfig()
    rms_norm_eps: float = 1e-6
    max_positions: int = 32_768
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    padding_id: int | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        _check_positive(self, *sizes, "max_positions", "rms_norm_eps")
        for layer, window in enumerate(self.windows):
            if window is not None and window < 1:
                raise ValueError(f"windows[{layer}]={window} must be positive, or None")
        if self.padding_id is not None and not 0 <= self.padding_id < self.vocab_size:
            raise ValueError(f"padding_id={self.padding_id} is not below vocab_size={self.vocab_size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def groups(self) -> int:
        """Query heads per key head, G."""
        return self.num_heads // self.num_kv_heads

    def truncated(self, num_layers: int) -> DecoderConfig:
        """The same decoder with its first `num_layers` layers only."""
        if not 0 <= num_layers <= self.num_layers:
            raise ValueError(f"cannot keep {num_layers} of {self.num_layers} layers")
        return replace(self, windows=self.windows[:num_layers])


@dataclass(frozen=True)
class EncoderConfig:
    """A post-norm encoder of the BERT kind, with learned positions.

    `token_types` is the size of the token type table (0: none, as in DistilBERT). `pooler`: a dense layer with tanh
    over the first token's state comes with it. `activation` `gelu` is the exact one, `gelu_tanh` its approximation.
    """

    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    max_positions: int = 512
    token_types: int = 2
    activation: Activation = "gelu"
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    pooler: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads
