"""Rules for keys of verl whose number counts something else here, or whose word means something else.

Each rule notes its changes. `slipstream docs coming_from` describes the general differences.
"""

import math
from collections.abc import Callable

from jobs.verl.devices import all_gpus, devices, engines, offload, sequences
from jobs.verl.distillation import distillation
from jobs.verl.episodes import episodes
from jobs.verl.megatron import megatron
from jobs.verl.state import State
from pipeline.catalogue import ESTIMATORS, POLICY_LOSSES
from pipeline.config.scoring import TRAIN_WORKERS
from pipeline.config.trainer import LOGGERS

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_CACHE = "disable_mm_preprocessor_cache"
_REPLAYS, _REPLAY_MODE = ".enable_rollout_routing_replay", ".router_replay.mode"
_EXCLUDED = "actor_rollout_ref.model.exclude_modules"
_TOWERS = ("visual", "vision", "vision_model", "vision_tower")
_CORRECTION, _GROUPS = "algorithm.rollout_correction", "algorithm.filter_groups"
_MOST_PROMPTS = 1 << 20
_MOST_BATCHES = 100
_CRITIC_TOKENS = 32768


def words(state: State) -> None:
    """Convert the names of the estimator and the policy loss, and report the ones that do not exist here."""
    estimator = state.get("algorithm.adv_estimator").removesuffix("_vectorized")
    state.set("algorithm.adv_estimator", estimator)
    mode = state.get("actor.policy_loss.loss_mode").replace("-", "_")
    state.set("actor.policy_loss.loss_mode", "vanilla" if mode == "bypass_mode" else mode)
    for ours, known in (
        ("algorithm.adv_estimator", estimator in ESTIMATORS),
        ("actor.policy_loss.loss_mode", state.get("actor.policy_loss.loss_mode") in POLICY_LOSSES),
    ):
        if not known:
            state.drop(ours)
            key = ours.replace("actor.", f"{_ACTOR}.")
            state.leave(key, "there is none of this name; `slipstream docs algorithms` shows your own", cannot=True)


def engine_name(state: State) -> None:
    """Convert the engine: `hf` stays, and vLLM takes the place of engines that this version does not have."""
    name = state.given.get(f"{_ROLLOUT}.name")
    if name == "hf":
        state.set("rollout.name", name)
    elif name not in (None, "vllm"):
        state.leave(f"{_ROLLOUT}.name", "vLLM is the engine")


def routers(state: State) -> None:
    """Convert routing replay: `R3` takes the experts of the engine, `R2` the ones of the trainer's first pass."""
    for key, value in state.given.items():
        if key.endswith(_REPLAYS) and isinstance(value, bool):
            state.also.add(key)
            if value:
                state.set("rollout.replay_routes", True)
        elif key.endswith(_REPLAY_MODE) and value in ("R3", "disabled"):
            state.also.add(key)
            if value == "R3":
                state.set("rollout.replay_routes", True)
        elif key.endswith(_REPLAY_MODE):
            state.leave(key, "the trainer takes the engine's experts (R3, rollout.replay_routes) or its own", True)


def images(state: State) -> None:
    """Convert a run whose script names the column of images, or freezes a vision tower.

    verl trains the tower by default, without adapters. The column has a default in verl, so other scripts do not say
    whether their rows have images.
    """
    column, frozen = state.given.get("data.image_key"), state.given.get(f"{_ACTOR}.freeze_vision_tower") is True
    if column is None and not frozen:
        return
    if column is not None:
        state.take("data.image_key", "data.image_key", column)
    adapted = bool(state.get("model.lora.rank"))
    state.set("model.vision", "frozen" if frozen or adapted else "trained")
    excluded = state.given.get(_EXCLUDED)
    if adapted and isinstance(excluded, str) and excluded.strip(".*") in _TOWERS:
        state.leave(_EXCLUDED, "adapters are in the decoder only")
    elif adapted:
        name = "actor_rollout_ref.model.target_modules"
        state.leave(name, "only the decoder has adapters here, and the vision tower has none")
    # An argument of older versions of vLLM.
    state.values.get("rollout.engine_kwargs", {}).pop(_CACHE, None)
    state.leave(f"{_ROLLOUT}.engine_kwargs.vllm.{_CACHE}", "engines keep processed images by themselves")


