"""Estimate the memory of a run from the headers of the models' files, before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from pipeline import rows
from pipeline.config import Config
from pipeline.config.learner import FSDPConfig, OptimConfig
from pipeline.config.model import LoraConfig
from pipeline.derived import (
    most_contexts,
    reads_teacher,
    scorers,
    scoring_model,
    shards_reference,
    shards_teacher,
    teachers,
    uses_baselines,
    uses_critic,
    uses_distillation,
    uses_images,
    uses_policy_scores,
    uses_reference,
)
from pipeline.models import adapter
from pipeline.plan.models import ModelFiles, read_model
from pipeline.plan.pipelining import megatron_bytes, stage_sizes

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Memory:
    """Estimated memory of a run. Numbers are bytes per process, unless the field says otherwise."""

    parameters: int
    """Number of parameters of the model."""
    train_weights: int
    train_gradients: int
    train_optimizer: int
    train_logits: int
    train_critic: int | None
    """Bytes of the critic's weights, gradients and optimiser state in one train worker; 0 without a critic, None if the
    size of its model is not known."""
    engine_weights: int
    """Bytes of an engine's weights, per GPU."""
    engine_kv_needed: int
    """Bytes of KV cache for `rollout.max_num_seqs` sequences of full length at the same time, per GPU."""
    rows: int
    """Bytes of all token columns of one iteration, in the object store."""
    scorer_weights: dict[str, int | None] = field(default_factory=dict)
    """Bytes of weights of one replica, by the name of the scoring pool; None if the size of the model is not known."""
    train_versions: int = 0
    """Bytes of the copies of the weights in a train worker's memory that engines read (transport `nixl`)."""
    adapter: int = 0
    """Number of parameters of the policy's adapter; 0 without an adapter."""
    offload: str = "none"
    """Value of `actor.fsdp.offload`."""
    critic_offload: str = "none"
    """Value of `critic.fsdp.offload`."""
    critic_weights: int = 0
    """Bytes of the critic's weights, without gradients and optimiser state."""
    critic_optimizer: int = 0
    """Bytes of the critic's optimiser state."""
    train_reference: int | None = 0
    """Bytes of a reference model's weights in one train worker; 0 without such a model, None if its size is not
    known."""
    reference_offload: bool = False
    """Value of `scoring.reference.offload`."""
    train_teacher: int | None = 0
    """Bytes of a teacher's weights in one train worker; 0 without such a teacher, None if its size is not known."""
    teacher_offload: bool = False
    """Value of `teacher.offload`."""
    train_gathered: int = 0
    """Peak bytes of all-gathered weights, with their gradients before the reduction, in one train worker."""
    train_activations: int = 0
    """Bytes of activations on the GPU that a forward pass of `actor.ppo_max_token_len_per_gpu` tokens keeps for its
    backward pass."""
    version: int = 0
    """Bytes of the weights of one policy version that are sent to the engines."""
    train_kept: int = 0
    """Bytes of the activations of a pass that are in host memory, with `model.activation_offload`."""
    stages: tuple[int, ...] = ()
    """Peak bytes of a train worker of each stage of a pipeline; () without one. The other numbers are of the stage with
    the largest peak."""

    @property
    def train_peak(self) -> int:
        """Peak bytes of one train worker on its device, without state that is offloaded to host memory."""
        return self.train_worker + self.train_gathered + self.train_activations

    @property
    def train_idle(self) -> int:
        """Bytes of one train worker on its device between two updates."""
        return self.train_worker - self.train_logits

    @property
    def train_worker(self) -> int:
        """Bytes of one train worker on its device, without gathered weights, activations and offloaded state."""
        actor = self.train_weights + self.train_gradients + self.train_optimizer + self.train_logits
        others = (self.train_critic or 0) + (self.train_reference or 0) + (self.train_teacher or 0)
        return actor + self.train_versions + others - self.offloaded

    @property
    def offloaded(self) -> int:
        """Bytes of one train worker's state that is offloaded to host memory."""
        actor = {"optimizer": self.train_optimizer}
        actor["all"] = self.train_optimizer + self.train_weights + self.train_gradients
        critic = {"optimizer": self.critic_optimizer, "all": self.train_critic or 0}
        frozen = self.reference_offload * (self.train_reference or 0) + self.teacher_offload * (self.train_teacher or 0)
        return actor.get(self.offload, 0) + critic.get(self.critic_offload, 0) + frozen

    @property
    def train_start(self) -> int:
        """Bytes of host memory that a train worker needs at its start, to read its shards of all models."""
        return self.train_weights + self.critic_weights + (self.train_reference or 0) + (self.train_teacher or 0)

    @property
    def checkpoint(self) -> int:
        """Bytes of a train worker's part of a checkpoint: trained weights and optimiser state."""
        # Trained weights have as many bytes as their gradients.
        critic = (self.train_critic or 0) - self.critic_weights
        return self.train_gradients + self.train_optimizer + critic


