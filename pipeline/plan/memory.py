"""Memory estimates of a run, from the headers of the models' files, before anything is loaded."""

from dataclasses import dataclass, field

import pyarrow as pa

from pipeline import rows
from pipeline.config import Config
from pipeline.config.learner import FSDPConfig, OptimConfig
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
    """Estimate in bytes, per process unless the field names another unit."""

    parameters: int
    """Number of parameters of the model."""
    train_weights: int
    train_gradients: int
    train_optimizer: int
    train_logits: int
    train_critic: int | None
    """Weights, gradients and optimiser of the critic; 0 without one, None if its folder is not known."""
    engine_weights: int
    """Weights of an engine, per GPU."""
    engine_kv_needed: int
    """KV cache for `rollout.max_num_seqs` sequences of full length at the same time, per GPU."""
    rows: int
    """All token columns of one iteration in the object store."""
    scorer_weights: dict[str, int | None] = field(default_factory=dict)
    """Weights of one replica of each scoring pool; None if its folder is not known."""
    train_versions: int = 0
    """Copies of the weights in the train worker's memory that engines read."""
    adapter: int = 0
    """Number of parameters of the policy's adapter; 0 without one."""
    offload: str = "none"
    """Value of `actor.fsdp.offload`."""
    critic_offload: str = "none"
    """Value of `critic.fsdp.offload`."""
    critic_weights: int = 0
    """Weights of the critic, without gradients and optimiser."""
    critic_optimizer: int = 0
    """Optimiser state of the critic."""
    train_reference: int | None = 0
    """Weights of a reference in the train workers; 0 without one, None if its folder is not known."""
    reference_offload: bool = False
    """Value of `scoring.reference.offload`."""
    train_gathered: int = 0
    """Largest all-gathered weights of a train worker, and their gradients before the reduction."""
    train_activations: int = 0
    """Activations of a pass of `actor.ppo_max_token_len_per_gpu` tokens on the GPU, kept for its backward pass."""
    version: int = 0
    """Weights of one policy version on the way to the engines."""
    train_kept: int = 0
    """Activations of a pass in host memory, with `model.activation_offload`."""

    @property
    def train_peak(self) -> int:
        """Peak bytes of one train worker, without its state in host memory."""
        return self.train_worker + self.train_gathered + self.train_activations

    @property
    def train_idle(self) -> int:
        """Bytes of one train worker between two updates."""
        return self.train_worker - self.train_logits

    @property
    def train_worker(self) -> int:
        """Bytes of one train worker outside of a pass, without its state in host memory."""
        actor = self.train_weights + self.train_gradients + self.train_optimizer + self.train_logits
        others = (self.train_critic or 0) + (self.train_reference or 0)
        return actor + self.train_versions + others - self.offloaded

    @property
    def offloaded(self) -> int:
        """Bytes of one train worker that wait in host memory."""
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
        """Bytes of a train worker's part of a checkpoint: trained weights and optimiser."""
        # What is trained has as many bytes as its gradients.
        critic = (self.train_critic or 0) - self.critic_weights
        return self.train_gradients + self.train_optimizer + critic


@dataclass(frozen=True)
class Models:
    """Models of a run; None if one is not a local folder with safetensors files."""

    policy: ModelFiles
    critic: ModelFiles | None
    """The critic, with its value head."""
    reference: ModelFiles | None
    reward: ModelFiles | None


def read_models(config: Config) -> Models | None:
    """Read the run's models; None if `model.path` is not a local folder with safetensors files.

    Raises:
        ValueError: a file is damaged.
    """
    policy, critic, reference = _with_weights(config.model.path), config.critic.path, config.scoring.reference.path
    if policy is None:
        return None
    valued = _with_weights(critic) if critic else policy
    return Models(
        policy,
        critic=valued and valued.with_value_head(),
        reference=_with_weights(reference) if reference else policy,
        reward=_with_weights(config.reward.model.path),
    )


