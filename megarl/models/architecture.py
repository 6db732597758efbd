"""The architecture of a model as one frozen value that all other code reads. Does not import torch.

The supported families differ in a few switches (`qkv_bias`, `qk_norm`, RoPE scaling, experts), so one
dataclass covers them all. `megarl/models/families.py` reads it from a Hugging Face folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from megarl.models.vision import Vision


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation (`rope_type: linear`): all frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class RouterScore(str, Enum):
    """How a router turns the logits of a token into scores."""

    softmax = "softmax"
    sigmoid = "sigmoid"  # each expert separately; the weights of the selected experts sum to one


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (`rope_type: yarn`, Peng et al. 2023).

    Attributes:
        factor: How many times the context is longer than the original one.
        original_max_position_embeddings: The context length of the model before it was extended.
        beta_fast: A frequency with more rotations than this within the original context is kept.
        beta_slow: A frequency with fewer rotations than this is divided by `factor`.
        truncate: Whether the bounds between which frequencies are blended are rounded to whole dimensions.
        mscale: The coefficient of the magnitude of rotated queries and keys; None if the folder has none.
        mscale_all_dim: The coefficient by which that magnitude is divided. Multi-head latent attention also
            scales its softmax by it.
        attention_factor: The resulting factor of cosine and sine.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture-of-experts feed-forward of sparse layers. A router selects some experts for each token.

    Attributes:
        num_experts: The number of experts per layer.
        num_experts_per_tok: The number of experts that the router selects per token.
        intermediate_size: The feed-forward size of one expert.
        shared_intermediate_size: The feed-forward size of the shared expert, which sees every token; 0 if
            there is none.
        norm_topk_prob: Whether the weights of the selected experts are normalized to sum to one (always in
            Mixtral).
        layers: The numbers of the layers that have experts; the others are dense.
        score: How a router scores experts.
        has_selection_bias: Whether a float32 bias of each expert is added to its score when experts are
            selected. The weights of selected experts are computed from the scores without it.
        groups: The number of groups of equal size, in the order of the experts, and how many of them a token
            selects before it selects experts of these groups; None if all experts compete. The score of a
            group is the sum of its two best experts (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2).
        scaling_factor: Multiplies the weights of the selected experts.
        has_shared_gate: Whether a learned gate scales the output of the shared expert.
        clamp: The limit L of the activation min(g, L) sigmoid(1.702 min(g, L)) (clamp(u, -L, L) + 1) of gate
            g and up u (OpenAI 2025, gpt-oss); None: silu(g) u.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_intermediate_size: int
    norm_topk_prob: bool
    layers: tuple[int, ...]
    score: RouterScore = RouterScore.softmax
    has_selection_bias: bool = False
    groups: tuple[int, int] | None = None
    scaling_factor: float = 1.0
    has_shared_gate: bool = False
    clamp: float | None = None

    def letters(self, num_heads: int) -> dict[str, int]:
        return {
            "E": self.num_experts,
            "e": self.num_experts_per_tok,
            "M": self.intermediate_size,
            "S": self.shared_intermediate_size,
        }


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1). Names are Hugging Face's.

    Keys and values are computed from a small latent vector per token, queries from another one. A query or
    key consists of numbers without a position and of rotated ones; all heads share the rotated part of a key.
    The rotation pairs neighbors (2i, 2i + 1).

    Attributes:
        q_lora_rank: The size of the latent vector of queries; None: queries are projected directly.
        kv_lora_rank: The size of the latent vector of keys and values.
        qk_nope_head_dim: The numbers without a position in a head's query or key.
        qk_rope_head_dim: The rotated numbers in a head's query, and in the key that all heads share.
        v_head_dim: The size of a head's value.
        norm_eps: The epsilon of the norms of both latent vectors.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float

    def letters(self, num_heads: int) -> dict[str, int]:
        return {
            "A": self.q_lora_rank or 0,
            "C": self.kv_lora_rank,
            "B": self.kv_lora_rank + self.qk_rope_head_dim,
            "I": self.qk_rope_head_dim,
            "U": num_heads * (self.qk_nope_head_dim + self.v_head_dim),
        }


class Activation(str, Enum):
    """The activation of the gate in a feed-forward."""

    silu = "silu"
    gelu_tanh = "gelu_tanh"  # GELU with the tanh approximation
    squared_relu = "squared_relu"  # of a feed-forward without a gate (So et al. 2021, Primer)

    @property
    def has_gate(self) -> bool:
        """Whether a feed-forward multiplies its activation by a second projection."""
        return self is not Activation.squared_relu


@dataclass(frozen=True, kw_only=True)
class BlockNorms:
    """The RMS norms of a layer's two blocks, attention and feed-forward.

    Attributes:
        before: Whether the input of each block is normalized.
        after: Whether the output of each block is normalized before it is added to the residual.
        zero_centered: Whether all norms of the model multiply by one plus their parameter.
    """

    before: bool = True
    after: bool = False
    zero_centered: bool = False


class QKNorm(str, Enum):
    """The numbers over which the norms of queries and of keys compute their mean square."""

    head = "head"  # each head separately, with the same weight
    all_heads = "all_heads"  # all heads of a token together, with a weight for each of them


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Gated delta nets, which replace the attention of some layers (Yang et al. 2025, arXiv 2412.06464).

    A layer mixes the tokens of a row through a recurrent state instead of a softmax, so its cost is linear in
    the length of the row. A short causal convolution comes before it.

    Attributes:
        num_key_heads: The number of heads of queries and keys.
        num_value_heads: The number of heads of values, a multiple of `num_key_heads`. Each has a state.
        key_head_dim: The size of a head's query or key.
        value_head_dim: The size of a head's value.
        conv_kernel_dim: The number of tokens that the convolution sees, the token itself included.
        layers: The numbers of these layers; the others have attention.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    layers: tuple[int, ...]

    @property
    def key_dim(self) -> int:
        """The size of all queries, and of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """The size of all values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> list[int]:
        """The sizes of queries, keys and values, which the convolution sees."""
        return [self.key_dim, self.key_dim, self.value_dim]

    @property
    def parts(self) -> list[int]:
        """The parts of the input projection: queries, keys, values, gates, and twice the value heads."""
        return [*self.channels, self.value_dim, self.num_value_heads, self.num_value_heads]

    def over(self, ranks: int) -> DeltaNet:
        """Return the sizes of one of several ranks among which the heads are distributed."""
        return replace(
            self,
            num_key_heads=self.num_key_heads // ranks,
            num_value_heads=self.num_value_heads // ranks,
        )

    def letters(self, num_heads: int) -> dict[str, int]:
        return {
            "J": self.num_key_heads,
            "L": self.num_value_heads // self.num_key_heads,
            "T": self.num_value_heads,
            "X": self.key_head_dim,
            "Y": self.value_head_dim,
            "Z": self.value_dim,
            "W": self.conv_kernel_dim,
        }


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The indexers of sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2, section 2.1).

    The indexer of a layer scores each key for each query by a weighted sum over its heads, and the query
    attends to the `topk` keys with the highest scores. In a row of at most `topk` tokens these are all keys.

    Attributes:
        topk: The number of keys that a query attends to.
        num_heads: The number of heads, all of which share a key.
        head_dim: The size of a query of one head, and of a key. The first numbers are rotated.
        pairs_neighbors: Whether the rotation pairs neighbors (2i, 2i + 1), as that of latent attention does;
            otherwise the two halves.
        layers: The numbers of the layers that have an indexer. The others take what the last one before them
            that has one selected.
        trains: Whether the loss of the indexers updates them. No other loss has a gradient for them.
    """

    topk: int
    num_heads: int
    head_dim: int
    pairs_neighbors: bool
    layers: tuple[int, ...]
    trains: bool = False

    def letters(self, num_heads: int) -> dict[str, int]:
        return {
            "i": self.num_heads * self.head_dim,
            "j": self.head_dim,
            "k": self.num_heads,
            "t": self.topk,
        }


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Mamba-2 mixers, which replace the attention of some layers (Dao & Gu 2024, arXiv 2405.21060).

    The heads of a group share the vectors that write to their states and read them.

    Attributes:
        num_groups: The number of groups.
        num_heads: The number of heads, a multiple of `num_groups`. Each has a state.
        head_dim: The size of a head's input and output.
        state_dim: The numbers of a state for each of them.
        conv_kernel_dim: The number of tokens that the convolution sees, the token itself included.
        layers: The numbers of these layers.
    """

    num_groups: int
    num_heads: int
    head_dim: int
    state_dim: int
    conv_kernel_dim: int
    layers: tuple[int, ...]

    @property
    def value_dim(self) -> int:
        """The size of the inputs of all heads, and of their outputs."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> list[int]:
        """The sizes of inputs, writing vectors and reading vectors, which the convolution sees."""
        shared = self.num_groups * self.state_dim
        return [self.value_dim, shared, shared]

    @property
    def parts(self) -> list[int]:
        """The parts of the input projection: gates, what the convolution sees, and a number of each head."""
        return [self.value_dim, *self.channels, self.num_heads]

    def over(self, ranks: int) -> Mamba:
        """Return the sizes of one of several ranks among which the groups are distributed."""
        return replace(self, num_groups=self.num_groups // ranks, num_heads=self.num_heads // ranks)

    def letters(self, num_heads: int) -> dict[str, int]:
        return {
            "J": self.num_groups,
            "L": self.num_heads // self.num_groups,
            "T": self.num_heads,
            "X": self.state_dim,
            "Y": self.head_dim,
            "Z": self.value_dim,
            "W": self.conv_kernel_dim,
        }


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021): W + alpha / rank * B A.

    A projection W (outputs, inputs) has A (rank, inputs) and B (outputs, rank).

    Attributes:
        rank: The rank of every adapter.
        alpha: The numerator of the scale.
        targets: The projections with an adapter, as suffixes of Hugging Face names: "q_proj", or
            "mlp.gate_proj". Empty: every projection of attention, of feed-forwards and of experts.
        modules_to_save: The modules that train in full next to the adapters, by PEFT's names: "embed_tokens"
            or "lm_head".
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()

    def letters(self, num_heads: int) -> dict[str, int]:
        return {"r": self.rank}

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The architecture of a model. Field names are Hugging Face's.

    If `tie_word_embeddings` is set, the output layer is the input embedding. `head_dim` is the size of a
    query or key; with latent attention, values have another size. Of each head, the first
    `partial_rotary_factor` of the elements are rotated, and the others are passed through.

    `linear_bias` adds biases to the output projection of attention, routers and experts. `has_sinks` adds a
    learned logit without a value to the softmax of each query head. `windows` has the number of tokens that
    each layer sees, the token itself included, or 0 for all; it is empty if all layers see all tokens.
    `vision` is the tower of a model that reads images. `is_packed` is set if the folder has its experts in
    MXFP4; it does not change the model.

    `has_output_gate` multiplies the output of attention by the sigmoid of a gate, which is projected together
    with the queries. The norm inside a gated delta net is never zero-centered.
    `qk_norm_kind` has no effect without `qk_norm`. `softmax_scale` multiplies the products of queries and
    keys; None: one over the square root of `head_dim`. `embedding_scale` multiplies embedded tokens, rounded
    to the dtype of the model. Layers of `layers_without_rope` do not rotate queries and keys. `local_rope` is
    the base frequency and the scaling of layers with a sliding window, if those of other layers differ.

    With `indexer`, latent attention is sparse: a token attends to the keys that an indexer selects.

    Most layers have a mixer, such as attention, and a feed-forward. Those of `layers_without_mixer` have a
    feed-forward only, and those of `layers_without_feed_forward` a mixer only.

    `num_mtp_layers` layers after the last one predict further tokens (multi-token prediction). They are not
    part of the model here: a folder may have their tensors, which are not trained (see
    weights/kept_tensors.py). Two architectures that differ only in it are the same.

    With `lora`, the model has adapters, and everything is frozen except adapters, the modules that it saves,
    and a value head.
    """

    model_type: str  # a key of `FAMILIES` in megarl/models/families.py
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    partial_rotary_factor: float = 1.0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    linear_bias: bool = False
    has_sinks: bool = False
    windows: tuple[int, ...] = ()
    delta_net: DeltaNet | None = None
    mamba: Mamba | None = None
    layers_without_mixer: tuple[int, ...] = ()
    layers_without_feed_forward: tuple[int, ...] = ()
    has_output_gate: bool = False
    norms: BlockNorms = BlockNorms()
    qk_norm_kind: QKNorm = QKNorm.head
    local_rope: tuple[float, RopeScaling | None] | None = None
    layers_without_rope: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    softmax_scale: float | None = None
    activation: Activation = Activation.silu
    indexer: Indexer | None = None
    lora: LoRA | None = None
    vision: Vision | None = None
    is_packed: bool = field(default=False, compare=False)
    num_mtp_layers: int = field(default=0, compare=False)

    @property
    def base(self) -> Architecture:
        """The model without adapters."""
        return self if self.lora is None else replace(self, lora=None)

    def trains_fully(self, module: str) -> bool:
        """Return whether gradients update the weight of a module, such as `lm_head`, if the model trains."""
        return self.lora is None or module in self.lora.modules_to_save

    @property
    def is_partly_frozen(self) -> bool:
        """Whether the tensor table freezes the model below adapters, or its indexers, if the model trains."""
        return self.lora is not None or (self.indexer is not None and not self.indexer.trains)

    @property
    def num_image_layers(self) -> int:
        """The number of first layers to whose outputs features of images are added."""
        return len(self.vision.deepstack_blocks) if self.vision else 0

    @property
    def value_dim(self) -> int:
        """The size of a head's value."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that the position rotates."""
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def parts(self) -> tuple[Experts | LatentAttention | Indexer | DeltaNet | Mamba | LoRA, ...]:
        """The parts that only some models have, each with the letters of its sizes (see mapping.py)."""
        parts = (self.experts, self.latent, self.indexer, self.delta_net, self.mamba, self.lora)
        return tuple(part for part in parts if part is not None)

    def sizes_of[Part: (Experts, LatentAttention, DeltaNet, Mamba, Vision)](self, kind: type[Part]) -> Part:
        """Return the sizes of a part that the model must have, such as its `Experts`."""
        found = [part for part in (*self.parts, self.vision) if isinstance(part, kind)]
        assert found, (self.model_type, kind)
        return found[0]

    @property
    def num_experts(self) -> int:
        return self.experts.num_experts if self.experts else 0

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have experts."""
        return self.experts.layers if self.experts else ()

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have a gated delta net instead of attention."""
        return self.delta_net.layers if self.delta_net else ()

    @property
    def mamba_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have a Mamba-2 mixer instead of attention."""
        return self.mamba.layers if self.mamba else ()
