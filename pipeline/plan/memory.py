"""How much memory a run takes: estimates from the headers of the models' files, before anything is loaded."""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline import rows
from pipeline.config import Config, ConfigError
from pipeline.derived import scorers, uses_baselines, uses_critic, uses_policy_scores, uses_reference

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

LM_HEAD = "lm_head."
"""How the head's tensors begin, which a critic does without."""


@dataclass(frozen=True)
class Memory:
    """Estimate in bytes, of one process each unless said otherwise."""

    parameters: int
    """Number of parameters of the model (no bytes)."""
    train_weights: int
    train_gradients: int
    train_optimizer: int
    train_logits: int
    train_critic: int | None
    """Weights, gradients and optimiser of the critic; 0 without one, None where its folder is not known."""
    engine_weights: int
    engine_kv_needed: int
    """KV cache that lets `rollout.max_num_seqs` sequences of full length run at the same time."""
    rows: int
    """All columns of tokens of one iteration in the object store."""
    scorer_weights: dict[str, int | None] = field(default_factory=dict)
    """Weights of one replica of each scoring pool; None where its folder is not known."""
    train_versions: int = 0
    """Copies of the weights that engines read out of the train worker's memory."""

    @property
    def train_worker(self) -> int:
        """Bytes of one train worker without activations."""
        actor = self.train_weights + self.train_gradients + self.train_optimizer + self.train_logits
        return actor + self.train_versions + (self.train_critic or 0)


@dataclass(frozen=True)
class ModelFiles:
    """What the files of a model's folder say."""

    folder: Path
    config: Mapping[str, Any]
    """`config.json`; with the entries of its `text_config`, where multimodal families keep the decoder's sizes."""
    parameters: int
    head: int
    """Parameters of the language model's head among them; 0 where it is tied to the embedding."""


def estimate(config: Config) -> Memory | None:
    """The run's memory; None where `model.path` is not a local folder with safetensors files.

    Raises:
        ConfigError: a file is damaged, rows may be longer than a model allows, or a model's vocabulary is another.
    """
    model = read_model(config.model.path)
    if model is None:
        return None
    data, rollout, actor, workers = config.data, config.rollout, config.actor, config.trainer.num_workers
    critic = read_model(config.critic.path) if config.critic.path else model
    reference = read_model(config.scoring.reference.path) if config.scoring.reference.path else model
    judging = read_model(config.reward.model.path)
    _check_length(config, model, "model.path")
    if critic and uses_critic(config):
        _check_length(config, critic, "critic.path")
    if reference and uses_reference(config):
        _check_length(config, reference, "scoring.reference.path")
        _check_vocabulary(reference, model)
    tokens = data.max_prompt_length + data.max_response_length
    element = BYTES[config.model.dtype]
    shard = model.parameters * element // workers
    kept = (config.algorithm.max_staleness + 2) * (config.trainer.weight_transport == "nixl")
    return Memory(
        parameters=model.parameters,
        train_weights=shard,
        train_gradients=shard,
        train_optimizer=2 * shard,
        # Logits, their softmax and the gradient of both, in float32.
        train_logits=3 * 4 * actor.logits_chunk_tokens * model.config.get("vocab_size", 0),
        train_critic=_critic_bytes(config, critic),
        engine_weights=model.parameters * BYTES[rollout.dtype],
        engine_kv_needed=_kv_bytes_per_token(model.config, BYTES[rollout.dtype]) * tokens * rollout.max_num_seqs,
        rows=_row_bytes(config),
        scorer_weights=_scorer_bytes(
            config, {"reward_model": judging, "reference": reference, "value": critic, "policy": model}
        ),
        train_versions=kept * model.parameters * BYTES[rollout.dtype] // workers,
    )


def read_model(path: str | Path | None) -> ModelFiles | None:
    """What the folder `path` holds; None where it is no local folder with `config.json` and safetensors files.

    Raises:
        ConfigError: a file is damaged.
    """
    folder = Path(path or "")
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not files:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{folder / 'config.json'} is not valid JSON: {error}") from error
    tensors = [tensor for file in files for tensor in _tensors(file)]
    return ModelFiles(
        folder=folder,
        config=config | config.get("text_config", {}),
        parameters=sum(count for _, count in tensors),
        head=sum(count for name, count in tensors if name.startswith(LM_HEAD)),
    )


def _tensors(file: Path) -> Iterator[tuple[str, int]]:
    """Name and number of parameters of each tensor in a safetensors file."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
    except (struct.error, ValueError) as error:
        raise ConfigError(f"{file} is not a whole safetensors file: {error}; save or download it again") from error
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, math.prod(tensor["shape"])


def _check_length(config: Config, model: ModelFiles, key: str) -> None:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    longest = model.config.get("max_position_embeddings")
    if longest is not None and prompt + response > longest:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = {prompt + response} tokens, "
            f"more than the {longest} of the model in {model.folder} ({key}, max_position_embeddings); shorten one of "
            "them"
        )


def _check_vocabulary(reference: ModelFiles, model: ModelFiles) -> None:
    sizes = [files.config.get("vocab_size") for files in (reference, model)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(
            f"scoring.reference.path={reference.folder} has a vocabulary of {sizes[0]} tokens and "
            f"model.path={model.folder} one of {sizes[1]}, so their log-probs of a token cannot be compared; give a "
            "reference with the policy's vocabulary, such as the model that training began with"
        )


def _decoder(model: ModelFiles) -> int:
    """Parameters of the critic: the model without the head of the language model, and the value head."""
    return model.parameters - model.head + model.config.get("hidden_size", 0) + 1


def _critic_bytes(config: Config, critic: ModelFiles | None) -> int | None:
    if not uses_critic(config):
        return 0
    if critic is None:
        return None
    # Weights, gradients, and the two moments of AdamW.
    return 4 * (_decoder(critic) * BYTES[config.model.dtype] // config.trainer.num_workers)


def _scorer_bytes(config: Config, models: Mapping[str, ModelFiles | None]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name, scorer in scorers(config).items():
        model, fsdp = models[name], (config.critic if name == "value" else config.actor).fsdp
        if model is None:
            found[name] = None
            continue
        parameters = _decoder(model) if name == "value" else model.parameters
        found[name] = parameters * BYTES[scorer.dtype or fsdp.param_dtype or config.model.dtype]
    return found


def _kv_bytes_per_token(model: Mapping[str, Any], element: int) -> int:
    heads = model.get("num_attention_heads") or 1
    head_dim = model.get("head_dim") or model.get("hidden_size", 0) // heads
    return 2 * model.get("num_hidden_layers", 0) * (model.get("num_key_value_heads") or heads) * head_dim * element


def _row_bytes(config: Config) -> int:
    written = [
        (True, rows.ROLLOUT),
        (uses_reference(config), rows.REFERENCE),
        (uses_critic(config), rows.VALUE),
        (uses_policy_scores(config), rows.POLICY),
        (True, rows.ADVANTAGE),
    ]
    per_token = sum(
        column.type.value_type.bit_width // 8
        for used, columns in written
        for column in columns
        if used and pa.types.is_list(column.type) and column.type != rows.RUNS
    )
    responses = config.data.train_batch_size * (config.rollout.n + uses_baselines(config))
    prompt_bytes = config.data.max_prompt_length * rows.INTS.value_type.bit_width // 8
    return responses * (prompt_bytes + config.data.max_response_length * per_token)


def shown(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
