"""The model card of an exported model: its kind, its training and validation, and how to load it."""

import json
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import Config, diff
from pipeline.export.choose import Checkpoint
from pipeline.track.provenance import masked, versions

LEFT_OUT = ("trainer.env_vars", "trainer.default_local_dir", "trainer.project_name", "trainer.logger")
"""Settings that do not describe the model and are left out of the card; `trainer.env_vars` may hold secrets."""

POLICY_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
messages = [{{"role": "user", "content": "..."}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True{template_arguments}
)
output = model.generate(**inputs, max_new_tokens={response_length})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

To serve it behind the OpenAI API: `python -m jobs.serve FOLDER`, or `vllm serve FOLDER`. It was trained on prompts of
up to {prompt_length} tokens and responses of up to {response_length}."""

CRITIC_USE = """```python
from transformers import AutoModelForTokenClassification, AutoTokenizer

model = AutoModelForTokenClassification.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
values = model(input_ids).logits[..., 0]
```

A value is the expected return of the text up to its token."""


ADAPTER_USE = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "FOLDER")
```

`BASE` is the model above. To serve both: `vllm serve BASE --enable-lora --lora-modules mine=FOLDER`."""


_WHAT = {
    (False, False): "A policy",
    (False, True): "The adapter (LoRA) of a policy",
    (True, False): "The critic (value model) of a policy",
}


def card(checkpoint: Checkpoint, config: Config, critic: bool = False, adapter: bool = False) -> str:
    """Write the text of `README.md` for the exported policy, its adapter or the critic: YAML front matter and
    Markdown."""
    started = (config.critic.path if critic else None) or config.model.path
    front: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "token-classification" if critic else "text-generation",
        "tags": ["reinforcement-learning", "slipstream", config.algorithm.adv_estimator],
    }
    if started and not Path(started).is_absolute():
        front["base_model"] = started
    arguments = config.data.apply_chat_template_kwargs
    use = POLICY_USE.format(
        template_arguments="".join(f", {name}={value!r}" for name, value in arguments.items()),
        prompt_length=config.data.max_prompt_length,
        response_length=config.data.max_response_length,
    )
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False).rstrip()}\n---",
        f"# {config.trainer.experiment_name}, iteration {checkpoint.iteration}",
        f"{_WHAT[critic, adapter]} trained by reinforcement learning with "
        f"Slipstream for {checkpoint.iteration} iterations ({config.algorithm.adv_estimator} advantages, "
        f"{config.actor.policy_loss.loss_mode} loss), starting from `{started}`.",
        f"## Validation\n\n{_validation(checkpoint)}",
        f"## How to load it\n\n{CRITIC_USE if critic else ADAPTER_USE if adapter else use}",
        f"## Training\n\nSettings that differ from the defaults (the data among them):\n\n{_settings(config)}",
        "Exported with " + ", ".join(f"{library} {version}" for library, version in versions().items()) + ".",
    ]
    return "\n\n".join(sections) + "\n"


def _validation(checkpoint: Checkpoint) -> str:
    """Make a table with the metrics of the run's first validation and of the validation of the exported weights."""
    measured = {}
    for iteration, record in checkpoint.metrics().items():
        metrics = {name: value for name, value in record.items() if name.startswith(("val-core/", "val-aux/"))}
        if metrics:
            measured[iteration] = metrics
    if not measured:
        return "The run was not validated."
    columns = sorted({min(measured), checkpoint.iteration} & measured.keys())
    lines = ["| metric | " + " | ".join(f"iteration {iteration}" for iteration in columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    # The core metrics come first.
    for name in sorted(measured[columns[-1]], key=lambda name: (name.startswith("val-aux/"), name)):
        values = [measured[iteration].get(name) for iteration in columns]
        cells = " | ".join("" if value is None else f"{value:.4g}" for value in values)
        lines.append(f"| `{name}` | {cells} |")
    if checkpoint.iteration not in measured:
        lines.append(f"\nThe weights of iteration {checkpoint.iteration} themselves were not validated.")
    return "\n".join(lines)


def _settings(config: Config) -> str:
    lines = ["| setting | value |", "|---|---|"]
    for key, _, value in diff(Config(), config):
        if key not in LEFT_OUT:
            text = json.dumps(masked({key: value})[key], default=str, ensure_ascii=False)
            lines.append(f"| `{key}` | `{text.replace('|', '&#124;')}` |")
    return "\n".join(lines)
