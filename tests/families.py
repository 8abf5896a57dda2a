"""Tiny random models of other families, and the rows that a real engine generates with them."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.greeting import Greeting, GreetingPlan
from tests.forks import forking

START_S = 240.0
LONGEST = 64
"""Tokens of the longest row: more than the models' windows."""
WINDOW = 16


def save(folder: Path, make: Callable[[int], Any]) -> None:
    """Save the model that `make` builds for a vocabulary, with a tokenizer."""
    import torch

    from jobs.tiny import build_tokenizer, countdown_texts

    tokenizer = build_tokenizer(countdown_texts(512, seed=0), vocab_size=320)
    torch.manual_seed(0)
    model = make(len(tokenizer))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter *= 4  # scores as large as those of trained models
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def generate(folder: str, plan: GreetingPlan, dtype: str, longest: int) -> Greeting:
    """The rows of an engine that reads the model from its folder; it needs a process of its own."""
    import torch

    from pipeline.config import Config
    from pipeline.models.tokenizer import load_tokenizer
    from pipeline.rollout import engines
    from pipeline.rollout.greetings import greeting_requests, read_greeting

    torch.set_num_threads(1)
    config = Config()
    config.model.path = folder
    config.rollout.dtype, config.rollout.enforce_eager, config.rollout.max_num_seqs = dtype, True, 16
    config.rollout.engine_kwargs = {"load_format": "auto"}
    engine = engines.build(config.model, config.rollout, longest, 1)
    requests = greeting_requests(plan, load_tokenizer(config.model, needs_chat_template=False))
    for number, request in enumerate(requests):
        engine.add(str(number), request)
    finished: dict[str, Any] = {}
    while len(finished) < len(requests):
        finished |= {output.request_id: output.generation for output in engine.step()}
    return read_greeting("engine", requests, [finished[str(number)] for number in range(len(requests))])


def greet(folder: Path, dtype: str = "float32", longest: int = LONGEST) -> tuple[GreetingPlan, Greeting]:
    """What a real engine answers to the greeting of a run with rows of up to `longest` tokens."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(folder).get_text_config()
    plan = GreetingPlan.of(text, longest, 1, dtype == "float32")
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        return plan, pool.submit(generate, str(folder), plan, dtype, longest).result(timeout=START_S)
