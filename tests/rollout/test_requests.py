"""Requests for prompts, from the columns of a chunk."""

import pyarrow as pa

from pipeline.generation import PromptImages
from pipeline.rollout.requests import prompt_images, requests
from pipeline.rows import IMAGES
from pipeline.sampling import Sampling

SAMPLING = Sampling(1.0, 1.0, -1, 0, 4, ())


def test_samples_of_a_prompt_have_its_images() -> None:
    rows = [
        {"images": [b"a", b"b"], "image_hash": [b"1", b"2"], "engine_prompt_ids": [7, 8, 8]},
        {"images": [], "image_hash": [], "engine_prompt_ids": [7]},
        {"images": None, "image_hash": None, "engine_prompt_ids": None},
    ]
    shown = prompt_images(pa.Table.from_pylist(rows, schema=IMAGES))
    first = PromptImages((b"a", b"b"), (b"1", b"2"), [7, 8, 8])
    assert shown == [first, None, None]
    prompts = [[7, 8, 8, 8, 8], [7], [9]]
    made = requests(prompts, ["a", "b", "c"], [SAMPLING] * 3, 2, seed=1, greedy=True, images=shown)
    assert [request.images for request in made] == [first] * 3 + [None] * 6
    assert [request.prompt_ids for request in made[:3]] == [prompts[0]] * 3


def test_prompts_of_a_run_without_images() -> None:
    assert prompt_images(pa.table({"uid": ["a"]})) is None
    assert requests([[1]], ["a"], [SAMPLING], 1, seed=None)[0].images is None
