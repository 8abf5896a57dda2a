"""The engine `hf` reads the images of prompts as the trainer does, at each policy version."""

import numpy as np
import pytest

from pipeline.models.processor import FAMILIES
from tests.pictures import picture, save_tiny
from tests.rollout.engines.images import GAP, Prompt, Side, gap_after_update, gaps


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model of each family."""
    made = tmp_path_factory.mktemp(request.param)
    save_tiny(made, request.param)
    return str(made)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_engine_reads_images_as_the_trainer(folder: str, use_cache: bool) -> None:
    assert max(sum(gaps(folder, "trained", "hf", use_cache=use_cache), ())) < GAP


def test_an_update_in_flight_changes_the_tower(folder: str) -> None:
    before, after, gap = gap_after_update(folder, "hf")
    assert before and after and gap < GAP


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_sampled_placeholder_is_a_token_like_any_other(folder: str, use_cache: bool) -> None:
    side = Side(folder, "frozen", "hf", use_cache=use_cache)
    side.publish(0.0)
    prompt = side.prompts()[-1]
    decoded = side.engine._ended  # type: ignore[attr-defined]

    def placeholder_first(row):  # type: ignore[no-untyped-def]
        """Replace the second token of a response."""
        if len(row.ids) == 2:
            row.ids[1] = side.vision.placeholder
        return decoded(row)

    side.engine._ended = placeholder_first  # type: ignore[attr-defined]
    side.engine.add("0", side.request(prompt, 1))
    outputs: list = []
    while not outputs:
        outputs = side.engine.step()
    generation = outputs[0].generation
    assert generation.token_ids[1] == side.vision.placeholder
    ours, theirs = side.log_probs([generation], [prompt])
    others = np.arange(len(ours)) != 1
    assert np.abs(ours - theirs)[others].max() < GAP


def test_equal_words_about_two_pictures_do_not_share_a_prompt(folder: str) -> None:
    side = Side(folder, "frozen", "hf")
    side.publish(0.0)
    unexpanded = side.prompts()[1].unexpanded
    asked = [Prompt(unexpanded, (picture(seed, 60, 60),)) for seed in (1, 2, 1)]
    for number, prompt in enumerate(asked):
        side.engine.add(str(number), side.request(prompt, 5))
    outputs: list = []
    while len(outputs) < len(asked):
        outputs += side.engine.step()
    generations = [output.generation for output in sorted(outputs, key=lambda output: output.request_id)]
    ours, theirs = side.log_probs(generations, asked)
    assert np.abs(ours - theirs).max() < GAP
    assert np.array_equal(generations[0].log_probs, generations[2].log_probs)
    assert not np.array_equal(generations[0].log_probs, generations[1].log_probs)
