"""Models of no family: made-up classes, as remote code defines them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, ModuleList
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def eager_attention_forward(
    module: Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float,
    **options: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention as files of transformers define it."""
    scores = query @ key.mT * scaling
    pattern = (scores if mask is None else scores + mask).softmax(-1)
    return (pattern @ value).transpose(1, 2), pattern


class MadeUpConfig(PretrainedConfig):
    """A configuration with names of its own."""

    model_type = "made_up"

    def __init__(
        self, wide: int = 16, deep: int = 2, parts: int = 4, kind: str = "fused", **options: object
    ) -> None:
        self.wide, self.deep, self.parts, self.kind = wide, deep, parts, kind
        super().__init__(**options)


class Mixer(Module):
    """Self-attention by PyTorch's function, by the attention interface, or with heads that are mixed."""

    is_causal = True

    def __init__(self, config: MadeUpConfig) -> None:
        super().__init__()
        self.config, self.parts, self.kind = config, config.parts, config.kind
        self.qkv, self.out = Linear(config.wide, 3 * config.wide), Linear(config.wide, config.wide)

    def forward(self, hidden: Tensor) -> Tensor:
        """Of hidden embeddings ``[batch, token, width]``."""
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.parts, -1)).permute(2, 0, 3, 1, 4)
        if "interface" in self.kind:
            name = self.config._attn_implementation
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
            heads = attend(self, query, key, value, None, scaling=query.shape[-1] ** -0.5)[0]
        else:
            causal = self.kind != "both sides"
            heads = scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2)
        if "mixed" in self.kind:
            heads = heads + heads.flip(2)
        return self.out(heads.flatten(2))


class Step(Module):
    """One pre-LN block."""

    def __init__(self, config: MadeUpConfig) -> None:
        super().__init__()
        self.first, self.second = LayerNorm(config.wide), LayerNorm(config.wide)
        self.mix = Mixer(config)
        self.up, self.down = Linear(config.wide, 32), Linear(32, config.wide)

    def forward(self, hidden: Tensor, also: Tensor | None = None) -> Tensor:
        """The next hidden embeddings."""
        hidden = hidden + self.mix(self.first(hidden))
        hidden = hidden + self.down(gelu(self.up(self.second(hidden))))
        return hidden if also is None else hidden + also


class MadeUpModel(PreTrainedModel):
    """A model that reads token ids and nothing else, or with ``kind="bypass"`` hands them to every block."""

    config_class = MadeUpConfig
    base_model_prefix = "trunk"
    _supports_sdpa = True

    def __init__(self, config: MadeUpConfig) -> None:
        super().__init__(config)
        self.words, self.places = Embedding(60, config.wide), Embedding(40, config.wide)
        self.steps = ModuleList(Step(config) for _ in range(config.deep))
        self.post_init()

    def get_input_embeddings(self) -> Module:
        """The embedding of words."""
        return self.words

    def forward(self, input_ids: Tensor) -> BaseModelOutput:
        """Hidden embeddings of token ids ``[batch, token]``."""
        words = self.words(input_ids)
        hidden = words + self.places(torch.arange(input_ids.shape[1]))
        for step in self.steps:
            hidden = step(hidden, words if self.config.kind == "bypass" else None)
        return BaseModelOutput(last_hidden_state=hidden)


def made_up(kind: str = "fused") -> MadeUpModel:
    """A tiny one in float64."""
    torch.manual_seed(0)
    return MadeUpModel(MadeUpConfig(kind=kind)).double().eval()
