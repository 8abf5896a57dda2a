"""Episodes as rows."""

import numpy as np
import pyarrow as pa

from pipeline.agent.context import Context
from pipeline.agent.episode import Episode
from pipeline.generation import Generation
from pipeline.models.batch import TokenBatch
from pipeline.rollout.episodes import generations, with_episodes
from pipeline.rows import INTS, flat


def context(prompt: list[int], *answers: list[int]) -> Context:
    made = Context(prompt, [])
    for number, answer in enumerate(answers):
        if number:
            made.add_observation([90, 91])
        log_probs = np.full(len(answer), -0.5, dtype=np.float32)
        made.add_answer(Generation(np.array(answer, dtype=np.int32), log_probs, "stop", ((3, len(answer)),)))
    return made


def test_contexts_of_an_episode_are_written_as_the_model_must_see_them() -> None:
    contexts = [
        [context([1, 2], [10, 11], [12]), context([3], [13]), context([4, 5], [14, 15])],
        [context([6], [16])],
        [],
    ]
    episodes = [Episode(each, []) for each in contexts]
    made, mask = generations(episodes, version=3)
    table = pa.table(
        {
            "uid": ["a", "b", "c"],
            "prompt_ids": pa.array([[0], [0], [0]], INTS),
            "response_ids": pa.array([generation.token_ids for generation in made], INTS),
        }
    )
    table = with_episodes(table, episodes)
    assert table["contexts"].to_pylist() == [
        [{"prompt": None, "tokens": 5}, {"prompt": [3], "tokens": 1}, {"prompt": [4, 5], "tokens": 2}],
        None,
        None,
    ]
    batch = TokenBatch.from_table(table)
    assert np.diff(batch.context_offsets).tolist() == [3, 1, 1]
    prompts = np.split(batch.prompt_ids, batch.prompt_offsets[1:-1])
    responses = np.split(batch.response_ids, batch.response_offsets[1:-1])
    assert [prompt.tolist() for prompt in prompts] == [[1, 2], [3], [4, 5], [6], []]
    assert [response.tolist() for response in responses] == [[10, 11, 90, 91, 12], [13], [14, 15], [16], []]
    assert mask.tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 1] and len(mask) == len(flat(table, "response_ids")[0])
