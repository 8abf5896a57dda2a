"""TRL's side of `benchmarks.against_trl`, which starts this file with the Python of TRL's own environment.

    TRL-PYTHON -P benchmarks/trl_side.py SETTINGS.json

Trains by GRPO on the CPU and writes what each iteration took to the file `out` of the settings. It imports nothing of
this project: the reward rule is loaded from its file. An iteration is one generation and the optimiser steps on it.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LIBRARIES = ("trl", "torch", "transformers", "accelerate")


def reward(rule_file: str) -> Callable[..., list[float]]:
    """Wrap the rule `compute_score(solution_str, ground_truth)` of a file as a reward of TRL."""
    spec = importlib.util.spec_from_file_location("rule", rule_file)
    assert spec and spec.loader, rule_file
    rule = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rule)

    def score(completions: list[Any], reward_model: list[dict[str, Any]], **_: Any) -> list[float]:
        answers = zip(completions, reward_model, strict=True)
        return [rule.compute_score(message[-1]["content"], row["ground_truth"])["score"] for message, row in answers]

    return score


class Timed(GRPOTrainer):
    """GRPO that notes its seconds in generation, and in everything else before the first optimiser step."""

    generate_s = prepare_s = 0.0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        made = super()._generate_single_turn(*args, **kwargs)
        self.generate_s += time.perf_counter() - begun
        return made

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        begun, generated = time.perf_counter(), self.generate_s
        made = super()._generate_and_score_completions(*args, **kwargs)
        self.prepare_s += time.perf_counter() - begun - (self.generate_s - generated)
        return made


class Iterations(TrainerCallback):
    """A callback that makes one record for each iteration, at the end of its last optimiser step."""

    def __init__(self, steps: int):
        self.trainer: Timed | None = None
        self.records: list[dict[str, float]] = []
        self._steps = steps
        self._before = self._now = (0.0, 0.0, 0.0)

    def _clocks(self) -> tuple[float, float, float]:
        assert self.trainer is not None
        return time.perf_counter(), self.trainer.generate_s, self.trainer.prepare_s

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._before = self._clocks()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps == 0:
            now = self._clocks()
            seconds, generate_s, prepare_s = (a - b for a, b in zip(now, self._before, strict=True))
            self.records.append({"seconds": seconds, "generate_s": generate_s, "prepare_s": prepare_s})
            self._before = now

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        # Follows on_step_end of the same step; the log at the end of training has other keys.
        if logs and "completions/mean_length" in logs:
            self.records[-1] |= {"length": logs["completions/mean_length"], "score": logs["reward"]}


def arguments(settings: dict[str, Any]) -> GRPOConfig:
    """Make TRL's settings; all others keep TRL's default."""
    return GRPOConfig(
        output_dir=settings["scratch"],
        use_cpu=True,
        seed=settings["seed"],
        max_steps=settings["iterations"] * settings["mini_batches"],
        num_generations=settings["n"],
        generation_batch_size=settings["prompts"] * settings["n"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=settings["accumulation"],
        max_completion_length=settings["max_response_length"],
        temperature=settings["temperature"],
        # Means over the tokens of the whole mini-batch, as on the other side. It costs as much as `grpo`.
        loss_type="dapo",
        beta=0.0,
        epsilon=settings["epsilon"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        use_transformers_continuous_batching=settings["generation"] == "continuous",
        # TRL's defaults are for a GPU: bfloat16, and activations computed twice to save memory.
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=settings["mini_batches"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
    )


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    callback = Iterations(settings["mini_batches"])
    trainer = Timed(
        model=settings["model"],
        reward_funcs=reward(settings["rule"]),
        args=arguments(settings),
        train_dataset=load_dataset("parquet", data_files=settings["train_file"], split="train"),
        callbacks=[callback],
    )
    callback.trainer = trainer
    trainer.train()
    if trainer.accelerator.is_main_process:
        versions = {name: metadata.version(name) for name in LIBRARIES}
        result = {"versions": versions, "threads": torch.get_num_threads(), "iterations": callback.records}
        Path(settings["out"]).write_text(json.dumps(result, indent=1))
    trainer.accelerator.wait_for_everyone()
    # Threads of gloo that are left over can abort a process that ends in order, after all its work.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
