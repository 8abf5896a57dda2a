"""The engine's side of the handshake: generates the rows on which trainer and engine are compared
(`pipeline/greeting.py`)."""

from collections.abc import Sequence
from typing import Any

from pipeline.greeting import Greeting, GreetingPlan, prompts_of
from pipeline.rollout import vllm
from pipeline.sampling import Sampling


def greeting_requests(plan: GreetingPlan, tokenizer: Any) -> list[tuple[Any, Any]]:
    """Make the requests for the rows of the handshake, prompt by prompt."""
    prompts = prompts_of(plan, tokenizer)
    plain = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=plan.response, stop=())
    uids = [f"greeting-{number}" for number in range(len(prompts))]
    return vllm.requests(prompts, uids, [plain] * len(prompts), plan.samples, seed=plan.seed, ignore_eos=True)


def read_greeting(engine: str, outputs: Sequence[Any]) -> Greeting:
    """Collect the rows of the handshake from finished requests; `engine` is the engine's name."""
    made = [vllm.read(output, 0) for output in outputs]
    return Greeting(
        engine,
        [list(output.prompt_token_ids) for output in outputs],
        [generation.token_ids for generation in made],
        [generation.log_probs for generation in made],
    )
