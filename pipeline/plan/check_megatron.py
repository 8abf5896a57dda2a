"""Check the settings of a run that Megatron's layers train (`actor.strategy=megatron`)."""

from collections.abc import Iterator
from importlib import metadata

from pipeline.config import Config
from pipeline.config.bounds import sentences
from pipeline.derived import shards_reference, shards_teacher, uses_critic
from pipeline.megatron.settings import FAMILIES, MISSING, VERSION, unknown
from pipeline.plan.models import ModelFiles, read_model

NEEDS_GPU = True
"""False in tests that run Megatron on CPUs."""


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence per problem with `actor.strategy=megatron`."""
    if config.actor.strategy != "megatron":
        return
    if not config.trainer.use_gpu and NEEDS_GPU:
        yield (
            "actor.strategy=megatron needs GPUs, since Megatron runs on nothing else; set trainer.use_gpu=true, or "
            "actor.strategy=fsdp"
        )
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        yield MISSING
    else:
        if found.partition("+")[0] != VERSION:
            yield f"megatron-core {found} is here, and actor.strategy=megatron is proven with {VERSION}; install that"
    yield from sentences(config, _settings(config))
    path = config.model.path
    if path and (model := read_model(path)):
        yield from _model(config, path, model)


def _settings(config: Config) -> dict[str, object]:
    """Return sentences on settings that do not work with Megatron, with true values if they are set."""
    actor, model, parallel = config.actor, config.model, config.actor.parallel
    with_ = "with actor.strategy=megatron"
    return {
        f"a critic {with_}: only the policy can be of Megatron's layers; choose an estimator without one, such as "
        "algorithm.adv_estimator=grpo, or actor.strategy=fsdp": uses_critic(config),
        f"{{model.lora.rank}} {with_}: it trains no adapters; set one of them back": model.lora.rank > 0,
        f"{{model.vision}} {with_}: it reads no images; set actor.strategy=fsdp": model.vision != "none",
        f"{{rollout.replay_routes}} {with_}: its routers take no recorded experts; set one of them back": (
            config.rollout.replay_routes
        ),
        f"{{model.activation_offload}} {with_}: it keeps activations on the GPU; set it to false": (
            model.activation_offload
        ),
        f"{{model.trust_remote_code}} {with_}: it computes the families {', '.join(FAMILIES)} and no code of a model's "
        "folder; set it to false": model.trust_remote_code,
        f"{{actor.optim.name}} {with_}: its optimiser is AdamW; set it to adamw": actor.optim.name != "adamw",
        f"{{actor.fsdp.offload}} {with_}: its state stays on the GPU; set it to none": actor.fsdp.offload != "none",
        f"{{actor.fsdp.reduce_dtype}} {with_}: gradients are summed in float32; leave it out": (
            actor.fsdp.reduce_dtype != "float32"
        ),
        f"{{actor.fsdp.reshard_after_forward}} {with_}: every rank keeps its weights; leave it out": (
            not actor.fsdp.reshard_after_forward
        ),
        f"{{model.attn_implementation}} {with_}: it attends over packed rows with sdpa; set it to sdpa": (
            model.attn_implementation != "sdpa"
        ),
        f"{{actor.parallel.replicate}} {with_}: every rank keeps its weights, so copies need no setting; set it to 1": (
            parallel.replicate > 1
        ),
        f"{{scoring.reference.placement}} {with_}: only replicas can hold the reference; set it to replicas": (
            shards_reference(config)
        ),
        f"{{teacher.placement}} {with_}: only replicas can hold the teacher; set it to replicas": (
            shards_teacher(config)
        ),
    }


def _model(config: Config, path: str, model: ModelFiles) -> Iterator[str]:
    """Yield one sentence per problem with the model at `path`."""
    if reasons := list(unknown({**model.config, "model_type": model.family or model.config.get("model_type")})):
        yield (
            f"actor.strategy=megatron cannot compute model.path={path}: {'; '.join(reasons)}; set actor.strategy=fsdp"
        )
        return
    parallel, workers = config.actor.parallel, config.trainer.num_workers
    if model.layers % parallel.pipeline:
        yield (
            f"actor.parallel.pipeline={parallel.pipeline} does not divide the {model.layers} layers of "
            f"model.path={path}, which Megatron's stages share evenly; choose a divisor"
        )
    named, experts = model.experts
    if parallel.expert > 1 and experts:
        if experts % parallel.expert:
            yield f"actor.parallel.expert={parallel.expert} does not divide the {experts} experts ({named}) of {path}"
        stage = workers // max(1, parallel.pipeline)
        if stage % parallel.expert:
            yield (
                f"actor.parallel.expert={parallel.expert} does not divide the {stage} workers of a stage "
                "(trainer.num_workers / actor.parallel.pipeline); choose a divisor"
            )