def adapters(state: State) -> None:
    """Convert LoRA: settings of the policy's adapters, which the critic shares, and how adapters reach the engines."""
    section, theirs = "actor_rollout_ref.model", ("lora_rank", "lora_alpha", "target_modules", "lora_adapter_path")
    names = dict(zip(theirs, ("rank", "alpha", "target_modules", "path"), strict=True))
    rank = state.get("model.lora.rank")
    for other, name in list(names.items())[:3]:
        key, ours = f"critic.model.{other}", state.get(f"model.lora.{name}")
        if rank != state.given.get("critic.model.lora_rank", 0) or (rank and state.given.get(key, ours) != ours):
            state.leave(key, f"the critic has the policy's adapters, {section}.{other}={ours}", cannot=True)
    if not rank:
        if state.get("model.lora.path"):
            state.leave(f"{section}.lora_adapter_path", f"give {section}.lora_rank, the adapter's r", cannot=True)
        state.drop(*(f"model.lora.{name}" for name in names.values()))
        return
    # Unless it merges, verl sends only the adapter to the engines.
    reads_images = state.get("model.vision") != "none"
    alone = state.get("rollout.name") != "hf" and "policy" not in state.scorers and not reads_images
    merges = state.given.get(f"{section}.lora.merge") is True or not alone
    state.set("model.lora.weight_sync", "merged" if merges else "adapter")


def reference(state: State) -> None:
    """Shard a reference that verl offloads over the workers, as there; any other reference gets replicas."""
    key = f"{_REF}.fsdp_config.param_offload"
    if not state.get("scoring.reference.offload"):
        state.drop("scoring.reference.offload")
        return
    in_reward = state.get("algorithm.use_kl_in_reward")
    if "reference" in state.scorers and not in_reward:
        state.set("scoring.reference.placement", TRAIN_WORKERS)
        ranks = state.get("actor.parallel.sequence")
        name = f"{_REF}.ulysses_sequence_parallel_size"
        state.leave(name, f"the reference is divided as the actor is, actor.parallel.sequence={ranks}")
        return
    state.drop("scoring.reference.offload")
    replicas = "a KL in the reward is computed by replicas, which have GPUs of their own"
    state.leave(key, replicas if in_reward else "no reference is loaded beside the policy")


def kl(state: State) -> None:
    """Convert the estimators of the KL, and drop a KL controller that has no KL to control."""
    for ours, key in (
        ("algorithm.kl_penalty", "algorithm.kl_penalty"),
        ("actor.kl_loss_type", f"{_ACTOR}.kl_loss_type"),
    ):
        if state.get(ours).startswith("full"):
            state.drop(ours)
            state.leave(key, "the KL over the whole vocabulary is not built (nor does verl compute it)", cannot=True)
    # The two kinds differ only in the gradient of a loss.
    state.set("algorithm.kl_penalty", state.get("algorithm.kl_penalty").rstrip("+"))
    if state.get("algorithm.kl_ctrl.type") == "adaptive" and not state.get("algorithm.use_kl_in_reward"):
        state.drop("algorithm.kl_ctrl.type")
        state.leave("algorithm.kl_ctrl.type", "there is no KL in the reward to control (algorithm.use_kl_in_reward)")


