"""Tiny random Hugging Face models of each family, as the float32 reference of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from megarl.models.architecture import Architecture, RouterScore
from megarl.models.families import FAMILIES as REGISTERED
from megarl.models.family import stored_name
from tests.families import (
    DENSE_FAMILIES,
    SPARSE_FAMILIES,
    WITH_TRANSPOSED_EXPERTS,
    example_config,
    is_kept,
    model_class,
    new_model,
)
from tests.unit.engine.rank_side import RowImages
from tests.unit.weights.models import as_stored, stored_state

VOCAB_SIZE = 199  # for every example; odd, so that every tensor-parallel size pads it
_HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # no layout shards them over more than two ranks
# Each dense family with a tied embedding, and what that omits: a separate output layer, and unscaled
# frequencies.
FAMILIES: dict[str, PretrainedConfig] = {
    **{
        f"{family}-tied": example_config(family, **_HEADS, tie_word_embeddings=True)
        for family in DENSE_FAMILIES
    },
    "qwen2": example_config("qwen2", **_HEADS),
    "llama2": example_config("llama", **_HEADS, rope_scaling=None, rope_theta=1e4),
}
# Each MoE family, if possible with a dense layer between sparse ones. Rows are up to 8 times as long as indexers
# select keys (see `make_long_batch`).
SELECTED_KEYS = 4
EXPERT_FAMILIES: dict[str, PretrainedConfig] = {
    family: example_config(family, **_HEADS, mlp_only_layers=[1], index_topk=SELECTED_KEYS)
    for family in SPARSE_FAMILIES
}
# A model with latent attention whose queries have no latent vector, and with another epsilon than the norms
# of its latent vectors.
EXPERT_FAMILIES["moonlight"] = example_config(
    "deepseek_v3", **_HEADS, q_lora_rank=None, rope_scaling=None, n_group=1, rms_norm_eps=1e-5
)
# Half of the layers share the selection of the layer before them.
EXPERT_FAMILIES["glm-shared"] = example_config("glm_moe_dsa", **_HEADS, index_topk=SELECTED_KEYS)
EXPERT_FAMILIES["glm-shared"].indexer_types = ["full", "shared"] * 2
# The context is longer than the original one, and rows are too.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 8}
# Dense models with a part that no family's example has.
VARIANTS: dict[str, PretrainedConfig] = {"yarn": example_config("qwen2", **_HEADS, tie_word_embeddings=True)}
VARIANTS["yarn"].rope_parameters = YARN
# Layers of one part without experts, of which the last one has a recurrent state.
VARIANTS["nemotron_h-dense"] = example_config(
    "nemotron_h",
    **_HEADS,
    layers_block_type=["mlp", "linear_attention", "full_attention", "linear_attention"],
)
# MoE models in which every token goes to all experts, so that rounding selects no others: with groups of products,
# sinks and windows, gated delta nets, latent attention.
EVERY_EXPERT: dict[str, PretrainedConfig] = {
    f"{family}-all": example_config(family, **_HEADS, num_experts_per_tok=8, topk_group=2)
    for family in ("qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3")
}
IDLE_EXPERT = 3
SELECTION_BIAS = "e_score_correction_bias"
ROUTER_WEIGHTS = ("mlp.gate.weight", "mlp.router.weight", "mixer.gate.weight")


def save_model(family: str, folder: Path, seed: int = 0) -> None:
    """Write a model whose norms and biases are far from one and zero.

    Weights are large enough for log-probs to differ by several nats. One expert's router row is the mean of
    the others, so that it is rarely selected.
    """
    torch.manual_seed(seed)
    config = {**FAMILIES, **EXPERT_FAMILIES, **VARIANTS, **EVERY_EXPERT}[family]
    model = new_model(config)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3.0, 0.0)  # states decay within several tokens
            elif name.endswith("conv1d.weight"):
                parameter.normal_(std=0.5)
            elif name.endswith("linear_attn.out_proj.weight"):
                continue  # the norm before it amplifies the rounding of states that a query hardly reads
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif name.endswith(ROUTER_WEIGHTS):
                parameter.normal_(std=0.3)
                parameter[IDLE_EXPERT] = parameter[
                    [row for row in range(len(parameter)) if row != IDLE_EXPERT]
                ].mean(0)
            else:
                parameter.mul_(3.0)

        for name, buffer in model.named_buffers():
            if name.endswith(SELECTION_BIAS):
                buffer.normal_(std=0.05)
                buffer[IDLE_EXPERT] = -0.1

    model.save_pretrained(folder)
    if config.model_type in WITH_TRANSPOSED_EXPERTS:
        save_file(stored_state(model), folder / "model.safetensors", metadata={"format": "pt"})


def save_large_model(folder: Path) -> PreTrainedModel:
    """Write a model with 55 million parameters (220 MB).

    Many are in tensors smaller than what glibc maps separately.
    """
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)

    return model


class Critic(torch.nn.Module):
    """A Hugging Face trunk with a linear head. Its parameters have the names in a critic's folder."""

    def __init__(self, trunk: PreTrainedModel, head: Tensor) -> None:
        super().__init__()
        self.model = trunk
        self.score = torch.nn.Linear(head.shape[1], 1, bias=False)
        self.score.weight = torch.nn.Parameter(head.clone())


