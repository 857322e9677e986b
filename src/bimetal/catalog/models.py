"""`ModelSpec`: the shape of a decoder-only transformer, and what that shape weighs.

Read from a Hugging Face `config.json`, or by name from `data/models/*.json` (published configs, cut down to the
fields that matter). Knows parameter counts and KV-cache bytes; knows nothing of devices or of time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from bimetal.catalog.quantization import Quantization, parse_quantization
from bimetal.errors import ConfigError
from bimetal.units import DTYPE_BYTES

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3's frequency-dependent scaling of rotary embeddings, or plain linear scaling."""

    kind: str
    """`linear` or `llama3`."""
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that a stage, the performance model and the planner need to know of a model's shape."""

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of a dense layer's MLP."""
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer; None: the layer sees the whole context. Empty: every layer does."""
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    renormalise_experts: bool = True
    """The chosen experts' weights are scaled to sum to one."""
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture-of-experts model that hold a plain MLP."""
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantization: Quantization | None = None
    """None: weights are stored in `dtype`."""

    @property
    def dimensions(self) -> dict[str, int]:
        """What two checkpoints must have in common to be of one model."""
        names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
        return {name: getattr(self, name) for name in (*names, "num_experts", "moe_intermediate_size")}

    def differences(self, other: ModelSpec) -> str:
        """Of dimensions, for people: ours first."""
        theirs = other.dimensions
        found = [f"{name} {n} and {theirs[name]}" for name, n in self.dimensions.items() if n != theirs[name]]
        return ", ".join(found)

    @property
    def weight_dtype(self) -> str:
        """Of most weights as they are stored; `dtype` is what activations are computed in."""
        return self.dtype if self.quantization is None else "float8"

    def sliding_window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """Of one layer, its two norms included."""
        qkv = self.hidden_size * (self.query_size + 2 * self.kv_size)
        biases = (self.query_size + 2 * self.kv_size) * self.qkv_bias + self.hidden_size * self.output_bias
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
        return qkv + self.query_size * self.hidden_size + biases + norms

    @property
    def expert_params(self) -> int:
        """Of one expert."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    def mlp_params(self, layer: int, num_experts: float | None = None) -> float:
        """Of one layer's MLP or router and `num_experts` experts (all, unless given)."""
        if self.has_experts(layer):
            held = self.num_experts if num_experts is None else num_experts
            return self.hidden_size * self.num_experts + held * self.expert_params
        biases = (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return 3 * self.hidden_size * self.intermediate_size + biases

    def layer_params(self, layer: int, num_experts: float | None = None) -> float:
        return self.attention_params + self.mlp_params(layer, num_experts)

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """As published: every weight once.

        >>> round(builtin_model("Llama-3.1-8B").num_params / 1e9, 2)
        8.03
        """
        layers = sum(self.layer_params(i) for i in range(self.num_layers))
        embeddings = self.embedding_params * (1 if self.tied_embeddings else 2)
        return int(layers) + embeddings + self.hidden_size

    @property
    def num_active_params(self) -> int:
        """Weights that one token meets: of the experts, only the chosen ones."""
        layers = sum(self.layer_params(i, self.experts_per_token) for i in range(self.num_layers))
        embeddings = self.embedding_params * (1 if self.tied_embeddings else 2)
        return int(layers) + embeddings + self.hidden_size

    def stage_params(self, start_layer: int, end_layer: int) -> int:
        """Weights held by layers [start_layer, end_layer), with the embedding and the output head where they belong.

        A tied embedding is held twice when the first and the last layer are on different stages.
        """
        total = sum(self.layer_params(i) for i in range(start_layer, end_layer))
        norm = self.hidden_size * (end_layer == self.num_layers)
        return int(total) + self.stage_embedding_params(start_layer, end_layer) + norm

    def stage_embedding_params(self, start_layer: int, end_layer: int) -> int:
        """Of the embedding and the output head, as far as these layers' stage holds them."""
        first, last = start_layer == 0, end_layer == self.num_layers
        copies = 1 if first and last and self.tied_embeddings else first + last
        return copies * self.embedding_params

    def kv_bytes_per_token(self, dtype: str = "bfloat16", num_layers: int | None = None) -> int:
        """Keys and values of one token over `num_layers` layers (all, unless given).

        >>> builtin_model("Llama-3.1-8B").kv_bytes_per_token()
        131072
        """
        layers = self.num_layers if num_layers is None else num_layers
        return int(2 * layers * self.kv_size * DTYPE_BYTES[dtype])


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """transformers 5 writes one `rope_parameters`; earlier ones `rope_theta` and `rope_scaling`."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind == "linear":
        return float(theta), RopeScaling("linear", float(parameters["factor"]))
    if kind == "llama3":
        return float(theta), RopeScaling(
            "llama3",
            float(parameters["factor"]),
            float(parameters["low_freq_factor"]),
            float(parameters["high_freq_factor"]),
            int(parameters["original_max_position_embeddings"]),
        )
    raise ConfigError(f"{source}: rope scaling {kind!r} is not supported: use default, linear or llama3")


def _sliding_windows(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window:
        return ()
    if family in ("mistral", "mixtral"):
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return ()
    layer_types = config.get("layer_types")
    if layer_types:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
    first = int(config.get("max_window_layers", 0))
    return tuple(int(window) if i >= first else None for i in range(num_layers))


def _dense_layers(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[int, ...]:
    if family != "qwen3_moe":
        return ()
    step = int(config.get("decoder_sparse_step", 1))
    plain = set(config.get("mlp_only_layers") or ())
    return tuple(i for i in range(num_layers) if i in plain or (i + 1) % step)


def _tokens(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)


def parse_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """A Hugging Face config as a ModelSpec; ConfigError names the family or field that does not fit."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{name}: model_type {family!r} is not supported: use one of {', '.join(FAMILIES)}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{name}: hidden_act {activation!r} is not supported: these families use silu")
    try:
        num_layers = int(config["num_hidden_layers"])
        hidden_size = int(config["hidden_size"])
        num_heads = int(config["num_attention_heads"])
        rope_theta, rope_scaling = _rope(config, name)
        qwen = family in ("qwen3", "qwen3_moe")
        moe = family in ("mixtral", "qwen3_moe")
        intermediate_size = int(config["intermediate_size"])
        spec = ModelSpec(
            name=name,
            family=family,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or (128 if qwen else hidden_size // num_heads)),
            intermediate_size=intermediate_size,
            vocab_size=int(config["vocab_size"]),
            max_position=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
            output_bias=family != "qwen2" and bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qwen,
            sliding_windows=_sliding_windows(config, family, num_layers),
            num_experts=int(config.get("num_local_experts") or config.get("num_experts") or 0) if moe else 0,
            experts_per_token=int(config["num_experts_per_tok"]) if moe else 0,
            moe_intermediate_size=int(config.get("moe_intermediate_size") or intermediate_size) if moe else 0,
            renormalise_experts=family != "qwen3_moe" or bool(config.get("norm_topk_prob", False)),
            dense_layers=_dense_layers(config, family, num_layers),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            eos_token_ids=_tokens(config.get("eos_token_id")),
            bos_token_id=config.get("bos_token_id"),
            quantization=parse_quantization(config, name),
        )
    except KeyError as error:
        raise ConfigError(
            f"{name}: config.json lacks {error.args[0]!r}: take the file that came with the weights"
        ) from error
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"{name}: {spec.num_heads} heads are no multiple of {spec.num_kv_heads} key/value heads"
        )
    return spec


