"""The teacher stage for a teacher on a server with OpenAI's completions API.

The server gets the token ids of prompt and response, and returns `prompt_logprobs`: for each token its log-prob, and
the log-probs of the most likely tokens. These are at temperature 1, over the whole vocabulary.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.data import DataConfig
from pipeline.config.learner import ActorConfig
from pipeline.config.model import ModelConfig
from pipeline.config.teacher import TeacherConfig
from pipeline.errors import short_reason
from pipeline.scoring.teacher import TeacherStage
from pipeline.store.client import StoreClient
from pipeline.teachers import TeacherRows

if TYPE_CHECKING:
    from pipeline.models.batch import TokenBatch

AT_ONCE = 16
"""Number of requests that a stage has open at the same time."""
RETRIES = 3
"""Number of further attempts of a request that failed."""


class ServedTeacher(TeacherStage):
    """Stage whose teachers are on a server. Arguments are as in `Teacher`; `longest`, `store` and `patience` are not
    used.

    Raises:
        ImportError: the package openai is missing.
        ValueError: the variable of the key is not set.
        RuntimeError: the server does not answer as it must.
    """

    def __init__(
        self,
        model: ModelConfig,
        scorer: TeacherConfig,
        name: str,
        pool: Mapping[str, TeacherConfig],
        rows: TeacherRows,
        data: DataConfig,
        actor: ActorConfig,
        temperature: float,
        longest: int | None = None,
        store: StoreClient | None = None,
        patience: float = 0.0,
    ) -> None:
        from pipeline.models.batch import TokenBatch

        super().__init__(model, name, pool, rows, data, actor)
        try:
            from openai import AsyncOpenAI
        except ImportError as error:
            raise ImportError(f"{name}.url needs the package openai ({error}): pip install openai") from None
        key = os.environ.get(scorer.api_key_env) if scorer.api_key_env else "none"
        if key is None:
            raise ValueError(
                f"{name}: the variable {scorer.api_key_env} (api_key_env) is not set on this node; set it with "
                "trainer.env_vars, or on every node"
            )
        self._url, self._served, self._name = scorer.url, scorer.served_model, name
        self._open = lambda: AsyncOpenAI(
            base_url=scorer.url, api_key=key, timeout=scorer.timeout_s, max_retries=RETRIES
        )
        # A server that cannot be used is found before the first rows.
        into = [np.zeros(1), *(np.zeros((1, self.top)) for _ in range(2 * bool(self.top)))]
        asyncio.run(self._ask_all(TokenBatch.of([[0]], [[1]]), into))

    def score(self, teacher: str, rows: "TokenBatch", into: list[np.ndarray]) -> None:
        """See `TeacherStage.score`.

        Raises:
            RuntimeError: the server failed, or returned no log-prob of a token.
            ValueError: a token was sampled from a part of the vocabulary.
        """
        if rows.support_sizes is not None:
            raise ValueError(
                f"rows have tokens that were sampled from a part of the vocabulary, and the teacher {self._name} at "
                f"{self._url} returns log-probs over the whole; record rows without top_p, top_k, min_p and min_tokens"
            )
        asyncio.run(self._ask_all(rows, into))

    async def _ask_all(self, rows: "TokenBatch", into: list[np.ndarray]) -> None:
        places = asyncio.Semaphore(AT_ONCE)
        async with self._open() as client:
            if self._served is None:
                self._served = (await client.models.list()).data[0].id

            async def ask(context: int) -> None:
                async with places:
                    await self._ask(client, rows, context, into)

            try:
                await asyncio.gather(*(ask(context) for context in range(len(rows.lengths))))
            except Exception as error:
                raise RuntimeError(
                    f"the teacher {self._name} at {self._url} failed: {short_reason(error)}; it must return "
                    f"prompt_logprobs for token ids, as vLLM's server does, {max(1, self.top)} or more for each "
                    "(--max-logprobs)"
                ) from error

    async def _ask(self, client: Any, rows: "TokenBatch", context: int, into: list[np.ndarray]) -> None:
        """Write the numbers of one context into the arrays."""
        prompt = rows.prompt_ids[rows.prompt_offsets[context] : rows.prompt_offsets[context + 1]].tolist()
        tokens = slice(rows.response_offsets[context], rows.response_offsets[context + 1])
        response = rows.response_ids[tokens].tolist()
        if not response:
            return
        answer = await client.completions.create(
            model=self._served,
            prompt=prompt + response,
            max_tokens=1,
            temperature=0.0,
            extra_body={"prompt_logprobs": max(1, self.top), "add_special_tokens": False},
        )
        found = answer.choices[0].model_dump().get("prompt_logprobs") or []
        if len(found) != len(prompt) + len(response):
            raise ValueError(f"it returned {len(found)} prompt_logprobs for {len(prompt) + len(response)} tokens")
        for place, (token, entry) in enumerate(zip(response, found[len(prompt) :], strict=True), tokens.start):
            known = {int(name): float(one["logprob"]) for name, one in entry.items()}
            into[0][place] = known[token]
            if self.top:
                best = sorted(known, key=lambda name: -known[name])[: self.top]
                into[1][place], into[2][place] = best, [known[name] for name in best]