def save_critic(lm_folder: Path, folder: Path, seed: int = 0) -> None:
    """Write the language model's trunk with a random `score.weight` instead of its head."""
    folder.mkdir(exist_ok=True)
    tensors = {
        name: value
        for name, value in load_file(lm_folder / "model.safetensors").items()
        if name != "lm_head.weight"
    }
    names = ("embed_tokens.weight", "embeddings.weight")
    embedding = next(value for name, value in tensors.items() if name.endswith(names))
    tensors["score.weight"] = (
        torch.randn(1, embedding.shape[1], generator=torch.Generator().manual_seed(seed)) * 0.3
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((lm_folder / "config.json").read_text())


def load_lm(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    kind = model_class(AutoConfig.from_pretrained(folder))
    return kind.from_pretrained(folder, dtype=dtype)


def load_critic(folder: Path) -> Critic:
    """Load a critic. A folder without `score.weight` gives a head of zeros."""
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float32)
    head = load_file(folder / "model.safetensors").get("score.weight")
    return Critic(trunk, torch.zeros(1, trunk.config.get_text_config().hidden_size) if head is None else head)


class Routed(NamedTuple):
    """A forward pass of one router: (T, E) logits and (T, K) selected experts."""

    logits: Tensor
    experts: Tensor


def record_routers(model: torch.nn.Module) -> dict[str, list[Routed]]:
    """Record every following forward pass of each router."""
    recorded: dict[str, list[Routed]] = {}

    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router", "mixer.gate")):
            module.register_forward_hook(
                lambda router, inputs, output, name=name: recorded.setdefault(name, []).append(
                    Routed(
                        F.linear(
                            inputs[0].reshape(-1, router.weight.shape[1]),
                            router.weight,
                            getattr(router, "bias", None),
                        ),
                        output[2],
                    )
                )
            )

    return recorded


class RouterLosses(NamedTuple):
    """Means over the layers, and the largest fraction of a layer's tokens that went to one expert."""

    aux_loss: Tensor
    z_loss: Tensor
    largest_share: float


def router_losses(recorded: dict[str, list[Routed]], architecture: Architecture) -> RouterLosses:
    """Return the losses of everything that was recorded, layer by layer.

    They are Hugging Face's load-balancing loss, which counts a token once for each of its experts, and the z
    loss of Zoph et al. 2022, equation 5. Hugging Face has no loss for sigmoid scores: it is that of
    DeepSeek-V3 (arXiv 2412.19437, equation 17) over all tokens.
    """
    assert architecture.experts is not None
    layers = [torch.cat([part.logits for part in parts]) for parts in recorded.values()]
    num_experts = architecture.num_experts
    shares = [
        torch.cat([part.experts for part in parts]).flatten().bincount(minlength=num_experts)
        / sum(part.experts.numel() for part in parts)
        for parts in recorded.values()
    ]

    if architecture.experts.score is RouterScore.sigmoid:
        scores = [layer.sigmoid() for layer in layers]
        means = [(score / score.sum(1, keepdim=True)).mean(0) for score in scores]
        balance = [num_experts * share @ mean for share, mean in zip(shares, means, strict=True)]
    else:
        chosen = architecture.experts.num_experts_per_tok
        balance = [load_balancing_loss_func((layer,), num_experts, chosen) / chosen for layer in layers]

    return RouterLosses(
        torch.stack(balance).mean(),
        torch.stack([layer.logsumexp(-1).square().mean() for layer in layers]).mean(),
        max(float(share.max()) for share in shares),
    )


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return gradients by the names in a folder. Frozen tensors have 0."""
    trunk = model if isinstance(model, PreTrainedModel) else model.model
    frozen = {
        key: torch.zeros_like(value) for key, value in model.named_buffers() if key.endswith(SELECTION_BIAS)
    }
    # Nothing has a gradient for an indexer.
    frozen |= {key: torch.zeros_like(value) for key, value in model.named_parameters() if ".indexer." in key}
    gradients = {
        key: parameter.grad
        for key, parameter in model.named_parameters()
        if key not in frozen and not is_kept(key, trunk.config)
    }
    named = as_stored(frozen | gradients, trunk)  # type: ignore[operator, arg-type]

    # transformers does not rename the tower of a trunk without its head.
    prefixes = REGISTERED[trunk.config.model_type].module_prefixes
    return {stored_name(name, prefixes): value for name, value in named.items()}


def make_batch(
    num_rows: int = 7, prompt_length: int = 6, response_length: int = 9, seed: int = 1
) -> dict[str, Tensor]:
    """Return rows of different lengths: left-padded prompts and right-padded responses.

    One row is full, and one response has one token.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    prompts = draw(1, prompt_length + 1, (num_rows,))
    responses = draw(1, response_length + 1, (num_rows,))
    prompts[0] = prompt_length
    responses[0] = response_length
    responses[1] = 1
    column = torch.arange(prompt_length + response_length)
    mask = (column >= prompt_length - prompts[:, None]) & (column < prompt_length + responses[:, None])

    return {
        "input_ids": torch.where(mask, draw(0, VOCAB_SIZE, tuple(mask.shape)), 0),
        "attention_mask": mask.long(),
        "response_mask": mask[:, prompt_length:],
    }


def make_long_batch() -> dict[str, Tensor]:
    """Return rows of `make_batch` that are long enough for sparse attention to select keys."""
    return make_batch(prompt_length=2 * SELECTED_KEYS, response_length=6 * SELECTED_KEYS)


def with_one_prompt(batch: dict[str, Tensor], *groups: Sequence[int]) -> dict[str, Tensor]:
    """Give the rows of a group the prompt of its first row."""
    made = {key: value.clone() for key, value in batch.items()}
    prompt_length = made["input_ids"].shape[1] - made["response_mask"].shape[1]

    for rows in groups:
        for key in ("input_ids", "attention_mask"):
            made[key][list(rows), :prompt_length] = made[key][rows[0], :prompt_length]

    return made


IMAGE_TOKEN = 190  # of every example
_FIRST_IMAGE_TOKEN = 192
_LAST_IMAGE_TOKEN = 193


def make_image_batch(num_rows: int = 7, seed: int = 1) -> dict[str, Any]:
    """Return rows with one image, two images or none, in the form of `make_batch`, with `images`.

    Rows 0, 4 and 2 have one prompt with two images. Rows 1 and 5 have prompts of the same tokens with
    different images. Rows 3 and 6 and all after them have no image.
    """
    generator = torch.Generator().manual_seed(seed)

    def image(*sizes: tuple[int, int]) -> RowImages:
        grids = torch.tensor([(1, *size) for size in sizes])
        return RowImages(torch.randn(int(grids.prod(1).sum()), 24, generator=generator), grids)

    two = image((4, 6), (2, 4))
    images = [two, image((4, 4)), two, None, two, image((4, 4)), *[None] * (num_rows - 6)]
    prompt_length = 24
    batch = make_batch(num_rows, prompt_length=prompt_length, seed=seed)

    # The tokens of examples end with those of images, which texts do not have.
    batch["input_ids"] %= IMAGE_TOKEN
    for row, of_row in enumerate(images):
        if of_row is None:
            continue
        text = batch["input_ids"][1 if row == 5 else row, prompt_length - 3 : prompt_length].tolist()
        prompt = [text[0]]
        for count in (of_row.grids.prod(1) // 4).tolist():
            prompt += [_FIRST_IMAGE_TOKEN, *[IMAGE_TOKEN] * count, _LAST_IMAGE_TOKEN, 7]
        prompt += text
        batch["input_ids"][row, :prompt_length] = torch.tensor([0] * (prompt_length - len(prompt)) + prompt)
        batch["attention_mask"][row, :prompt_length] = torch.arange(prompt_length) >= (
            prompt_length - len(prompt)
        )

    return with_one_prompt(batch, (0, 4, 2)) | {"images": images}


def _image_arguments(ids: Tensor, images: RowImages | None) -> dict[str, Tensor]:
    """Return the arguments of transformers' models for the images of a row with the tokens `ids` (1, L)."""
    if images is None:
        return {}
    return {
        "pixel_values": images.pixels,
        "image_grid_thw": images.grids,
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
    }


def _at_predictors(batch: dict[str, Any], of_row: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> Tensor:
    """Return (B, R, ...): the output of `of_row` before each response token, 0 elsewhere.

    `of_row` maps token ids (1, L) and the arguments of images to (L, ...).
    """
    images = batch.get("images", [None] * len(batch["input_ids"]))
    response_length = batch["response_mask"].shape[1]
    prompt_length = batch["input_ids"].shape[1] - response_length
    rows = []

    for ids, mask, image in zip(batch["input_ids"], batch["attention_mask"].bool(), images, strict=True):
        prompt = int(mask[:prompt_length].sum())
        response = int(mask[prompt_length:].sum())
        arguments = _image_arguments(ids[mask][None], image)
        output = of_row(ids[mask][None], arguments)[prompt - 1 : prompt + response - 1]
        rows.append(torch.cat([output, output.new_zeros(response_length - response, *output.shape[1:])]))

    return torch.stack(rows)


def reference_logits(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits (B, R, V) that predict each response token, row by row with Hugging Face; 0 elsewhere."""
    return _at_predictors(batch, lambda ids, images: model(ids, use_cache=False, **images).logits[0])


def reference_values(critic: Critic, batch: dict[str, Tensor]) -> Tensor:
    """Return the value (B, R) before each response token is generated; 0 elsewhere."""
    return _at_predictors(
        batch,
        lambda ids, images: critic.score(critic.model(ids, use_cache=False, **images).last_hidden_state[0])[
            :, 0
        ],
    )


def scores_of(logits: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `log_probs` and `entropy` (B, R) of the response tokens under softmax(logits), 0 elsewhere."""
    response_length = batch["response_mask"].shape[1]
    log_softmax = logits.log_softmax(-1)
    targets = batch["input_ids"][:, -response_length:]
    real = batch["attention_mask"][:, -response_length:]

    return {
        "log_probs": log_softmax.gather(-1, targets[..., None])[..., 0] * real,
        "entropy": -(log_softmax.exp() * log_softmax).sum(-1) * real,
    }
