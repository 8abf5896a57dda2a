"""Sizes of the stages of a pipeline (`actor.parallel.pipeline`), and how much of the time they wait."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.config import Config
from pipeline.derived import (
    chunk_prompts,
    most_contexts,
    policy_loss,
    shards_teacher,
    streams_gradients,
    trains_beside_reference,
)
from pipeline.models.layers import deal_layers
from pipeline.plan.models import ModelFiles

BUSY = 4
"""Number of micro-batches for each stage below which a note names the bubble."""


@dataclass(frozen=True)
class StageSize:
    """Size of one stage."""

    number: int
    layers: range
    """Numbers of its layers."""
    model: ModelFiles
    """Sizes of the stage's part of the model."""
    held: int
    """Number of micro-batches whose activations it keeps at the same time."""


def stage_sizes(config: Config, model: ModelFiles) -> list[StageSize]:
    """Return the sizes of the stages of `model`; one, the whole model, without a pipeline.

    Raises ValueError for fewer layers than stages.
    """
    count = config.actor.parallel.pipeline
    if count == 1:
        return [StageSize(0, range(model.layers), model, 1)]
    # A tied head is on the last stage too.
    head = model.head or model.tables
    embedding = model.tables - model.head
    if config.actor.strategy == "megatron":
        bounds = [number * model.layers // count for number in range(count + 1)]
    else:
        bounds = deal_layers([model.layer] * model.layers, embedding, head, count)
    passes = micro_batches(config)
    sizes = []
    for number in range(count):
        layers = range(bounds[number], bounds[number + 1])
        tables = embedding * (number == 0) + head * (number == count - 1)
        part = replace(
            model,
            config={**model.config, "num_hidden_layers": len(layers)},
            parameters=len(layers) * model.layer + tables,
            tables=tables,
            head=head * (number == count - 1),
        )
        sizes.append(StageSize(number, layers, part, min(count - number, passes)))
    return sizes


def micro_batches(config: Config) -> int:
    """Return the largest number of micro-batches that pass through a pipeline one after the other: of the rows of a
    part of an iteration, or of a mini-batch if it is smaller, if all rows have their full length."""
    actor, batch = config.actor, config.data.train_batch_size
    prompts = actor.ppo_mini_batch_size or batch
    if streams_gradients(config):
        prompts = min(prompts, chunk_prompts(config) * config.trainer.num_workers)
    return max(1, math.ceil(_tokens(config, prompts) / (actor.ppo_max_token_len_per_gpu * actor.parallel.sequence)))


def _tokens(config: Config, prompts: int) -> int:
    """Return the number of tokens that the ranks with the same rows get of `prompts` prompts, if all rows have their
    full length."""
    groups = max(1, config.trainer.num_workers // config.actor.parallel.ranks_with_same_rows)
    return max(1, prompts * config.rollout.n // groups) * most_contexts(config) * config.data.longest_row


def bubble(stages: int, passes: int) -> float:
    """Return the fraction of the time of an update in which a stage waits: (S - 1) / (m + S - 1) for S stages and m
    micro-batches."""
    return (stages - 1) / (passes + stages - 1)


def sent_bytes(config: Config, width: int, element: int) -> int:
    """Return the largest number of bytes of hidden states and their gradients that a rank sends in an iteration, if all
    rows have their full length.

    Args:
        config: the settings.
        width: hidden size.
        element: bytes of a number.
    """
    actor, tokens = config.actor, _tokens(config, config.data.train_batch_size)
    loss = policy_loss(config)
    # A loss that chooses tokens, or compares pairs, has a forward pass before each step.
    before = actor.ppo_epochs * (loss.token_mask_fn is not None or loss.of_pairs)
    before += (actor.old_log_probs == "recompute") + trains_beside_reference(config) + shards_teacher(config)
    stages = range(actor.parallel.pipeline)
    passes = actor.ppo_epochs + before
    return max(hidden_bytes(config, tokens, width, element, stage, passes, actor.ppo_epochs) for stage in stages)


def hidden_bytes(config: Config, tokens: int, width: int, element: int, stage: int, passes: int, trained: int) -> int:
    """Return the number of bytes of hidden states, and of their gradients, that a rank of a stage sends.

    Args:
        config: the settings.
        tokens: number of positions in the micro-batches of a pass, over the ranks of a sequence group.
        width: hidden size.
        element: bytes of a number.
        stage: number of the stage.
        passes: number of forward passes over the tokens.
        trained: number of these with a backward pass.
    """
    parallel = config.actor.parallel
    own = tokens // parallel.sequence * width * element
    if config.actor.strategy == "megatron":
        # Its tensor ranks have a part of the positions between layers.
        own //= parallel.tensor
    return own * (passes * (stage < parallel.pipeline - 1) + trained * (stage > 0))


def megatron_bytes(config: Config, model: ModelFiles) -> tuple[int, int, int]:
    """Return the bytes of (weights, gradients, optimiser state) of a train worker of Megatron.

    A rank keeps its part of the stage's weights, and gradients of these in float32. The ranks with the same part divide
    AdamW's averages and, of weights that are not float32, the float32 masters.

    Args:
        config: the settings.
        model: sizes of a stage.
    """
    parallel = config.actor.parallel
    half = config.actor.fsdp.compute_dtype(config.model.dtype, config.trainer.use_gpu) != "float32"
    ranks = max(1, config.trainer.num_workers // parallel.pipeline)
    width = model.size("moe_intermediate_size", model.size("intermediate_size"))
    experts = min(model.parameters, 3 * model.experts[1] * model.size("hidden_size") * width * model.layers)
    own = {parallel.tensor: model.parameters - experts}
    own[parallel.expert] = own.get(parallel.expert, 0) + experts
    held = sum(count // parts for parts, count in own.items())
    divided = sum(count // parts // max(1, ranks // parts) for parts, count in own.items())
    return (2 if half else 4) * held, 4 * held, (12 if half else 8) * divided


def bubbles(config: Config) -> Iterator[str]:
    """Yield a sentence if the pipeline has few micro-batches, so that its stages wait."""
    stages, passes = config.actor.parallel.pipeline, micro_batches(config)
    if stages > 1 and passes < BUSY * stages:
        part, remedy = "", "a lower actor.ppo_max_token_len_per_gpu gives more"
        if streams_gradients(config):
            part = ", of a part of an iteration,"
            remedy = f"trainer.stream_gradients=false, or {remedy}"
        yield (
            f"actor.parallel.pipeline={stages} has at most {passes} micro-batch{'es' * (passes > 1)}{part} at a time, "
            f"so each stage waits for at least {bubble(stages, passes):.0%} of an update; with {BUSY * stages} it "
            f"would be {bubble(stages, BUSY * stages):.0%}: {remedy}"
        )
