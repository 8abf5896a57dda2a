"""Check the settings of teachers (`teacher.*`), and of what is learnt from them. Part of `checks.check`."""

import contextlib
import os
from collections.abc import Iterator

from pipeline.config import Config
from pipeline.config.bounds import sentences
from pipeline.derived import (
    reads_teacher,
    uses_agent,
    uses_distillation,
    uses_engines,
    uses_images,
    uses_pairs,
)
from pipeline.plan.models import read_model


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence per problem with the run's teachers."""
    declared = config.teacher.declared()
    yield from sentences(config, _reading(config, bool(declared)))
    if not reads_teacher(config):
        return
    yield from sentences(config, config.teacher.problems())
    for name, teacher in declared.items():
        key = "teacher" if name is None else f"teacher.named.{name}"
        whole = config.rollout.temperature == 1 and not any(config.rollout.restrictions().values())
        variable = teacher.api_key_env
        table: dict[str, object] = {
            f"{key}.url returns log-probs at temperature 1 over the whole vocabulary, and the policy samples otherwise "
            "({rollout.temperature}, {rollout.top_p}, {rollout.top_k}, {rollout.min_p}, {rollout.min_tokens}); set "
            f"temperature=1 top_p=1 top_k=-1 min_p=0 min_tokens=0, or {key}.path": teacher.url and not whole,
            f"{key}.url cannot read images ({{model.vision}}); set {key}.path": teacher.url and uses_images(config),
            f"{key}.api_key_env={variable} is not set in this command's environment; set it, or leave the key out": (
                variable is not None and variable not in os.environ
            ),
            f"{key}.prompt with {{model.vision}}: prompts have marks of images, which the text loses; leave it out": (
                teacher.prompt is not None and uses_images(config)
            ),
            f"{key}.prompt with episodes (agent.*): the teacher reads the prompts of all turns as they were; leave it "
            "out": teacher.prompt is not None and uses_agent(config),
        }
        yield from sentences(config, table)
    yield from _top(config)


def _reading(config: Config, there: bool) -> dict[str, object]:
    algorithm = config.algorithm
    return {
        "{algorithm.teacher_coef} needs a teacher; set teacher.path": algorithm.teacher_coef and not there,
        "{actor.distill_coef} needs a teacher; set teacher.path": uses_distillation(config) and not there,
        "{algorithm.adv_estimator} gives no advantages, and nothing else teaches; set algorithm.teacher_coef or "
        "actor.distill_coef, and teacher.path": algorithm.adv_estimator == "zero" and not reads_teacher(config),
        "{algorithm.use_kl_in_reward} with {algorithm.adv_estimator}, which reads no rewards; use "
        "actor.use_kl_loss=true instead": algorithm.use_kl_in_reward and algorithm.adv_estimator == "zero",
        "{algorithm.teacher_coef} with {actor.policy_loss.loss_mode}, which compares whole responses; set it to 0": (
            algorithm.teacher_coef and uses_pairs(config)
        ),
        "{actor.distill_coef} with {actor.policy_loss.loss_mode}, which trains only on pairs; set it to 0": (
            uses_distillation(config) and uses_pairs(config)
        ),
        "{algorithm.filter_groups.enable} with {algorithm.adv_estimator}: groups with equal rewards teach as much as "
        "others; set it to false": algorithm.filter_groups.enable
        and algorithm.adv_estimator == "zero"
        and uses_engines(config),
    }


def _top(config: Config) -> Iterator[str]:
    # Damaged folders are reported with all models of the run.
    with contextlib.suppress(ValueError):
        model, most = read_model(config.model.path), config.actor.distill_top_k
        size = model and model.config.get("vocab_size")
        if uses_distillation(config) and size and most > size:
            yield f"actor.distill_top_k={most} is above the {size} tokens of the vocabulary of model.path; lower it"
