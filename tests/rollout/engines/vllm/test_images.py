"""vLLM reads the images of prompts as the trainer does, at each policy version."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from pipeline.errors import FinalError
from pipeline.models.processor import FAMILIES
from tests.forks import forking
from tests.pictures import save_tiny
from tests.rollout.engines.images import GAP, Side, gap_after_update, gaps

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

START_S = 240.0


def gaps_of_kept_features(folder: str) -> list[tuple[float, float]]:
    """The same of an engine that keeps features of the tower after its updates."""
    from vllm.v1.engine.llm_engine import LLMEngine

    LLMEngine.reset_encoder_cache = lambda llm: None
    return gaps(folder, "trained")


def refusal(folder: str) -> str:
    """The error of an engine that makes more tokens of an image than the run's processor."""
    side = Side(folder, "frozen", mm_processor_kwargs={"size": {"shortest_edge": 200**2, "longest_edge": 300**2}})
    side.publish(0.0)
    try:
        side.generate()
    except FinalError as error:
        return str(error)
    return ""


def alone(function: Any, *arguments: Any, **options: Any) -> Any:
    """Call a function in a new process."""
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        return pool.submit(function, *arguments, **options).result(START_S)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Makes the folder of a tiny model of a family."""
    made = tmp_path_factory.mktemp("families")

    def folder(family: str) -> str:
        if not (made / family).exists():
            save_tiny(made / family, family)
        return str(made / family)

    return folder


FIRST, *OTHERS = FAMILIES
ALSO = [pytest.param(family, "trained", marks=pytest.mark.long) for family in OTHERS]
ALSO += [pytest.param(family, "frozen", marks=pytest.mark.long) for family in FAMILIES]


@pytest.mark.parametrize(("family", "vision"), [(FIRST, "trained"), *ALSO])
def test_the_engine_reads_images_as_the_trainer(folders: Callable[[str], str], family: str, vision: str) -> None:
    assert max(sum(alone(gaps, folders(family), vision), ())) < GAP


@pytest.mark.long
def test_features_of_an_old_tower_are_not_read_again(folders: Callable[[str], str]) -> None:
    first, *others = alone(gaps_of_kept_features, folders(FIRST))
    assert max(first) < GAP and all(text < GAP and image > 0.1 for text, image in others)


@pytest.mark.long
def test_pixels_are_normalised_only_by_an_engine_that_has_read_a_checkpoint(folders: Callable[[str], str]) -> None:
    assert all(
        text < GAP and image > 0.1 for text, image in alone(gaps, folders(FIRST), "trained", load_format="dummy")
    )


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_in_flight_changes_the_tower(folders: Callable[[str], str], family: str) -> None:
    before, after, gap = alone(gap_after_update, folders(family))
    assert before and after and gap < GAP


@pytest.mark.long
def test_an_expansion_that_differs_is_refused(folders: Callable[[str], str]) -> None:
    assert "expands the 1 images of a prompt to other tokens" in alone(refusal, folders(FIRST))