@dataclass(frozen=True)
class Models:
    """Sizes of the models of a run. A model is None if it is not a local folder with safetensors files."""

    policy: ModelFiles
    critic: ModelFiles | None
    """The critic's model, with a value head instead of a language-model head."""
    reference: ModelFiles | None
    reward: ModelFiles | None
    teachers: Mapping[str, ModelFiles | None] = field(default_factory=dict)
    """The teachers by the names of their stages; `teacher` also for one in the train workers."""


def read_models(config: Config) -> Models | None:
    """Read the sizes of a run's models. Returns None if `model.path` is not a local folder with safetensors files.

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
        teachers={"teacher": _with_weights(config.teacher.path)}
        | {name: _with_weights(next(iter(pool.values())).path) for name, pool in teachers(config).items()},
    )


def estimate(config: Config, models: Models) -> Memory:
    """Estimate the memory of a run with the models `models`.

    Raises ValueError for fewer layers than stages.
    """
    found = [_estimate(config, models, stage) for stage in range(config.actor.parallel.pipeline)]
    peaks = tuple(memory.train_peak for memory in found)
    return replace(found[peaks.index(max(peaks))], stages=peaks if len(peaks) > 1 else ())


def _estimate(config: Config, models: Models, stage: int) -> Memory:
    """Estimate the memory of a run, with train workers of one stage of the pipeline."""
    model, critic, reference, reward_model = models.policy, models.critic, models.reference, models.reward
    # Number of workers that share one copy of the weights.
    rollout, parallel = config.rollout, config.actor.parallel
    workers = max(1, config.trainer.num_workers // (parallel.replicate * parallel.pipeline))
    size = stage_sizes(config, model)[stage]
    trained = size.model
    element, engine_element = BYTES[config.model.dtype], BYTES[rollout.dtype]
    tokens = config.data.longest_row
    shard = trained.parameters * element // workers
    lora = config.model.lora
    versions = config.algorithm.max_staleness + 2 if config.trainer.weight_transport == "nixl" else 0
    critic_weights = 0 if critic is None else critic.parameters * element // workers
    frozen = config.model.vision == "frozen"
    of_critic = _learner(lora, config.critic.optim, critic or model, critic_weights, element, workers, frozen)
    of_actor = _learner(lora, config.actor.optim, trained, shard, element, workers, frozen)
    train_critic = None if critic is None else sum(of_critic)
    replicas = {
        "reward_model": None if reward_model is None else reward_model.parameters,
        "reference": None if reference is None else reference.parameters,
        "value": None if critic is None else critic.parameters,
        "policy": model.parameters,
        **{name: None if teacher is None else teacher.parameters for name, teacher in models.teachers.items()},
    }
    scorer_weights: dict[str, int | None] = {}
    for name, scorer in scorers(config).items():
        fsdp = (config.critic if name == "value" else config.actor).fsdp
        parameters = replicas[name]
        dtype = scoring_model(config.model, scorer, fsdp).dtype
        scorer_weights[name] = None if parameters is None else parameters * BYTES[dtype]
    gathered = _gathered(config, trained)
    if config.actor.strategy == "megatron":
        of_actor, gathered = megatron_bytes(config, trained), 0
    activations, kept = (size.held * part for part in _activations(config, trained))

    def frozen_part(other: ModelFiles | None, dtype: str) -> int | None:
        parts = None if other is None else stage_sizes(config, other)
        return None if parts is None else parts[stage].model.parameters * BYTES[dtype] // workers

    train_reference: int | None = 0
    if shards_reference(config):
        gpu = config.trainer.use_gpu
        dtype = scoring_model(config.model, config.scoring.reference, config.actor.fsdp, gpu=gpu).dtype
        train_reference = frozen_part(reference, dtype)
    train_teacher: int | None = 0
    if shards_teacher(config):
        dtype = scoring_model(config.model, config.teacher, config.actor.fsdp, gpu=config.trainer.use_gpu).dtype
        train_teacher = frozen_part(models.teachers["teacher"], dtype)
    return Memory(
        parameters=model.parameters,
        train_weights=of_actor[0],
        train_gradients=of_actor[1],
        train_optimizer=of_actor[2],
        # Logits, their softmax and the gradient of both, in float32.
        train_logits=(stage == parallel.pipeline - 1)
        * (3 * 4 * config.actor.logits_chunk_tokens * model.size("vocab_size") // parallel.tensor),
        train_critic=train_critic if uses_critic(config) else 0,
        engine_weights=model.parameters * engine_element // rollout.tensor_parallel_size,
        engine_kv_needed=kv_bytes_per_token(model, config) * tokens * rollout.max_num_seqs,
        rows=_row_bytes(config, model),
        scorer_weights=scorer_weights,
        train_versions=versions * trained.parameters * engine_element // workers,
        adapter=adapter.count(lora, model.matrices),
        offload=config.actor.fsdp.offload,
        critic_offload=config.critic.fsdp.offload if uses_critic(config) else "none",
        critic_weights=of_critic[0] if uses_critic(config) else 0,
        critic_optimizer=of_critic[2] if uses_critic(config) else 0,
        version=4 * adapter.count(lora, model.matrices) if lora.alone else model.parameters * engine_element,
        train_gathered=gathered,
        train_activations=activations - kept,
        train_kept=kept,
        train_reference=train_reference,
        reference_offload=config.scoring.reference.offload,
        train_teacher=train_teacher,
        teacher_offload=config.teacher.offload,
    )


def compute_element(config: Config, fsdp: FSDPConfig) -> int:
    """Return the bytes per number in the forward and backward passes of a train worker."""
    return BYTES[fsdp.compute_dtype(config.model.dtype, config.trainer.use_gpu)]


def _gathered(config: Config, model: ModelFiles) -> int:
    """Return the peak bytes of all-gathered weights and gradients in one worker, over the three phases of a step.

    The head (with the embedding, if they are tied) is gathered throughout. Each phase adds to that:
    - at the beginning of a pass, an embedding that is not tied;
    - in the backward pass, the current layer and the next one (or all layers), and the gradients of head and layer;
    - at the end, the gradients of head and embeddings.
    One of these gradients has a second copy, converted to the dtype of the sum over workers.
    """
    fsdp, tensor = config.actor.fsdp, config.actor.parallel.tensor
    element, summed = compute_element(config, fsdp), BYTES[fsdp.reduce_dtype]
    head, layer = model.tables - model.embedding, model.layer
    layers, kept = (2 * layer, 0) if fsdp.reshard_after_forward else (layer * model.layers, model.embedding)
    moments = [(head + max(layers + kept, model.embedding)) * element]
    if not config.model.lora.rank:
        moments.append((2 * head + layers + kept + layer) * element + layer * summed)
        moments.append((kept + model.tables) * element + max(head, model.embedding) * summed)
    if config.actor.parallel.pipeline > 1 and not fsdp.reshard_after_forward and tensor == 1:
        # Gradients of a stage stay whole until the last micro-batch.
        return max(moments) + model.parameters * summed
    return max(moments) // tensor


def pass_tokens(config: Config) -> int:
    """Return the maximum number of tokens in a worker's forward pass: `actor.ppo_max_token_len_per_gpu`, or all tokens
    of the worker's rows in a mini-batch if they are fewer."""
    actor, data = config.actor, config.data
    groups = max(1, config.trainer.num_workers // actor.parallel.ranks_with_same_rows)
    rows = -(-(actor.ppo_mini_batch_size or data.train_batch_size) * config.rollout.n // groups)
    tokens = rows * most_contexts(config) * data.longest_row
    return min(actor.ppo_max_token_len_per_gpu, -(-tokens // actor.parallel.sequence))


def _activations(config: Config, model: ModelFiles) -> tuple[int, int]:
    """Return (bytes of activations that a forward pass of one worker keeps, bytes of these that are in host memory).

    Per token, a layer keeps six vectors of the hidden size (norms, residuals, projections); four times the widths of
    queries, keys and feed-forward network; inputs and outputs of experts; and two norms in float32. This is 94 to 106 %
    of the bytes that torch saves in layers of Qwen3 and Qwen3-MoE.
    """
    element, tensor = compute_element(config, config.actor.fsdp), config.actor.parallel.tensor
    tokens, width = pass_tokens(config), model.size("hidden_size")
    divided = 4 * (model.queries + model.keys + model.intermediate) + 2 * model.routes * width
    layer = tokens * (element * (6 * width + divided // tensor) + 2 * 4 * width)
    if not config.model.enable_gradient_checkpointing:
        return model.layers * layer, 0
    inputs = tokens * element * width * model.layers
    return inputs + layer, inputs if config.model.activation_offload else 0


def _learner(
    lora: LoraConfig,
    optim: OptimConfig,
    model: ModelFiles,
    shard: int,
    element: int,
    workers: int,
    frozen_tower: bool = False,
) -> tuple[int, int, int]:
    """Return the bytes of (weights, gradients, optimiser state) of one worker.

    Adapters, their gradients and their optimiser states are float32; a frozen base has no gradients.

    Args:
        lora: settings of adapters.
        optim: settings of the optimiser.
        model: sizes of the model.
        shard: bytes of base weights in one worker.
        element: bytes per number of the base weights.
        workers: number of workers that share one copy of the weights.
        frozen_tower: True if the vision tower is not trained.
    """
    if not lora.rank:
        trained = shard - frozen_tower * model.tower * element // workers
        return shard, trained, _averages(optim, trained, element)
    trained = 4 * adapter.count(lora, model.matrices) // workers
    return shard + trained, trained, _averages(optim, trained, 4)


def _averages(optim: OptimConfig, weights: int, element: int) -> int:
    """Return the bytes of AdamW's state for `weights` bytes of weights with `element` bytes each.

    The state has two averages in float32, and for a bfloat16 weight the lower half of its float32 value.
    """
    if optim.name == "adamw":
        return (2 * 4 + 4 - element) * weights // element
    # One byte per number, and one scale of four bytes per 256 numbers.
    return 2 * (weights // element) * (256 + 4) // 256


def _with_weights(path: str | None) -> ModelFiles | None:
    model = read_model(path)
    return model if model and model.parameters else None


def kv_bytes_per_token(model: ModelFiles, config: Config) -> int:
    """Return the bytes of KV cache that one token takes on each GPU of an engine."""
    rollout = config.rollout
    parts = min(rollout.tensor_parallel_size, model.size("num_key_value_heads", model.size("num_attention_heads", 1)))
    return 2 * model.size("num_hidden_layers") * model.keys * BYTES[rollout.dtype] // max(1, parts)


SUPPORTS = ("support", "support_sizes")
"""Columns that are null unless sampling is restricted."""


def _row_bytes(config: Config, model: ModelFiles) -> int:
    written = [
        (True, rows.ROLLOUT),
        (uses_reference(config), rows.REFERENCE),
        (reads_teacher(config), rows.TEACHER),
        (uses_critic(config), rows.VALUE),
        (uses_policy_scores(config), rows.POLICY),
        (True, rows.ADVANTAGE),
    ]
    per_token = sum(
        column.type.value_type.bit_width // 8
        for used, columns in written
        for column in columns
        if used and pa.types.is_list(column.type) and column.type != rows.RUNS and column.name not in SUPPORTS
    )
    if uses_distillation(config):
        per_token += 8 * config.actor.distill_top_k
    restricted, most = config.rollout.restrictions(), config.rollout.max_support
    if any(restricted.values()):
        # A number for each token and, with `min_tokens`, the few tokens that are left out.
        per_token += 4
    if restricted["top_p"] or restricted["top_k"] or restricted["min_p"]:
        per_token += 4 * (min(config.rollout.top_k, most) if restricted["top_k"] else most)
    responses = config.data.train_batch_size * (config.rollout.n + uses_baselines(config))
    prompts = most_contexts(config)
    images = uses_images(config) * config.data.max_image_bytes
    routes = 0
    if config.rollout.replay_routes:
        routes = model.size("num_hidden_layers") * model.routes * rows.ROUTES.value_type.bit_width // 8
    per_token += routes
    prompt_bytes = prompts * config.data.max_prompt_length * (rows.INTS.value_type.bit_width // 8 + routes) + images
    return responses * (prompt_bytes + config.data.max_response_length * per_token)


def shown(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