def estimate(config: Config, models: Models) -> Memory:
    """Estimate the memory of a run with these models."""
    model, critic, reference, reward_model = models.policy, models.critic, models.reference, models.reward
    # Workers that divide one copy of the weights.
    rollout, parallel = config.rollout, config.actor.parallel
    workers = max(1, config.trainer.num_workers // parallel.replicate)
    element, engine_element = BYTES[config.model.dtype], BYTES[rollout.dtype]
    tokens = config.data.longest_row
    shard = model.parameters * element // workers
    lora = config.model.lora
    versions = config.algorithm.max_staleness + 2 if config.trainer.weight_transport == "nixl" else 0
    critic_weights = 0 if critic is None else critic.parameters * element // workers
    of_critic = _learner(lora, config.critic.optim, critic or model, critic_weights, element, workers)
    of_actor = _learner(lora, config.actor.optim, model, shard, element, workers)
    train_critic = None if critic is None else sum(of_critic)
    replicas = {
        "reward_model": None if reward_model is None else reward_model.parameters,
        "reference": None if reference is None else reference.parameters,
        "value": None if critic is None else critic.parameters,
        "policy": model.parameters,
    }
    scorer_weights: dict[str, int | None] = {}
    for name, scorer in scorers(config).items():
        fsdp = (config.critic if name == "value" else config.actor).fsdp
        parameters = replicas[name]
        dtype = scoring_model(config.model, scorer, fsdp).dtype
        scorer_weights[name] = None if parameters is None else parameters * BYTES[dtype]
    activations, kept = _activations(config, model)
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
        train_logits=3 * 4 * config.actor.logits_chunk_tokens * model.size("vocab_size") // parallel.tensor,
        train_critic=train_critic if uses_critic(config) else 0,
        engine_weights=model.parameters * engine_element // rollout.tensor_parallel_size,
        engine_kv_needed=kv_bytes_per_token(model, config) * tokens * rollout.max_num_seqs,
        rows=_row_bytes(config),
        scorer_weights=scorer_weights,
        train_versions=versions * model.parameters * engine_element // workers,
        adapter=adapter.count(lora, model.matrices),
        offload=config.actor.fsdp.offload,
        critic_offload=config.critic.fsdp.offload if uses_critic(config) else "none",
        critic_weights=of_critic[0] if uses_critic(config) else 0,
        critic_optimizer=of_critic[2] if uses_critic(config) else 0,
        version=4 * adapter.count(lora, model.matrices) if lora.alone else model.parameters * engine_element,
        train_gathered=_gathered(config, model),
        train_activations=activations - kept,
        train_kept=kept,
        train_reference=train_reference,
        reference_offload=config.scoring.reference.offload,
    )


def compute_element(config: Config, fsdp: FSDPConfig) -> int:
    """Return the bytes per number in the computation of a train worker."""
    return BYTES[fsdp.compute_dtype(config.model.dtype, config.trainer.use_gpu)]


def _gathered(config: Config, model: ModelFiles) -> int:
    """Return the peak bytes of all-gathered weights and gradients over the three phases of a step.

    The head is gathered throughout, with a tied embedding. The phases add to it:
    - at the beginning of a pass, an embedding that is not tied;
    - in the backward pass, the current layer with the next one (or all layers), and gradients of head and layer;
    - at the end, the gradients of head and embeddings.
    One of these gradients has a second copy, converted for the sum over workers.
    """
    fsdp, tensor = config.actor.fsdp, config.actor.parallel.tensor
    element, summed = compute_element(config, fsdp), BYTES[fsdp.reduce_dtype]
    head, layer = model.tables - model.embedding, model.layer
    layers, kept = (2 * layer, 0) if fsdp.reshard_after_forward else (layer * model.layers, model.embedding)
    moments = [(head + max(layers + kept, model.embedding)) * element]
    if not config.model.lora.rank:
        moments.append((2 * head + layers + kept + layer) * element + layer * summed)
        moments.append((kept + model.tables) * element + max(head, model.embedding) * summed)
    return max(moments) // tensor


def _activations(config: Config, model: ModelFiles) -> tuple[int, int]:
    """Return the bytes that a pass of one worker keeps: in all, and in layer inputs, which may wait in host memory.

    Per token, a layer keeps six times its input (norms, residuals, projections); four times the queries, keys with
    values and feed-forward width; inputs and outputs of experts; and two norms in float32. This is 94 to 106 % of the
    bytes that torch saves in layers of Qwen3 and Qwen3-MoE.
    """
    element, tensor = compute_element(config, config.actor.fsdp), config.actor.parallel.tensor
    tokens, width = config.actor.ppo_max_token_len_per_gpu, model.size("hidden_size")
    divided = 4 * (model.queries + model.keys + model.intermediate) + 2 * model.routes * width
    layer = tokens * (element * (6 * width + divided // tensor) + 2 * 4 * width)
    if not config.model.enable_gradient_checkpointing:
        return model.layers * layer, 0
    inputs = tokens * element * width * model.layers
    return inputs + layer, inputs if config.model.activation_offload else 0


def _learner(
    lora: LoraConfig, optim: OptimConfig, model: ModelFiles, shard: int, element: int, workers: int
) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimiser state of a worker with `shard` bytes of base weights.

    Adapters, their gradients and their optimiser states are float32; a frozen base has no gradients.
    """
    if not lora.rank:
        return shard, shard, _averages(optim, shard, element)
    trained = 4 * adapter.count(lora, model.matrices) // workers
    return shard + trained, trained, _averages(optim, trained, 4)


def _averages(optim: OptimConfig, weights: int, element: int) -> int:
    """Return the bytes of AdamW's state for `weights` bytes of weights with `element` bytes each.

    The state has two averages in float32, and for a bfloat16 weight the lower half of its float32 value.
    """
    if optim.name == "adamw":
        return (2 * 4 + 4 - element) * weights // element
    # A byte a number, and a scale of four bytes for 256 of them.
    return 2 * (weights // element) * (256 + 4) // 256


def _with_weights(path: str | None) -> ModelFiles | None:
    model = read_model(path)
    return model if model and model.parameters else None


def kv_bytes_per_token(model: ModelFiles, config: Config) -> int:
    """Return the bytes of KV cache per token on each GPU of an engine."""
    rollout = config.rollout
    parts = min(rollout.tensor_parallel_size, model.size("num_key_value_heads", model.size("num_attention_heads", 1)))
    return 2 * model.size("num_hidden_layers") * model.keys * BYTES[rollout.dtype] // max(1, parts)


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
