"""TRL's side of `benchmarks.against_trl_agent`, which starts this file with the Python of TRL's own environment.

    TRL-PYTHON -P benchmarks/trl_agent_side.py SETTINGS.json

The script runs one batch of episodes for each line on standard input, by `GRPOTrainer` with an `environment_factory`,
and answers with a line of JSON. It imports nothing of this project. Every answer counts as a call of the environment's
tool with its text, as in the game; the chat template shows no list of tools, so that both sides read the same tokens.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer


class Game:
    """The replies of `examples/agents/higher_lower.py`."""

    def reset(self, reward_model: dict[str, Any], **_: Any) -> None:
        self._number, self._found = int(reward_model["ground_truth"]), False

    def guess(self, text: str) -> str:
        """Guess the number.

        Args:
            text: the guess
        """
        text = text.strip()
        if not text.isdecimal() or len(text) > 4:
            return "A number."
        self._found = self._found or int(text) == self._number
        return "higher" if int(text) < self._number else "lower"

    def get_reward(self) -> float:
        return float(self._found)


class Generated(Exception):
    """Prompts, completions and masks of a batch: the steps after the generation are not measured."""


class Generator(GRPOTrainer):
    """GRPO that stops after the generation."""

    def _generate(self, prompts: list[Any]) -> NoReturn:
        raise Generated(*super()._generate(prompts)[:3])


def tokenizer(settings: dict[str, Any]) -> Any:
    made = AutoTokenizer.from_pretrained(settings["model"])
    template = made.chat_template.replace("{% if tools %}", "{% if false %}")
    made.chat_template = (
        template.replace("<tool_response>", "")
        .replace("</tool_response>", "")
        .replace("<|im_start|>user{% endif %}{{ '\\n' }}", "<|im_start|>user{{ '\\n' }}{% endif %}")
    )
    # `parse` replaces the parsing by it.
    made.response_schema = {}

    def parse(own: Any, ids: list[int], **_: Any) -> dict[str, Any]:
        text = own.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "guess", "arguments": {"text": text}}}
        return {"role": "assistant", "content": text, "tool_calls": [call]}

    grpo_trainer.parse_response = parse
    return made


def arguments(settings: dict[str, Any]) -> GRPOConfig:
    """TRL's settings; what is not named has TRL's default."""
    samples = settings["prompts"] * settings["n"]
    return GRPOConfig(
        output_dir=settings["scratch"],
        use_cpu=True,
        num_generations=settings["n"],
        generation_batch_size=samples,
        per_device_train_batch_size=samples,
        max_completion_length=settings["max_response_length"],
        # The first answer is sampled before the first call.
        max_tool_calling_iterations=settings["turns"] - 1,
        generation_kwargs=dict.fromkeys(("max_new_tokens", "min_new_tokens"), settings["turn_tokens"]),
        use_transformers_continuous_batching=settings["generation"] == "continuous",
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    dataset = load_dataset("parquet", data_files=settings["train_file"], split="train")
    trainer = Generator(
        model=settings["model"],
        args=arguments(settings),
        train_dataset=dataset,
        processing_class=tokenizer(settings),
        environment_factory=Game,
    )
    trainer.model.train()
    rows = [dataset[number] for number in range(settings["prompts"]) for _ in range(settings["n"])]
    for _ in sys.stdin:
        begun, cpu = time.perf_counter(), time.process_time()
        try:
            with torch.no_grad():
                trainer._generate_and_score_completions(rows)
        except Generated as made:
            prompts, completions, masks = made.args
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
        tokens = sum(map(len, prompts)) + sum(map(len, completions))
        found = {"seconds": seconds, "cpu_s": cpu_s, "tokens": tokens, "sampled": sum(map(sum, masks))}
        print(f"FOUND {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