@cache
def builtin_models() -> dict[str, ModelSpec]:
    """The catalogue's models by name."""
    folder = resources.files("bimetal.catalog") / "data" / "models"
    specs = {}
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        name = entry.name.removesuffix(".json")
        specs[name] = parse_config(json.loads(entry.read_text()), name)
    return specs


def builtin_model(name: str) -> ModelSpec:
    """A catalogue model; the organisation before the slash and the case do not matter."""
    wanted = name.rsplit("/", 1)[-1].lower()
    for known, spec in builtin_models().items():
        if known.lower() == wanted or f"{known}-instruct".lower() == wanted:
            return spec
    raise ConfigError(
        f"model {name!r} is neither a folder with a config.json nor in the catalogue: "
        f"give a path, or one of {', '.join(builtin_models())}"
    )


def load_model_spec(model: str) -> ModelSpec:
    """From a checkpoint folder, a config.json, or the catalogue."""
    path = Path(model).expanduser()
    config = path / "config.json" if path.is_dir() else path
    if config.is_file():
        try:
            document = json.loads(config.read_text())
        except json.JSONDecodeError as error:
            raise ConfigError(f"{config}: not JSON: {error}") from error
        if not isinstance(document, dict):
            raise ConfigError(f"{config}: expected a JSON object, got {type(document).__name__}")
        return parse_config(document, path.name if path.is_dir() else path.parent.name)
    if path.is_dir():
        raise ConfigError(f"{path}: holds no config.json: give the folder of a Hugging Face checkpoint")
    return builtin_model(model)
