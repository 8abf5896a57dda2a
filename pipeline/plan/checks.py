"""Check that the settings of a run fit together, before anything is started.

All problems are reported at once. Each is one sentence that names the keys, shows the arithmetic and gives the remedy.
CPUs and GPUs are checked elsewhere, in `placement.check_resources`. Torch, Ray and vLLM are not imported.
"""

import math
from collections.abc import Iterator

from pipeline.advantage.estimators import get_adv_estimator
from pipeline.config import Config, ConfigError
from pipeline.config.bounds import sentences, violations
from pipeline.config.learner import ActorConfig, CriticConfig
from pipeline.config.mappings import compose_sections
from pipeline.derived import (
    chunk_prompts,
    most_contexts,
    needs_whole_rows,
    replicas,
    scorer_key,
    uses_critic,
    uses_engines,
)
from pipeline.plan import (
    check_agent,
    check_algorithm,
    check_engine,
    check_images,
    check_megatron,
    check_offload,
    check_reward,
    check_teacher,
    models,
    parallel,
)
from pipeline.prompts.generator import generator_class
from pipeline.prompts.sampler import Sampler, sampler_class
from pipeline.replay import checks as replay
from pipeline.sampling import stop_problem
from pipeline.storage.filesystem import check_scheme

ENGINE_LORA = ("enable_lora", "max_loras", "max_lora_rank", "load_format")
"""Arguments of vLLM that Slipstream sets if engines get an adapter."""


def check(config: Config) -> None:
    """Refuse a config that cannot be run.

    Raises:
        ConfigError: one sentence per problem found.
    """
    found = list(_problems(config))
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError(f"{len(found)} settings cannot be run:\n" + "\n".join(f"- {problem}" for problem in found))


def _problems(config: Config) -> Iterator[str]:
    single = list(violations(config))
    yield from single
    outside = [sentence.partition(" must be ")[0] for sentence in single]
    # A sentence that quotes a value outside of its bounds is only a consequence of that value.
    yield from (text for text in _combined(config, not single) if not any(value in text for value in outside))


def _combined(config: Config, in_bounds: bool) -> Iterator[str]:
    """Yield one sentence per problem of settings that do not fit together.

    Args:
        config: the settings.
        in_bounds: True if each setting lies within its own bounds; else the sizes of batches are not checked.
    """
    try:
        compose_sections(config)
    except ValueError as error:
        yield str(error)
        return
    for section in (config.algorithm, config.actor, config.trainer, config.model.lora):
        yield from sentences(config, section.problems())
    if uses_engines(config):
        yield from sentences(config, config.rollout.problems())
        yield from check_engine.problems(config)
    yield from sentences(config, _sections(config))
    yield from _prompts(config)
    yield from check_reward.problems(config)
    yield from check_agent.problems(config)
    yield from replay.problems(config)
    yield from check_algorithm.problems(config)
    yield from check_teacher.problems(config)
    try:
        get_adv_estimator(config.algorithm.adv_estimator)
    except ValueError as error:
        yield str(error)
        return
    learners = {"actor.": (config.actor.optim, config.actor.fsdp)}
    if uses_critic(config):
        learners["critic."] = config.critic.optim, config.critic.fsdp
    yield from sentences(config, check_offload.problems(config.model, learners, config.trainer.use_gpu))
    yield from models.problems(config)
    yield from check_images.problems(config)
    yield from parallel.problems(config)
    yield from check_megatron.problems(config)
    if in_bounds:
        # The arithmetic divides by values that are positive within their bounds.
        yield from _batches(config)


def _sections(config: Config) -> dict[str, object]:
    """Return sentences on settings of two sections that exclude each other, each with a true value if it applies."""
    data, rollout, algorithm, trainer = config.data, config.rollout, config.algorithm, config.trainer
    engines, groups = uses_engines(config), algorithm.filter_groups
    stop = stop_problem(rollout.stop)
    scheme = ""
    try:
        check_scheme(trainer.storage_path or ".")
    except ValueError as error:
        scheme = str(error)
    on, alone = "{algorithm.filter_groups.enable}", "{model.lora.weight_sync}"
    adapter = config.model.lora.alone
    engine_kwargs = [name for name in ENGINE_LORA if name in rollout.engine_kwargs]
    return {
        f"{alone} and {{trainer.weight_transport}}: an adapter is small and travels through the object store; leave "
        "trainer.weight_transport out": adapter and trainer.weight_transport != "object_store",
        f"rollout.engine_kwargs.{', '.join(engine_kwargs)} is set by model.lora; leave it out": (
            adapter and engine_kwargs
        ),
        "data.train_files is not set; give the files of the training prompts, or a data.generator": (
            not data.train_files and data.generator is None and engines
        ),
        "{trainer.test_freq} needs validation prompts, but data.val_files is not set; give files or set test_freq=-1": (
            trainer.test_freq > 0 and not data.val_files and engines
        ),
        "{rollout.sleep} with {algorithm.max_staleness}: engines that generate ahead cannot sleep while the trainer "
        "computes; set sleep=false or max_staleness=0": rollout.sleep and algorithm.max_staleness > 0 and engines,
        "{rollout.min_tokens} is above {data.max_response_length}; lower it": rollout.min_tokens
        > data.max_response_length,
        f"rollout.stop {stop}; it must be a list of texts that end a response": stop,
        f"trainer.storage_path: {scheme}": scheme,
        f"{on} and {{data.recorded_run}}: a replay has only the groups of its recording; set the first to false": (
            groups.enable and not engines
        ),
        f"{on} compares the responses of a group, but {{rollout.n}}; set rollout.n to 2 or more": (
            groups.enable and rollout.n == 1
        ),
        f"{on} needs a varying number of prompts, but data.generator makes exactly one iteration's; use one of them": (
            groups.enable and data.generator is not None
        ),
        f"{on} and {{data.sampler}}, which learns from recorded rows, but groups with equal rewards are not recorded; "
        "use one of them": (groups.enable and data.sampler == "solve_rate"),
    }