def clipping(state: State) -> None:
    """Write out both bounds, which follow `clip_ratio` here. In verl they are 0.2 by default, for any `clip_ratio`."""
    low = state.get("actor.clip_ratio_low")
    if state.get("actor.policy_loss.loss_mode") == "cispo" and low is not None and low > 1:
        state.set("actor.clip_ratio_low", 1.0)
        state.notes.append(f"actor.clip_ratio_low={low:g} is 1 here: both leave CISPO's weight without a lower bound")
    ratio = state.get("actor.clip_ratio")
    for side in ("low", "high"):
        ours = f"actor.clip_ratio_{side}"
        # A bound that is given as null follows clip_ratio in verl, too.
        if ratio != 0.2 and ours not in state.values and f"actor_rollout_ref.{ours}" not in state.given:
            state.values[ours] = 0.2
            state.defaults.add(ours)
            state.notes.append(f"verl clips at its default {ours}=0.2, not at actor.clip_ratio={ratio}")


def aggregation(state: State) -> None:
    """Set the aggregation of losses that verl aggregates in one way, for any `loss_agg_mode`."""
    token_level = state.given.get(f"{_ACTOR}.use_token_level_loss")
    if token_level is not None and f"{_ACTOR}.loss_agg_mode" not in state.given:
        state.set("actor.loss_agg_mode", "token-mean" if token_level else "seq-mean-token-mean")
    mode = state.get("actor.policy_loss.loss_mode")
    if mode in ("sapo", "geo_mean") and state.get("actor.loss_agg_mode") != "seq-mean-token-mean":
        state.set("actor.loss_agg_mode", "seq-mean-token-mean")
        state.notes.append(f"verl aggregates {mode} as seq-mean-token-mean, whatever actor.loss_agg_mode is")
    if state.get("actor.loss_agg_mode") == "seq-mean-token-sum-norm" and state.get("actor.loss_scale_factor") is None:
        state.notes.append(
            "actor.loss_agg_mode=seq-mean-token-sum-norm divides by data.max_response_length, in verl by the width "
            "that the batch is padded to; actor.loss_scale_factor sets the number for both"
        )


