"""Models that can be planned and priced but that the engine cannot run yet: shapes only.

Owns the families whose attention or experts `ModelSpec` alone does not describe. Figures are those of the published
config.json of openai/gpt-oss-120b and deepseek-ai/DeepSeek-R1.
"""

from __future__ import annotations

from dataclasses import dataclass

from bimetal.catalog.models import ModelSpec, builtin_model
from bimetal.errors import ConfigError
from bimetal.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec(ModelSpec):
    """DeepSeek's attention caches one compressed vector per token and layer, which every rank holds; its
    mixture-of-experts layers add experts that every token meets."""

    query_rank: int = 0
    latent_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    num_shared_experts: int = 0

    @property
    def attention_params(self) -> int:
        """Down- and up-projections of queries and of the shared latent, the output projection, norms."""
        query = self.query_rank * (self.hidden_size + self.num_heads * (self.head_dim + self.rope_dim))
        latent = self.hidden_size * (self.latent_rank + self.rope_dim)
        expand = self.latent_rank * self.num_heads * (self.head_dim + self.value_dim)
        output = self.num_heads * self.value_dim * self.hidden_size
        return query + latent + expand + output + 2 * self.hidden_size + self.query_rank + self.latent_rank

    def mlp_params(self, layer: int, num_experts: float | None = None) -> float:
        """As in ModelSpec, plus the shared experts."""
        shared = self.num_shared_experts * self.expert_params if self.has_experts(layer) else 0
        return ModelSpec.mlp_params(self, layer, num_experts) + shared

    def kv_bytes_per_token(self, dtype: str = "bfloat16", num_layers: int | None = None) -> int:
        """The latent and its rotary part."""
        layers = self.num_layers if num_layers is None else num_layers
        return int(layers * (self.latent_rank + self.rope_dim) * DTYPE_BYTES[dtype])


GPT_OSS_120B = ModelSpec(
    name="gpt-oss-120b",
    family="gpt_oss",
    num_layers=36,
    hidden_size=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=2880,
    vocab_size=201088,
    max_position=131072,
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
    qkv_bias=True,
    output_bias=True,
    sliding_windows=(128, None) * 18,
    num_experts=128,
    experts_per_token=4,
    moe_intermediate_size=2880,
)

DEEPSEEK_R1 = LatentAttentionSpec(
    name="DeepSeek-R1",
    family="deepseek_v3",
    num_layers=61,
    hidden_size=7168,
    num_heads=128,
    num_kv_heads=128,
    head_dim=128,
    intermediate_size=18432,
    vocab_size=129280,
    max_position=163840,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    num_experts=256,
    experts_per_token=8,
    moe_intermediate_size=2048,
    dense_layers=(0, 1, 2),
    query_rank=1536,
    latent_rank=512,
    rope_dim=64,
    value_dim=128,
    num_shared_experts=1,
)

PLANNED_MODELS = {spec.name: spec for spec in (GPT_OSS_120B, DEEPSEEK_R1)}


def planned_model(name: str) -> ModelSpec:
    """From the catalogue, or one that can only be planned."""
    wanted = name.rsplit("/", 1)[-1].lower()
    for known, spec in PLANNED_MODELS.items():
        if wanted == known.lower():
            return spec
    try:
        return builtin_model(name)
    except ConfigError as error:
        raise ConfigError(f"{error}, {', '.join(PLANNED_MODELS)}") from error