def _prompts(config: Config) -> Iterator[str]:
    data = config.data
    sampler, by_source = None, False
    try:
        sampler = sampler_class(data.sampler)
        by_source = sampler.shares is not Sampler.shares
    except ValueError as error:
        yield str(error)
    if data.generator is not None:
        try:
            generator_class(data.generator)
        except ValueError as error:
            yield str(error)
    weights = data.source_weights.values()
    usable = all(weight >= 0 and math.isfinite(weight) for weight in weights) and sum(weights) > 0
    only_generated = data.generator is not None and not data.train_files
    table = {
        "data.source_weights does nothing with {data.sampler}; set data.sampler=weighted": (
            sampler and weights and not by_source
        ),
        "{data.sampler} needs data.source_weights, such as 'data.source_weights={countdown: 0.7, gsm8k: 0.3}'": (
            data.sampler == "weighted" and not weights
        ),
        "{data.source_weights}: weights must be at least 0, and one of them above 0": weights and not usable,
        "{data.sampler_kwargs} does nothing with {data.sampler}": data.sampler_kwargs and sampler is Sampler,
        "{data.generator_kwargs} does nothing without data.generator": data.generator_kwargs and not data.generator,
        "{data.generator} without data.train_files has no epochs to count; set trainer.total_training_steps": (
            only_generated and config.trainer.total_training_steps is None
        ),
        "{data.sampler} chooses among the prompts of data.train_files, which is not set; set data.sampler=uniform": (
            only_generated and data.sampler != "uniform"
        ),
    }
    yield from sentences(config, table)


def _batches(config: Config) -> Iterator[str]:
    batch, chunk, workers = config.data.train_batch_size, chunk_prompts(config), config.trainer.num_workers
    chunks, rest = divmod(batch, chunk)
    if rest:
        yield (
            f"data.train_batch_size={batch} is not a whole number of chunks: {batch} = {chunks} x "
            f"rollout.chunk_prompts={chunk} + {rest}; {_neighbours(batch, chunk)}"
        )
    elif chunks % workers:
        yield (
            f"an iteration has data.train_batch_size / rollout.chunk_prompts = {batch} / {chunk} = {chunks} chunks, "
            f"which trainer.num_workers={workers} cannot share evenly; {_neighbours(batch, chunk * workers)}"
        )
    learners: dict[str, ActorConfig | CriticConfig] = {"actor": config.actor}
    if uses_critic(config):
        learners["critic"] = config.critic
    passes: dict[str, int] = {}
    for name, learner in learners.items():
        if learner.ppo_max_token_len_per_gpu is not None:
            key, longest = _budget(config, name, learner.ppo_max_token_len_per_gpu)
            passes[key] = longest
        mini = learner.ppo_mini_batch_size
        if mini is not None and batch % mini:
            yield (
                f"{name}.ppo_mini_batch_size={mini} does not divide data.train_batch_size={batch}: "
                f"{batch} = {batch // mini} x {mini} + {batch % mini}"
            )
        if mini is not None and mini % (chunk * workers):
            yield (
                f"{name}.ppo_mini_batch_size={mini} must be a multiple of rollout.chunk_prompts x trainer.num_workers "
                f"= {chunk} x {workers} = {chunk * workers}, so that every worker gets whole chunks"
            )
        yield from _episode_in_a_pass(config, name, learner)
    for name, pool in replicas(config).items():
        passes[f"{scorer_key(name)}.max_token_len={pool.max_token_len}"] = pool.max_token_len
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    for key, longest in passes.items():
        if prompt + response > longest:
            yield (
                f"the longest row has data.max_prompt_length + data.max_response_length = {prompt} + {response} = "
                f"{prompt + response} tokens, more than {key}; raise it or shorten rows"
            )


def _episode_in_a_pass(config: Config, name: str, learner: ActorConfig | CriticConfig) -> Iterator[str]:
    """Yield a sentence if the loss needs all sequences of an episode in one forward pass, and the longest episode has
    more tokens than fit.

    Args:
        config: the settings.
        name: `actor` or `critic`.
        learner: the section of this learner.
    """
    key = "max_turns" if config.agent.context == "rerender" else "max_contexts"
    most = most_contexts(config)
    given = learner.ppo_max_token_len_per_gpu or config.actor.ppo_max_token_len_per_gpu
    setting, budget = _budget(config, name, given)
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    tokens = most * (prompt + response)
    if most > 1 and tokens > budget and needs_whole_rows(config, learner):
        yield (
            f"the longest episode has agent.{key} x (data.max_prompt_length + data.max_response_length) = {most} x "
            f"({prompt} + {response}) = {tokens} tokens, which the loss of the {name} needs in one forward pass, more "
            f"than {setting}; raise it, or choose a policy loss of single tokens, such as vanilla, and a loss_agg_mode "
            "other than seq-mean-token-mean, such as token-mean"
        )


def _budget(config: Config, name: str, tokens: int) -> tuple[str, int]:
    """Return (text of the settings that limit a forward pass of the learner `name`, limit in tokens).

    `tokens` is the limit per rank; sequence-parallel ranks share a pass.
    """
    key, sequence = f"{name}.ppo_max_token_len_per_gpu={tokens}", config.actor.parallel.sequence
    return (key, tokens) if sequence == 1 else (f"{key} x actor.parallel.sequence={sequence}", tokens * sequence)


def _neighbours(batch: int, step: int) -> str:
    low = batch // step * step
    return f"set data.train_batch_size to {f'{low} or ' if low else ''}{low + step}"
