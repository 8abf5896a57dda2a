"""Check the settings of a run whose prompts have images (`model.vision`)."""

import contextlib
from collections.abc import Iterator

from pipeline.config import Config
from pipeline.config.bounds import sentences
from pipeline.derived import reads_reference, uses_critic, uses_images, uses_reward_model
from pipeline.models.processor import why_not
from pipeline.plan.models import VISION, ModelFiles, read_model, teacher_paths


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence per setting that does not fit to prompts with images, or does nothing without them."""
    if not uses_images(config):
        return
    yield from sentences(config, _settings(config))
    paths = {"model.path": config.model.path}
    if reads_reference(config):
        paths["scoring.reference.path"] = config.scoring.reference.path
    paths |= teacher_paths(config)
    if uses_critic(config):
        paths["critic.path"] = config.critic.path
    for key, path in paths.items():
        # Damaged folders are reported with all models of the run.
        with contextlib.suppress(ValueError):
            yield from model_problems(config.model.vision, read_model(path), path, key)
    if uses_critic(config):
        with contextlib.suppress(ValueError):
            yield from _critic(config, read_model(config.model.path), read_model(config.critic.path))


def model_problems(vision: str, model: ModelFiles | None, path: str | None, key: str = "model.path") -> Iterator[str]:
    """Yield a sentence if a model cannot be trained on images.

    Args:
        vision: `model.vision`, not `none`.
        model: the model; None if it is not on this machine.
        path: its folder or Hub name.
        key: configuration key of `path`.
    """
    if model is None:
        return
    if not model.config.get(VISION):
        yield f"{key}={path} has no {VISION} in its config.json, but model.vision={vision}"
    elif reason := why_not(model.family):
        yield f"{key}={path} is of the family {model.family}, which cannot be trained on images: {reason}"


def _critic(config: Config, policy: ModelFiles | None, critic: ModelFiles | None) -> Iterator[str]:
    """Yield a sentence if the critic cannot read the images as the policy's processor makes them."""
    if policy and critic and policy.family != critic.family:
        yield (
            f"critic.path={config.critic.path} is of the family {critic.family}, and model.path={config.model.path} of "
            f"{policy.family}, whose processor makes the images of both; give a critic of the same family"
        )


def _settings(config: Config) -> dict[str, object]:
    data, model, parallel = config.data, config.model, config.actor.parallel
    agents = config.agent.declared().values()
    low, high = model.min_pixels, model.max_pixels
    return {
        "{model.vision}, {data.truncation}: a cut prompt loses placeholders of its images; set data.truncation=error, "
        "or data.filter_overlong_prompts=true": (data.truncation != "error" and not data.filter_overlong_prompts),
        "{model.min_pixels} is above {model.max_pixels}; lower it": low is not None and high is not None and low > high,
        "{model.vision} and {actor.parallel.sequence}: positions with images cannot be divided; set "
        "actor.parallel.sequence=1": parallel.sequence > 1,
        "{model.vision} and {actor.parallel.tensor}: a vision tower cannot be divided; set actor.parallel.tensor=1": (
            parallel.tensor > 1
        ),
        "{model.vision} and {model.lora.rank}: adapters train only the decoder; set model.vision=frozen": (
            model.vision == "trained" and model.lora.rank
        ),
        "{model.vision} and {model.lora.weight_sync}: engines cannot read images with an adapter only; set "
        "model.lora.weight_sync=merged": model.lora.alone,
        "{model.vision} and {rollout.update_kv}: a prompt would have features of two versions of the tower; set "
        "rollout.update_kv=recompute": model.vision == "trained" and config.rollout.update_kv == "keep",
        "{model.vision} and {reward.model.path}: a reward model reads only text; leave it out": (
            uses_reward_model(config)
        ),
        "{model.vision}: programs and commands (agent.program, agent.command) cannot show images, only environments "
        "and tools can; leave one out": any(agent.driven for agent in agents),
        "{model.vision} and {agent.context}: a context with images cannot be rendered again; set agent.context=keep": (
            any(agent.plays and agent.context == "rerender" for agent in agents)
        ),
    }
