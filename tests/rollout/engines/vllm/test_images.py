"""vLLM reads the images of prompts as the trainer does, at each policy version."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pipeline.errors import FinalError
from pipeline.models.processor import FAMILIES, Vision
from tests.forks import forking
from tests.pictures import picture, save_tiny

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

START_S = 240.0
GAP = 1e-5
TOKENS = 12
"""Number of tokens of each response."""


@dataclass
class Prompt:
    """A prompt with images."""

    unexpanded: list[int]
    images: tuple[bytes, ...]


class Side:
    """An engine and the trainer's policy, in a process of their own.

    Args:
        folder: folder of the model.
        vision: `model.vision`.
        overrides: arguments of vLLM.
    """

    def __init__(self, folder: str, vision: str, **overrides: Any) -> None:
        import torch

        from pipeline.config.model import ModelConfig
        from pipeline.config.rollout import RolloutConfig
        from pipeline.models.policy import load_policy
        from pipeline.models.sharing import Passes
        from pipeline.rollout.engines import build

        torch.set_num_threads(1)
        model = ModelConfig(path=folder, vision=vision)
        rollout = RolloutConfig(dtype="float32", enforce_eager=True, max_num_seqs=16, max_num_batched_tokens=1024)
        rollout.engine_kwargs = overrides
        self.policy = load_policy(model).eval()
        assert Passes.of(self.policy, "auto").packed
        assert self.policy.image_reader is not None
        self.vision: Vision = self.policy.image_reader.vision
        self.engine = build(model, rollout, 256, 0)
        self.version = -1

    def prompts(self) -> list[Prompt]:
        """Prompts with 0 to 3 images, some of them twice."""
        shown = [(), *((picture(1, 60, 60),), (picture(2, 90, 60), picture(3, 60, 120)))]
        shown.append((*shown[2], shown[1][0]))
        found, tokenizer = [], self.vision.processor.tokenizer
        for images in shown:
            parts = [{"type": "text", "text": "How many"}, *[{"type": "image"}] * len(images)]
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
            )
            found.append(Prompt(tokenizer(text, add_special_tokens=False)["input_ids"], images))
        return found

    def publish(self, move: float, load: Any = None, *arguments: Any) -> None:
        """Move each trained weight, and load the result into the engine as the next version."""
        import torch

        from pipeline.weights.publish import named, pack

        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.requires_grad:
                    parameter += move * torch.randn(parameter.shape, generator=generator)
        weights = named(self.policy, self.policy.hf_name)
        shards = [pack(weights, 0, torch.float32, 60_000, lambda data: data)]
        (load or self.engine.load)(shards, 60, self.version, *arguments)

    def request(self, prompt: Prompt, seed: int) -> Any:
        from pipeline.generation import EngineRequest, PromptImages
        from pipeline.sampling import Sampling

        sampling = Sampling(1.0, 1.0, -1, 0, TOKENS, ())
        expanded = self.vision.expand(prompt.unexpanded, prompt.images)
        hashes = tuple(self.vision.hash(image) for image in prompt.images)
        images = PromptImages(prompt.images, hashes, prompt.unexpanded) if prompt.images else None
        return EngineRequest(expanded, sampling, seed, ignore_eos=True, images=images)

    def generate(self) -> list[Any]:
        """Two responses to each prompt."""
        asked = [self.request(prompt, seed) for prompt in self.prompts() for seed in (1, 2)]
        for number, request in enumerate(asked):
            self.engine.add(f"{self.version}-{number}", request)
        done: dict[int, Any] = {}
        while len(done) < len(asked):
            for output in self.engine.step():
                done[int(output.request_id.split("-")[1])] = output.generation
        return [done[number] for number in range(len(asked))]

    def gap(self) -> tuple[float, float]:
        """The largest gap of a token's log-prob, in responses to prompts with text only and with images."""
        shown = [prompt for prompt in self.prompts() for _ in (1, 2)]
        ours, theirs = self.log_probs(self.generate(), shown)
        gaps = np.abs(ours - theirs)
        return float(gaps[: 2 * TOKENS].max()), float(gaps[2 * TOKENS :].max())

    def log_probs(self, generations: list[Any], prompts: list[Prompt]) -> tuple[np.ndarray, np.ndarray]:
        """The log-probs of responses by the trainer and by the engine."""
        import torch

        from pipeline.models.batch import TokenBatch
        from pipeline.models.packing import pack
        from pipeline.models.sharing import pack_rows

        ids = [np.array(self.vision.expand(one.unexpanded, one.images), np.int32) for one in prompts]
        responses = [generation.token_ids for generation in generations]
        batch = TokenBatch(
            np.concatenate(ids),
            np.cumsum([0, *map(len, ids)]),
            np.concatenate(responses),
            np.cumsum([0, *map(len, responses)]),
            np.arange(len(ids) + 1),
            images=np.fromiter((one.images for one in prompts), dtype=object, count=len(ids)),
        )
        packs, _ = pack_rows(batch, list(range(len(ids))), 10_000, False, False)
        reader = self.policy.image_reader
        assert reader is not None
        made = pack(batch, packs, packed=True, place_images=reader.place)
        with torch.no_grad():
            found, _ = self.policy(
                made.input_ids,
                made.logit_index,
                made.targets,
                positions=made.positions,
                packing=made.packing,
                images=made.images,
            )
        ours = found[np.argsort(made.token_index)].numpy()
        return ours, np.concatenate([generation.log_probs for generation in generations])


def gaps(folder: str, vision: str, **overrides: Any) -> list[tuple[float, float]]:
    """The gaps of three versions, with text only and with images."""
    side, found = Side(folder, vision, **overrides), []
    for move in (0.0, 0.02, 0.02):
        side.publish(move)
        found.append(side.gap())
    return found


def gaps_of_kept_features(folder: str) -> list[tuple[float, float]]:
    """The same of an engine that keeps features of the tower after its updates."""
    from vllm.v1.engine.llm_engine import LLMEngine

    LLMEngine.reset_encoder_cache = lambda llm: None
    return gaps(folder, "trained")


def gap_after_update(folder: str) -> tuple[int, int, float]:
    """The numbers of tokens before and after an update in flight, and the gap of the tokens after it."""
    side = Side(folder, "trained")
    side.publish(0.0)
    prompts = side.prompts()
    for number, prompt in enumerate(prompts):
        side.engine.add(str(number), side.request(prompt, number))
    done = [output for _ in range(5) for output in side.engine.step()] + side.engine.drain()
    assert not done
    side.publish(0.02, side.engine.update, True)
    while len(done) < len(prompts):
        done += side.engine.step()
    generations = [output.generation for output in sorted(done, key=lambda output: int(output.request_id))]
    ours, theirs = (np.split(values, len(prompts)) for values in side.log_probs(generations, prompts))
    old = [dict(generation.version_runs)[0] for generation in generations]
    gaps = [np.abs(a - b)[begun:] for a, b, begun in zip(ours, theirs, old, strict=True)]
    return sum(old), sum(map(len, gaps)), float(np.concatenate(gaps).max())


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
