"""Check that the models of a run can be divided as `actor.parallel` sets, from their `config.json`."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import Config
from pipeline.config.bounds import sentences
from pipeline.derived import shards_reference, shards_teacher, uses_critic, uses_engines
from pipeline.errors import short_reason
from pipeline.models.architecture import why_padded
from pipeline.plan.models import ModelFiles, read_model

HEADS = ("num_attention_heads", "num_key_value_heads", "vocab_size")
"""Keys of `config.json` with the sizes that tensor parallelism divides."""


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence per problem with `actor.parallel`, for the number of train workers and for each model."""
    parallel, workers = config.actor.parallel, config.trainer.num_workers
    size = parallel.ranks_with_same_rows * parallel.replicate
    if size < 1 or parallel.expert < 1:
        return
    if workers % size:
        yield (
            "actor.parallel.tensor x actor.parallel.sequence x actor.parallel.pipeline x actor.parallel.replicate = "
            f"{parallel.tensor} x {parallel.sequence} x {parallel.pipeline} x {parallel.replicate} = {size} must "
            f"divide trainer.num_workers={workers}; make it a multiple of {size}"
        )
    if parallel.sequence > 1 and config.model.attn_implementation != "sdpa":
        yield (
            f"actor.parallel.sequence={parallel.sequence} needs model.attn_implementation=sdpa, not "
            f"{config.model.attn_implementation}; choose sdpa, which uses the kernel of flash attention if it is "
            "available"
        )
    if parallel.tensor > 1 and config.model.lora.rank:
        yield (
            f"model.lora.rank={config.model.lora.rank} with actor.parallel.tensor={parallel.tensor}: adapters are not "
            "divided by tensor parallelism; set actor.parallel.tensor=1, which shards the base with FSDP"
        )
    if parallel.pipeline > 1 and config.actor.strategy != "megatron":
        yield from sentences(config, _not_in_stages(config))
    yield from _engines(config)
    divided = {
        "model.path": config.model.path,
        "critic.path": config.critic.path if uses_critic(config) else None,
        "scoring.reference.path": config.scoring.reference.path if shards_reference(config) else None,
        "teacher.path": config.teacher.path if shards_teacher(config) else None,
    }
    for key, path in divided.items():
        # Damaged folders are reported with all models of the run.
        with contextlib.suppress(ValueError):
            if path and (model := read_model(path)):
                yield from _model(config, key, path, model)


def _not_in_stages(config: Config) -> dict[str, object]:
    """Return sentences on settings that do not work with a pipeline, with true values if they are set."""
    stages = f"actor.parallel.pipeline={config.actor.parallel.pipeline}"
    return {
        f"{stages}: a critic cannot be cut into stages; choose an estimator without one, such as "
        "algorithm.adv_estimator=grpo, or set it to 1": uses_critic(config),
        f"{{model.lora.rank}} with {stages}: a model with adapters cannot be cut into stages; set one of them back": (
            config.model.lora.rank > 0
        ),
        f"{{actor.optim.name}} with {stages} and {{model.dtype}}: the two ends of a tied head would round differently; "
        "set actor.optim.name=adamw": config.actor.optim.name == "adamw_8bit" and config.model.dtype == "bfloat16",
        f"{{model.vision}} with {stages}: a model that reads images cannot be cut into stages; set it to 1": (
            config.model.vision != "none"
        ),
        f"{{rollout.replay_routes}} with {stages}: a router takes recorded experts in one micro-batch at a time, and "
        "stages have several; set one of them back": config.rollout.replay_routes,
    }


def _engines(config: Config) -> Iterator[str]:
    """Yield a sentence if engines cannot divide the heads of the model among their GPUs."""
    parts, path = config.rollout.tensor_parallel_size, config.model.path
    if parts < 2 or not path or not uses_engines(config):
        return
    with contextlib.suppress(ValueError):
        if model := read_model(path):
            queries, keys = (model.size(name) for name in HEADS[:2])
            # With more GPUs than key heads, each head is on several GPUs.
            if queries % parts or (keys % parts and parts % keys):
                yield (
                    f"rollout.tensor_parallel_size={parts} does not divide num_attention_heads={queries} and "
                    f"num_key_value_heads={keys} of model.path={path}; choose a divisor"
                )


