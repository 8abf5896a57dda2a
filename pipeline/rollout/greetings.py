"""The engine's side of the handshake: generates the rows on which trainer and engine are compared
(`pipeline/greeting.py`)."""

from collections.abc import Sequence
from typing import Any

from pipeline.generation import EngineRequest, Generation
from pipeline.greeting import Greeting, GreetingPlan, prompts_of
from pipeline.rollout.requests import requests
from pipeline.sampling import Sampling


def greeting_requests(plan: GreetingPlan, tokenizer: Any) -> list[EngineRequest]:
    """Make the requests for the rows of the handshake, prompt by prompt."""
    plain_prompts = prompts_of(plan, tokenizer)
    prompts = [*plain_prompts, *(ids for ids, _ in plan.shown)]
    images = [*[None] * len(plain_prompts), *(images for _, images in plan.shown)]
    plain = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=plan.response, stop=())
    uids = [f"greeting-{number}" for number in range(len(prompts))]
    settings = [plain] * len(prompts)
    return requests(prompts, uids, settings, plan.samples, seed=plan.seed, ignore_eos=True, images=images)


def read_greeting(engine: str, requested: Sequence[EngineRequest], made: Sequence[Generation]) -> Greeting:
    """Collect the rows of the handshake.

    Args:
        engine: name of the engine.
        requested: the requests.
        made: the generation of each request.
    """
    return Greeting(
        engine,
        [list(request.prompt_ids) for request in requested],
        [generation.token_ids for generation in made],
        [generation.log_probs for generation in made],
        [request.images.encoded if request.images else () for request in requested],
    )
