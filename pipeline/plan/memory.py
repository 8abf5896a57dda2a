"""How much memory a run takes: estimates from the headers of the models' files, before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipeline import rows
from pipeline.config import Config
from pipeline.config.learner import OptimConfig
from pipeline.config.model import LoraConfig
from pipeline.derived import (
    most_contexts,
    scorers,
    scoring_model,
    shards_reference,
    uses_baselines,
    uses_critic,
    uses_policy_scores,
    uses_reference,
)
from pipeline.models import adapter
from pipeline.plan.models import ModelFiles, read_model

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    adapter: int = 0
    """Numbers of the policy's adapter (no bytes); 0 without one."""
    offload: str = "none"
    """`actor.fsdp.offload`."""
    critic_offload: str = "none"
    """`critic.fsdp.offload`."""
    critic_weights: int = 0
    """Weights of the critic alone."""
    critic_optimizer: int = 0
    """Optimiser state of the critic alone."""
    train_reference: int | None = 0
    """Weights of a reference in the train workers; 0 without one, None where its folder is not known."""
    reference_offload: bool = False
    """`scoring.reference.offload`."""

    @property
    def train_worker(self) -> int:
        """Bytes of one train worker without activations, and without what waits in host memory."""
        actor = self.train_weights + self.train_gradients + self.train_optimizer + self.train_logits
        others = (self.train_critic or 0) + (self.train_reference or 0)
        return actor + self.train_versions + others - self.offloaded

    @property
    def offloaded(self) -> int:
        """Bytes of it that wait in host memory."""
        actor = {"optimizer": self.train_optimizer}
        actor["all"] = self.train_optimizer + self.train_weights + self.train_gradients
        critic = {"optimizer": self.critic_optimizer, "all": self.train_critic or 0}
        reference = self.reference_offload * (self.train_reference or 0)
        return actor.get(self.offload, 0) + critic.get(self.critic_offload, 0) + reference

    @property
    def train_start(self) -> int:
        """Bytes of host memory in which a train worker reads its slices of the weights."""
        return self.train_weights + self.critic_weights + (self.train_reference or 0)

    @property
    def checkpoint(self) -> int:
        """Bytes of a train worker's part of a checkpoint: weights that are trained, and optimiser."""
        # What is trained has as many bytes as its gradients.
        critic = (self.train_critic or 0) - self.critic_weights
        return self.train_gradients + self.train_optimizer + critic


def estimate(config: Config) -> Memory | None:
    """The run's memory; None where `model.path` is not a local folder with safetensors files.

    Raises:
        ValueError: a file is damaged.
    """
    model = _with_weights(config.model.path)
    if model is None:
        return None
    critic = _with_weights(config.critic.path) if config.critic.path else model
    reference = _with_weights(config.scoring.reference.path) if config.scoring.reference.path else model
    reward_model = _with_weights(config.reward.model.path)
    # Workers that divide one copy of the weights.
    rollout, workers = config.rollout, max(1, config.trainer.num_workers // config.actor.parallel.replicate)
    element, engine_element = BYTES[config.model.dtype], BYTES[rollout.dtype]
    tokens = config.data.max_prompt_length + config.data.max_response_length
    shard = model.parameters * element // workers
    lora = config.model.lora
    versions = config.algorithm.max_staleness + 2 if config.trainer.weight_transport == "nixl" else 0
    critic_weights = 0 if critic is None else _decoder(critic) * element // workers
    of_critic = _learner(lora, config.critic.optim, critic or model, critic_weights, element, workers)
    of_actor = _learner(lora, config.actor.optim, model, shard, element, workers)
    train_critic = None if critic is None else sum(of_critic)
    replicas = {
        "reward_model": None if reward_model is None else reward_model.parameters,
        "reference": None if reference is None else reference.parameters,
        "value": None if critic is None else _decoder(critic),
        "policy": model.parameters,
    }
    scorer_weights: dict[str, int | None] = {}
    for name, scorer in scorers(config).items():
        fsdp = (config.critic if name == "value" else config.actor).fsdp
        parameters = replicas[name]
        dtype = scoring_model(config.model, scorer, fsdp).dtype
        scorer_weights[name] = None if parameters is None else parameters * BYTES[dtype]
    train_reference: int | None = 0
    if shards_reference(config):
        gpu = config.trainer.use_gpu
        dtype = scoring_model(config.model, config.scoring.reference, config.actor.fsdp, gpu=gpu).dtype
        train_reference = None if reference is None else reference.parameters * BYTES[dtype] // workers
    return Memory(
        parameters=model.parameters,
        train_weights=of_actor[0],
        train_gradients=of_actor[1],
        train_optimizer=of_actor[2],
        # Logits, their softmax and the gradient of both, in float32.
        train_logits=3 * 4 * config.actor.logits_chunk_tokens * model.config.get("vocab_size", 0),
        train_critic=train_critic if uses_critic(config) else 0,
        engine_weights=model.parameters * engine_element,
        engine_kv_needed=_kv_bytes_per_token(model.config, engine_element) * tokens * rollout.max_num_seqs,
        rows=_row_bytes(config),
        scorer_weights=scorer_weights,
        train_versions=versions * model.parameters * engine_element // workers,
        adapter=adapter.count(lora, model.matrices),
        offload=config.actor.fsdp.offload,
        critic_offload=config.critic.fsdp.offload if uses_critic(config) else "none",
        critic_weights=of_critic[0] if uses_critic(config) else 0,
        critic_optimizer=of_critic[2] if uses_critic(config) else 0,
        train_reference=train_reference,
        reference_offload=config.scoring.reference.offload,
    )


def _learner(
    lora: LoraConfig, optim: OptimConfig, model: ModelFiles, shard: int, element: int, workers: int
) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimiser state of a worker with `shard` bytes of the base's weights.

    Adapters are float32, and so are their gradients and optimiser states; a frozen base has none.
    """
    if not lora.rank:
        return shard, shard, _averages(optim, shard, element)
    trained = 4 * adapter.count(lora, model.matrices) // workers
    return shard + trained, trained, _averages(optim, trained, 4)


def _averages(optim: OptimConfig, weights: int, element: int) -> int:
    """Bytes of AdamW's two averages for weights of so many bytes, `element` each."""
    # A byte a number, and a scale of four bytes for 256 of them.
    return 2 * weights if optim.name == "adamw" else 2 * (weights // element) * (256 + 4) // 256


def _with_weights(path: str | None) -> ModelFiles | None:
    model = read_model(path)
    return model if model and model.parameters else None


def _decoder(model: ModelFiles) -> int:
    """Parameters of the critic: the model without the head of the language model, and the value head."""
    return model.parameters - model.head + model.config.get("hidden_size", 0) + 1


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
    prompts = most_contexts(config)
    prompt_bytes = prompts * config.data.max_prompt_length * rows.INTS.value_type.bit_width // 8
    return responses * (prompt_bytes + config.data.max_response_length * per_token)


def shown(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