def _model(config: Config, key: str, path: str, model: ModelFiles) -> Iterator[str]:
    """Yield one sentence per problem with dividing the model at `path`, which is the value of the setting `key`."""
    megatron = config.actor.strategy == "megatron"
    tensor, expert = config.actor.parallel.tensor, config.actor.parallel.expert
    parallel = config.actor.parallel
    if parallel.sequence > 1 or parallel.pipeline > 1:
        try:
            made = _transformers_config(model.config)
        except ValueError as error:
            yield f"transformers cannot read config.json of {key}={path}: {error}; give a complete model"
        else:
            # A model with its own code is checked by the trainer at its start.
            if made is not None:
                yield from _sequence(config, key, path, made)
                yield from _stages(config, key, path, model, made)
    named, experts = model.experts
    if expert > 1 and not experts:
        yield f"actor.parallel.expert={expert}, but {key}={path} has no experts; set it to 1"
    elif expert > 1 and experts % expert and not megatron:
        yield f"actor.parallel.expert={expert} does not divide the {experts} experts of {key}={path} ({named})"
    if tensor == 1:
        return
    if experts and expert == 1 and not megatron:
        yield (
            f"actor.parallel.tensor={tensor}, but {key}={path} has experts, whose weights must stay whole; set "
            f"actor.parallel.expert={tensor}"
        )
    for name in HEADS:
        count = model.config.get(name)
        if isinstance(count, int) and count % tensor:
            yield f"actor.parallel.tensor={tensor} does not divide {name}={count} of {key}={path}; choose a divisor"
    if not megatron and not _has_plan(model.config):
        yield (
            f"transformers has no plan for tensor parallelism of {key}={path}, a {model.config.get('model_type')}; set "
            "actor.parallel.tensor=1"
        )


def _transformers_config(config: Mapping[str, Any]) -> Any:
    """Return the configuration of `transformers` for the content of a `config.json`; None if its class is not known.

    Raises ValueError with the reason if the class does not take it.
    """
    # Takes seconds, so only runs that ask for sequence parallelism or stages wait for it.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return None
    try:
        return CONFIG_MAPPING[kind](**config)
    except Exception as error:
        # Each class has errors of its own.
        raise ValueError(short_reason(error)) from error


def _sequence(config: Config, key: str, path: str, made: Any) -> Iterator[str]:
    """Yield one sentence per problem with sequence parallelism of the model at `path`, which is the value of the
    setting `key`."""
    parallel = config.actor.parallel
    sequence, ranks = parallel.sequence, parallel.tensor * parallel.sequence
    if sequence == 1:
        return
    # Model families have other names and defaults for the number of heads.
    name, text = "num_attention_heads", made.get_text_config()
    heads = getattr(text, name, None)
    # If `tensor` does not divide the heads, `_model` reports it.
    if isinstance(heads, int) and heads % parallel.tensor == 0 and heads % ranks:
        size = f"actor.parallel.sequence={sequence}"
        if parallel.tensor > 1:
            size = f"actor.parallel.tensor x actor.parallel.sequence = {parallel.tensor} x {sequence} = {ranks}"
        yield f"{size} does not divide {name}={heads} of {key}={path}; choose a divisor"
    if reason := why_padded(text):
        yield (
            f"actor.parallel.sequence={sequence} divides packed rows, which {key}={path} cannot take: {reason}; set it "
            "to 1"
        )


def _stages(config: Config, key: str, path: str, model: ModelFiles, made: Any) -> Iterator[str]:
    """Yield one sentence per problem with cutting the model at `path`, which is the value of the setting `key`."""
    stages = config.actor.parallel.pipeline
    if stages == 1:
        return
    layers = model.config.get("num_hidden_layers")
    if isinstance(layers, int) and layers < stages:
        few = f"{layers} layer{'s' * (layers > 1)}"
        yield f"actor.parallel.pipeline={stages}, but {key}={path} has only {few}; choose fewer stages"
    from transformers import AutoModelForCausalLM

    from pipeline.models.stages import why_whole

    reason = why_padded(made.get_text_config())
    if reason := f"its rows are padded: {reason}" if reason else why_whole(made, AutoModelForCausalLM.from_config):
        yield f"actor.parallel.pipeline={stages}: {key}={path} cannot be cut into stages: {reason}; set it to 1"


def _has_plan(config: Mapping[str, Any]) -> bool:
    """Return True if `transformers` has a tensor-parallel plan for this configuration class, or does not know the
    class."""
    # Takes seconds, so only runs that ask for tensor parallelism wait for it.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    return kind not in CONFIG_MAPPING or bool(getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None))
