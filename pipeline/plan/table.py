"""Format the plan of a run as a table for the terminal."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from pipeline.config import Config
from pipeline.derived import (
    UpdateShape,
    reads_reference,
    reads_teacher,
    reference_is_base,
    rollout_correction,
    shards_reference,
    shards_teacher,
    trains_beside_reference,
    uses_agent,
    uses_critic,
    uses_distillation,
    uses_engines,
    uses_pairs,
    why_not_streamed,
)
from pipeline.plan.gpus import PER_NODE
from pipeline.plan.memory import Memory, compute_element, pass_tokens, shown
from pipeline.plan.models import read_model
from pipeline.plan.pipelining import bubble, micro_batches, sent_bytes, stage_sizes
from pipeline.plan.placement import Node, Stage, lines
from pipeline.plan.plan import Plan

_PUBLISHED = {"merged": "merged with the base", "adapter": "alone"}


def render(plan: Plan, nodes: Sequence[Node] = ()) -> Table:
    """Return the plan as a table. With `nodes`, the table also shows the placement of actors on nodes."""
    config, memory = plan.config, plan.memory
    table = Table(title=f"Plan of {config.trainer.experiment_name}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "model", f"{config.model.path}" + (f", {count_words(memory.parameters)} parameters" if memory else "")
    )
    if lora := config.model.lora.rank:
        trained = f" with {count_words(memory.adapter)} parameters" if memory else ""
        table.add_row(
            "adapters", f"LoRA of rank {lora}{trained}, published {_PUBLISHED[config.model.lora.weight_sync]}"
        )
    table.add_row("algorithm", ", ".join(_algorithm(config)))
    table.add_row("training prompts", "not counted" if plan.train_rows is None else f"{plan.train_rows:,}")
    if uses_agent(config):
        by = {
            "environment": "environment or program",
            "function": "reward",
            "sum": "environment or program, and reward",
        }
        agents = {name: by[agent.scored_by] for name, agent in config.agent.declared().items() if name or agent.plays}
        if config.agent.named:
            listed = "; ".join(f"{name or 'without a name'}: {words}" for name, words in agents.items())
            table.add_row("rows", f"episodes of several turns of agents that rows choose, scored by {listed}")
        else:
            table.add_row("rows", f"episodes of several turns, scored by {agents[None]}")
    if sampling := ", ".join(_sampling(config)):
        table.add_row("sampling", sampling)
    table.add_row("iterations", "as many as the prompts give" if plan.iterations is None else f"{plan.iterations:,}")
    greedy = f" and {plan.greedy_rows_per_iteration} greedy ones" if plan.greedy_rows_per_iteration else ""
    table.add_row(
        "one iteration",
        f"{config.data.train_batch_size} prompts x {config.rollout.n} samples = {plan.rows_per_iteration} rows{greedy} "
        f"in {plan.chunks_per_iteration} chunks of {plan.chunk_prompts} prompts",
    )
    for number, line in enumerate(_overlap(config)):
        table.add_row("" if number else "at the same time", line)
    table.add_row("one train worker", f"{plan.rows_per_rank} rows in {plan.chunks_per_rank} chunks per iteration")
    for number, line in enumerate(_mesh(plan)):
        table.add_row("" if number else "mesh", line)
    table.add_row("optimiser steps", _steps(plan.actor))
    if plan.critic:
        warmup = f", alone in the first {config.critic.warmup} iterations" if config.critic.warmup else ""
        table.add_row("of the critic", _steps(plan.critic) + warmup)
    if uses_engines(config):
        processes = plan.episodes_per_engine
        each = f", up to {processes:,} episodes at once, each with a process" if processes else ""
        text = f"{config.rollout.name}, up to {plan.chunks_in_flight_per_engine} chunks in flight{each}"
        table.add_row("one engine", text, end_section=True)
    else:
        data = config.data
        which = f"iterations {data.recorded_iterations}" if data.recorded_iterations else "all iterations"
        table.add_row("responses", f"recorded: {which} of {data.recorded_run}", end_section=True)
    for stage in plan.stages:
        table.add_row(stage.name, stage_resources(stage))
    least = "at least " if any(stage.most for stage in plan.stages) else ""
    table.add_row("in all", f"{least}{plan.cpus:g} CPUs, {plan.gpus:g} GPUs", end_section=not nodes)
    for line in lines(nodes):
        table.add_row("placement", line, end_section=True)
    if memory is None:
        table.add_row("memory", "not estimated: the model is not a local folder with safetensors files")
    else:
        for name, text in _memory(plan, memory):
            table.add_row(name, text)
    for sentence in plan.too_large:
        table.add_row("does not fit", sentence)
    for note in plan.notes:
        table.add_row("note", note)
    return table


def stage_resources(stage: Stage) -> str:
    """Return the number of actors or tasks of a stage and the resources of each, as text: `2 x 1 CPU + 1 GPU`."""
    many = f"{'at least ' if stage.at_least else ''}{stage.count}{f' up to {stage.most}' if stage.most else ''}"
    gpus = f" + {stage.gpus:g} GPU" if stage.gpus else ""
    return f"{many} x {stage.cpus:g} CPU{gpus}{stage.where}"


def _algorithm(config: Config) -> Iterator[str]:
    yield f"{config.algorithm.adv_estimator} advantages"
    yield f"{config.actor.policy_loss.loss_mode} loss ({config.actor.loss_agg_mode})"
    correction = config.algorithm.rollout_correction
    for name, mode in (("rollout_is", correction.rollout_is), ("rollout_rs", correction.rollout_rs)):
        if mode is not None:
            yield f"correction {name}={mode}"
    if uses_critic(config):
        yield f"a critic from {config.critic.path or config.model.path}"
    if reads_teacher(config):
        yield from _teachers(config)
    if reads_reference(config):
        places = {
            "reward": config.algorithm.use_kl_in_reward,
            "loss": config.actor.use_kl_loss,
            "the margins of pairs": uses_pairs(config),
        }
        reference = config.scoring.reference.path or config.model.path
        by = ", computed by the train workers" if trains_beside_reference(config) else ""
        without = " without adapters" if reference_is_base(config) else ""
        yield f"KL to {reference} in {' and '.join(place for place, used in places.items() if used)}{by}{without}"


def _teachers(config: Config) -> Iterator[str]:
    """Yield lines of text on the teachers, and what is learnt from them."""
    actor = config.actor
    learnt = [f"advantages x {config.algorithm.teacher_coef:g}"] if config.algorithm.teacher_coef else []
    if uses_distillation(config):
        learnt.append(
            f"loss over {actor.distill_top_k} tokens x {actor.distill_coef:g} (distill_beta={actor.distill_beta:g})"
        )
    for name, teacher in config.teacher.declared().items():
        rows = f" for {config.teacher.by} {', '.join(teacher.sources or [name])}" if name else ""
        adapter = f" with {teacher.adapter}" if teacher.adapter else ""
        where = ", in the train workers" if shards_teacher(config) else ""
        yield f"teacher {teacher.url or teacher.path}{adapter}{rows}{where}: {' and '.join(learnt)}"


def _overlap(config: Config) -> Iterator[str]:
    """Yield lines of text on the overlap of generation and training, within an iteration and across iterations."""
    staleness = config.algorithm.max_staleness
    if staleness:
        iterations = f"{staleness} iteration{'s' * (staleness > 1)}"
        yield f"engines generate up to {iterations} ahead of training (algorithm.max_staleness={staleness})"
        yield _correction(config)
    else:
        yield "strictly on-policy (algorithm.max_staleness=0): engines wait for every update"
    if config.trainer.stream_gradients is False:
        yield "training begins when an iteration is complete (trainer.stream_gradients=false)"
    elif reason := why_not_streamed(config):
        yield f"training begins when an iteration is complete: {reason}"
    else:
        yield "training begins with the first chunks of an iteration (trainer.stream_gradients)"


def _correction(config: Config) -> str:
    settings = rollout_correction(config)
    bypass = config.actor.old_log_probs == "engine"
    loss = "ratio to the engine's policy (bypass)" if bypass else "ratio to the recomputed old policy (decoupled)"
    own = " by default" if config.algorithm.rollout_correction.rollout_is is None else ""
    if settings.rollout_is == "none":
        return f"off-policy correction: no weights{own}, {loss}"
    return f"off-policy correction: {settings.rollout_is} weights{own}, bound {settings.rollout_is_threshold}, {loss}"


def _sampling(config: Config) -> Iterator[str]:
    data, total = config.data, sum(config.data.source_weights.values())
    if data.generator is not None:
        yield f"generated by {data.generator}" + (", filled up from the files" if data.train_files else "")
    if data.sampler != "uniform":
        yield f"{data.sampler} sampler"
    for name, weight in data.source_weights.items():
        yield f"{name} {weight / total:.0%}"


def _steps(updates: UpdateShape) -> str:
    return f"{updates.mini_batches} mini-batches x {updates.epochs} epochs = {updates.steps} per iteration"


def _mesh(plan: Plan) -> Iterator[str]:
    """Yield lines of text on the division of model and rows among train workers."""
    parallel, workers = plan.config.actor.parallel, plan.config.trainer.num_workers
    replicate, tensor, stages = parallel.replicate, parallel.tensor, parallel.pipeline
    groups = workers // parallel.ranks_with_same_rows
    dimensions = {"pipeline": stages, "replicate": replicate, "shard": groups // replicate}
    dimensions |= {"sequence": parallel.sequence, "tensor": tensor}
    optional = ("pipeline", "sequence")
    used = " x ".join(f"{name} {size}" for name, size in dimensions.items() if name not in optional or size > 1)
    megatron = plan.config.actor.strategy == "megatron"
    over = f"{parallel.expert} ranks" if megatron else f"the {tensor} of tensor"
    experts = f", experts over {over}" if parallel.expert > 1 else ""
    divided = f"weights over {workers // replicate}"
    if megatron:
        divided = f"Megatron's layers, weights over {stages * tensor}, optimiser state over {workers}"
    yield f"{used} = {workers} train worker{'s' * (workers > 1)}; {divided}{experts}"
    rows = plan.rows_per_iteration // plan.actor.mini_batches
    each, same = f"{rows // groups} of the {rows} rows of a mini-batch", tensor * parallel.sequence
    in_stages = f" and the ranks in their places of all {stages} stages" if stages > 1 else ""
    if same > 1:
        yield f"each {same} neighbouring ranks{in_stages} have the same {each}"
    elif stages > 1:
        yield f"the ranks in one place of all {stages} stages have the same {each}"
    else:
        yield f"each rank has {each}"
    yield from _pipeline(plan)


def _pipeline(plan: Plan) -> Iterator[str]:
    """Yield lines of text on the stages of a pipeline."""
    config = plan.config
    stages, passes = config.actor.parallel.pipeline, micro_batches(config)
    if stages == 1:
        return
    yield (
        f"up to {passes} micro-batches at a time pass through {stages} stages, which wait for at least "
        f"{bubble(stages, passes):.0%} of an update"
    )
    model = read_model(config.model.path)
    if plan.memory is None or model is None:
        return
    sizes, peaks = stage_sizes(config, model), plan.memory.stages
    for size, peak in zip(sizes, peaks, strict=True):
        tables = ["the embedding"] * (size.number == 0) + ["the head"] * (size.number == stages - 1)
        layers = f"layers {size.layers[0]} to {size.layers[-1]}" if len(size.layers) > 1 else f"layer {size.layers[0]}"
        yield (
            f"stage {size.number}: {' and '.join([layers, *tables])}, {count_words(size.model.parameters)} parameters, "
            f"activations of {size.held} micro-batch{'es' * (size.held > 1)}, {shown(peak)} in a train worker"
        )
    most = sent_bytes(config, model.size("hidden_size"), compute_element(config, config.actor.fsdp))
    yield f"a rank sends at most {shown(most)} of hidden states and their gradients in an iteration"


def _memory(plan: Plan, memory: Memory) -> Iterator[tuple[str, str]]:
    config, gpu = plan.config, plan.gpu
    unknown = "not estimated (no local folder with safetensors files)"
    critic = unknown if memory.train_critic is None else shown(memory.train_critic)
    tokens = pass_tokens(config)
    waiting = memory.offloaded + memory.train_kept
    sizes = memory.train_reference, memory.train_teacher
    reference, teacher = (unknown if size is None else shown(size) for size in sizes)
    yield (
        "memory of a train worker",
        shown(memory.train_peak)
        + (f" of {gpu.words}" if gpu and config.trainer.use_gpu else "")
        + f": {worker_parts(memory, tokens)}"
        + (f", critic {critic}" if uses_critic(config) else "")
        + (f", reference {reference}" if shards_reference(config) else "")
        + (f", teacher {teacher}" if shards_teacher(config) else "")
        + (f", weights for the engines {shown(memory.train_versions)}" if memory.train_versions else "")
        + (f"; {shown(waiting)} of these in host memory instead" if waiting else ""),
    )
    replicas = [f"{shown(weights)} per {name} replica" for name, weights in memory.scorer_weights.items() if weights]
    workers = config.trainer.num_workers
    yield "host memory at start", ", ".join([f"{shown(memory.train_start)} per train worker", *replicas])
    on_node = min(workers, PER_NODE) if config.trainer.use_gpu else workers
    yield (
        "host memory of a node",
        f"with {on_node} train worker{'s' * (on_node > 1)} {shown(on_node * memory.train_start)} at start; later "
        f"{shown(on_node * waiting)} of offloaded state, and {shown(memory.version)} of each version of the weights",
    )
    yield (
        "space for checkpoints",
        f"{shown(memory.checkpoint)} per train worker in TMPDIR of its node (trainer.env_vars.TMPDIR), else /tmp",
    )
    rollout = config.rollout
    limit = (
        f"{rollout.gpu_memory_utilization:.0%} of a GPU in all"
        + (f", {shown(rollout.gpu_memory_utilization * gpu.memory)} of {gpu.words}" if gpu else "")
        if rollout.num_gpus
        else f"{rollout.cpu_kvcache_space_gb} GiB of KV cache given"
    )
    if uses_engines(config):
        yield (
            "memory of an engine",
            f"{'on each of its GPUs ' if rollout.tensor_parallel_size > 1 else ''}weights "
            f"{shown(memory.engine_weights)}, KV cache for {rollout.max_num_seqs} full sequences "
            f"{shown(memory.engine_kv_needed)} ({limit})",
        )
    for name, weights in memory.scorer_weights.items():
        yield f"memory of a {name} replica", unknown if weights is None else f"{shown(weights)} + activations"
    yield "rows in the object store", f"{shown(memory.rows)} per iteration at most"


def worker_parts(memory: Memory, tokens: int) -> str:
    """Return the parts of a train worker's memory as text; `tokens` is the number of tokens in a pass."""
    return (
        f"weights {shown(memory.train_weights)}, gradients {shown(memory.train_gradients)}, optimiser "
        f"{shown(memory.train_optimizer)}, gathered weights {shown(memory.train_gathered)}, activations of {tokens:,} "
        f"tokens {shown(memory.train_activations + memory.train_kept)}, logits {shown(memory.train_logits)}"
    )


def count_words(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
