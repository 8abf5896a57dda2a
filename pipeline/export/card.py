"""The model card of an exported model: what it is, how it was trained and validated, how it is loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import Config, diff
from pipeline.export.choice import Checkpoint
from pipeline.track.provenance import SECRET, versions

LEFT_OUT = ("trainer.env_vars", "trainer.default_local_dir", "trainer.project_name", "trainer.logger")
"""Settings that say nothing about the model; the first may hold secrets."""
VALIDATION = ("val-core/", "val-aux/")
TRAINED_BY = "Slipstream"


def card(checkpoint: Checkpoint, config: Config, critic: bool = False) -> str:
    """The text of `README.md`: YAML front matter and Markdown.

    Args:
        checkpoint: what was exported.
        config: the run's settings.
        critic: it is the critic and not the policy.
    """
    started = config.critic.path if critic and config.critic.path else config.model.path
    name, what = config.trainer.experiment_name, "The critic (value model) of a policy" if critic else "A policy"
    algorithm = f"{config.algorithm.adv_estimator} advantages, {config.actor.policy_loss.loss_mode} loss"
    sections = [
        _front_matter(config, started, critic),
        f"# {name}, iteration {checkpoint.iteration}",
        f"{what} trained by reinforcement learning with {TRAINED_BY} for {checkpoint.iteration} iterations "
        f"({algorithm}), starting from `{started}`.",
        "## Validation",
        _validation(checkpoint),
        "## How to load it",
        _loading(config, critic),
        "## Training",
        f"Data: {_data(config)}.",
        "Settings that differ from the defaults:",
        _settings(config),
        "Exported with " + ", ".join(f"{library} {version}" for library, version in versions().items()) + ".",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(config: Config, started: str | None, critic: bool) -> str:
    values: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "token-classification" if critic else "text-generation",
        "tags": ["reinforcement-learning", "slipstream", config.algorithm.adv_estimator],
    }
    if started and not Path(started).is_absolute():
        values["base_model"] = started
    return f"---\n{yaml.safe_dump(values, sort_keys=False).rstrip()}\n---"


def _validation(checkpoint: Checkpoint) -> str:
    """The first validation of the run beside that of the exported weights."""
    records = checkpoint.metrics()
    measured = [iteration for iteration, record in records.items() if _metrics(record)]
    if not measured:
        return "The run was not validated."
    columns = [iteration for iteration in dict.fromkeys((measured[0], checkpoint.iteration)) if iteration in measured]
    lines = ["| metric | " + " | ".join(f"iteration {iteration}" for iteration in columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    for name in dict.fromkeys(name for iteration in columns for name in _metrics(records[iteration])):
        values = [records[iteration].get(name) for iteration in columns]
        shown = " | ".join("" if value is None else f"{value:.4g}" for value in values)
        lines.append(f"| `{name}` | {shown} |")
    if checkpoint.iteration not in measured:
        lines += ["", f"The weights of iteration {checkpoint.iteration} themselves were not validated."]
    return "\n".join(lines)


def _metrics(record: Mapping[str, Any]) -> list[str]:
    names = [name for name in record if name.startswith(VALIDATION)]
    return sorted(names, key=lambda name: (not name.startswith(VALIDATION[0]), name))


def _loading(config: Config, critic: bool) -> str:
    if critic:
        return (
            "```python\n"
            "from transformers import AutoModelForTokenClassification, AutoTokenizer\n\n"
            'model = AutoModelForTokenClassification.from_pretrained("FOLDER")\n'
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
            "values = model(input_ids).logits[..., 0]\n"
            "```\n\n"
            "A value is the expected return of the text up to its token."
        )
    extra = "".join(f", {name}={value!r}" for name, value in config.data.apply_chat_template_kwargs.items())
    return (
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
        'messages = [{"role": "user", "content": "..."}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        f'    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True{extra}\n'
        ")\n"
        f"output = model.generate(**inputs, max_new_tokens={config.data.max_response_length})\n"
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))\n'
        "```\n\n"
        "Behind the OpenAI API: `python -m jobs.serve FOLDER`, or `vllm serve FOLDER`. It was trained on prompts of up "
        f"to {config.data.max_prompt_length} tokens and answers of up to {config.data.max_response_length}."
    )


def _data(config: Config) -> str:
    parts = [("training", config.data.train_files), ("validation", config.data.val_files)]
    named = [
        f"{what} {', '.join(f'`{file}`' for file in (files if isinstance(files, list) else [files]))}"
        for what, files in parts
        if files
    ]
    if config.data.generator:
        named.append(f"prompts made by `{config.data.generator}`")
    return "; ".join(named) or "none is named in the settings"


def _settings(config: Config) -> str:
    lines = ["| setting | value |", "|---|---|"]
    for key, _, value in diff(Config(), config):
        if key not in LEFT_OUT:
            text = json.dumps(_without_secrets(value), default=str, ensure_ascii=False)
            lines.append(f"| `{key}` | `{text.replace('|', '&#124;')}` |")
    return "\n".join(lines)


def _without_secrets(value: Any) -> Any:
    """Options of functions and engines are open to any key, among them credentials."""
    if isinstance(value, Mapping):
        return {
            key: "***" if SECRET.search(str(key)) and isinstance(inner, str) else _without_secrets(inner)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_secrets(inner) for inner in value]
    return value