def correction(state: State) -> None:
    """Convert verl's off-policy correction: importance weights, rejection rules and bypass mode."""
    cap = state.given.get(f"{_ACTOR}.tis_imp_ratio_cap")
    if isinstance(cap, int | float) and cap > 0 and f"{_CORRECTION}.rollout_is" not in state.values:
        state.set(f"{_CORRECTION}.rollout_is", "token")
        state.set(f"{_CORRECTION}.rollout_is_threshold", str(float(cap)))
    _rejection(state)
    bypass = state.given.get(f"{_CORRECTION}.bypass_mode") is True
    if bypass:
        state.set("actor.old_log_probs", "engine")
        if state.given.get(f"{_CORRECTION}.loss_type") == "reinforce":
            state.set("actor.policy_loss.loss_mode", "reinforce")
        elif state.get("actor.policy_loss.loss_mode") not in ("gpg", "dro"):
            for key in (f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_is_threshold"):
                state.drop(key)
                state.leave(key, "the ratio of the loss is that weight already; verl does not apply it twice, either")
    normalize = f"{_CORRECTION}.rollout_is_batch_normalize"
    if state.get(normalize) and (bypass or state.get(f"{_CORRECTION}.rollout_is") is None):
        state.drop(normalize)
        state.leave(normalize, "the weights' mean is not known before the step" if bypass else "there are no weights")


def _rejection(state: State) -> None:
    """Give each rule one bound, and turn the bounds of k1 over.

    verl tests -log r against the logarithms of the bounds, so that its `lo_hi` keeps 1/hi <= r <= 1/lo.
    """
    rules_key, bounds_key = f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold"
    rules = list(dict.fromkeys(rule.strip() for rule in (state.get(rules_key) or "").split(",") if rule.strip()))
    bounds = [bound.strip() for bound in (state.get(bounds_key) or "").split(",") if bound.strip()]
    if not rules:
        state.drop(rules_key, bounds_key)
        state.leave(bounds_key, f"{bounds_key} rejects nothing without {rules_key}")
        return
    bounds *= len(rules) if len(bounds) == 1 else 1
    for place, (rule, bound) in enumerate(zip(rules, bounds, strict=False)):
        try:
            low, high = (float(part) for part in bound.split("_"))
            turned = f"{1 / high:.12g}_{1 / low:.12g}"
        except (ValueError, ZeroDivisionError):
            # One number stands for both sides alike.
            continue
        if rule.endswith("k1") and turned != bound:
            bounds[place] = turned
            state.notes.append(f"{bounds_key}: verl's {bound} keeps ratios from 1/high to 1/low; here that is {turned}")
    state.set(rules_key, ",".join(rules))
    state.set(bounds_key, ",".join(bounds) or None)


def groups(state: State) -> None:
    """Set the metric of dynamic sampling, and its number of batches."""
    if not state.get(f"{_GROUPS}.enable"):
        for key in (f"{_GROUPS}.metric", f"{_GROUPS}.max_num_gen_batches"):
            state.drop(key)
            state.leave(key, "groups are not filtered")
        return
    if state.get(f"{_GROUPS}.metric") in ("seq_reward", "seq_final_reward", "reward"):
        state.set(f"{_GROUPS}.metric", "score")
    key = f"{_GROUPS}.max_num_gen_batches"
    if key not in state.values or state.get(key) < 1:
        state.set(key, _MOST_BATCHES)
        state.notes.append(f"verl generates without a limit; here the run ends where {key}={_MOST_BATCHES} are too few")


def mini_batches(state: State) -> None:
    """Lower a mini-batch that does not divide the batch to the next size that does."""
    batch = state.get("data.train_batch_size")
    for key in ("actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size"):
        mini = state.get(key)
        if mini is None or mini < 1 or not 1 <= batch <= _MOST_PROMPTS:
            continue
        fitting = max(size for size in range(1, min(mini, batch) + 1) if batch % size == 0)
        if fitting != mini:
            state.set(key, fitting)
            state.notes.append(f"{key}={mini} does not divide data.train_batch_size={batch}; {fitting} does")


def critic(state: State) -> None:
    """Set the start of the critic, and drop its keys if there is none."""
    warmup = state.get("critic.warmup")
    if "value" not in state.scorers:
        state.drop("critic.warmup", *[ours for ours in state.defaults if ours.startswith("critic.")])
        if warmup:
            state.leave("trainer.critic_warmup", "there is no critic to train alone")
    elif warmup:
        # verl counts steps from 1, and trains the policy if critic_warmup <= step.
        state.set("critic.warmup", max(warmup - 1, 0))
        state.notes.append(f"trainer.critic_warmup={warmup} is {warmup - 1} steps of the critic alone, as in verl")


def warmups(state: State) -> None:
    """Convert warm-up steps: verl counts iterations, and our schedule counts optimiser steps."""
    batch = state.get("data.train_batch_size")
    for learner in ("actor", "critic"):
        mini = state.get(f"{learner}.ppo_mini_batch_size") or state.get("actor.ppo_mini_batch_size") or batch
        epochs = state.get(f"{learner}.ppo_epochs") or state.get("actor.ppo_epochs")
        per_iteration = max(1, batch // max(mini, 1)) * epochs
        key = f"{learner}.optim.lr_warmup_steps"
        steps = state.get(key)
        if steps <= 0:
            state.drop(key)
        elif per_iteration > 1:
            state.set(key, steps * per_iteration)
            state.notes.append(f"{key}: verl's {steps} iterations are {steps * per_iteration} optimiser steps")


def token_budgets(state: State) -> None:
    """Convert micro-batch sizes, in rows or tokens, to token budgets."""
    pools = state.scorers
    actor = _budget(
        state, "actor.ppo_max_token_len_per_gpu", _ACTOR, "ppo", state.get("actor.ppo_max_token_len_per_gpu")
    )
    if "reference" in pools:
        _budget(state, "scoring.reference.max_token_len", _REF, "log_prob", actor)
    if "value" in pools:
        tokens = _budget(state, "critic.ppo_max_token_len_per_gpu", "critic", "ppo", _CRITIC_TOKENS)
        _budget(state, "scoring.value.max_token_len", "critic", "forward", tokens)
    if "policy" in pools:
        longest = state.get("data.max_prompt_length") + state.get("data.max_response_length")
        state.set("scoring.policy.max_token_len", max(actor, longest))


def _budget(state: State, ours: str, section: str, kind: str, default: int) -> int:
    """Set `ours` to the tokens that verl takes into one forward pass of a GPU, and return them."""
    longest = state.get("data.max_prompt_length") + state.get("data.max_response_length")
    if kind == "ppo":
        longest = math.ceil(longest / state.get("actor.parallel.sequence"))
    dynamic = f"{section}.log_prob_use_dynamic_bsz" if kind == "log_prob" else f"{section}.use_dynamic_bsz"
    if state.given.get(dynamic, state.given.get(f"{_ACTOR}.use_dynamic_bsz")) is True:
        tokens = state.whole(f"{section}.{kind}_max_token_len_per_gpu", default) or default
    else:
        state.leave(f"{section}.{kind}_max_token_len_per_gpu", "without use_dynamic_bsz verl does not read it, either")
        in_all = state.whole(f"{section}.{kind}_micro_batch_size", 0)
        rows = state.whole(f"{section}.{kind}_micro_batch_size_per_gpu", math.ceil(in_all / max(1, all_gpus(state))))
        if not rows and kind == "forward":
            rows = state.whole(f"{section}.ppo_micro_batch_size_per_gpu", 0)
        tokens = rows * longest or default
    if tokens < longest:
        state.notes.append(f"{ours} is {longest}, not {tokens}: the longest row must fit into one forward pass")
        tokens = longest
    state.set(ours, tokens)
    return tokens


def run(state: State) -> None:
    """Convert the reward model, trackers, checkpoints and the run's folder."""
    if not any(state.given.get(f"{section}.enable") for section in ("reward_model", "reward.reward_model")):
        state.drop("reward.model.path")
    elif "reward.custom_reward_function.path" in state.values:
        state.drop("reward.model.path")
        for key in ("reward_model.model.path", "reward.reward_model.model_path"):
            reason = "a function gets no address of a reward model; it must ask a server (`slipstream docs rewards`)"
            state.leave(key, reason, cannot=True)
    mode = state.given.get("trainer.resume_mode", "auto")
    state.set("trainer.resume", "never" if mode == "disable" else "auto")
    if mode not in ("auto", "disable"):
        state.leave("trainer.resume_mode", "a run continues from its own folder only (trainer.resume)", cannot=True)
    loggers = state.get("trainer.logger")
    if dropped := [logger for logger in loggers if logger not in LOGGERS]:
        state.set("trainer.logger", [logger for logger in loggers if logger in LOGGERS])
        state.notes.append(f"trainer.logger: {', '.join(dropped)} is left out; metrics.jsonl is always written")
    for key in ("trainer.test_freq", "trainer.save_freq", "trainer.max_ckpt_to_keep"):
        if state.get(key) == 0 or (key == "trainer.max_ckpt_to_keep" and state.get(key) < 1):
            state.drop(key)
            state.leave(key, "0 is never, as by default")
    # verl's folder is the run's own; ours is the one of all runs.
    name = state.get("trainer.experiment_name").replace("/", "-")
    if name != state.get("trainer.experiment_name"):
        state.notes.append(f"trainer.experiment_name is the name of a folder, {name}")
    state.set("trainer.experiment_name", name)
    folder = state.values.get("trainer.default_local_dir", "").rstrip("/")
    if folder.endswith(f"/{name}") and folder != f"/{name}":
        state.set("trainer.default_local_dir", folder.removesuffix(f"/{name}"))


RULES: tuple[Callable[[State], None], ...] = (
    *(
        words,
        engine_name,
        routers,
        images,
        adapters,
        sequences,
        megatron,
        reference,
        offload,
        kl,
        clipping,
        aggregation,
        correction,
        groups,
        mini_batches,
        critic,
        warmups,
        token_budgets,
        engines,
        distillation,
    ),
    *(devices, episodes, run),
)
"""All rules, in the order in which they apply."""
