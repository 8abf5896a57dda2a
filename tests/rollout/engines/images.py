"""An engine and the trainer's policy that read the same images."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.models.processor import Vision
from tests.pictures import picture

GAP = 1e-5
TOKENS = 12
"""Number of tokens of each response."""


@dataclass
class Prompt:
    """A prompt with images."""

    unexpanded: list[int]
    images: tuple[bytes, ...]


class Side:
    """An engine and the trainer's policy.

    Args:
        folder: folder of the model.
        vision: `model.vision`.
        name: `rollout.name`.
        overrides: arguments of the engine.
    """

    def __init__(self, folder: str, vision: str, name: str = "vllm", **overrides: Any) -> None:
        import torch

        from pipeline.config.model import ModelConfig
        from pipeline.config.rollout import RolloutConfig
        from pipeline.models.policy import load_policy
        from pipeline.models.sharing import Passes
        from pipeline.rollout.engines import build

        torch.set_num_threads(1)
        model = ModelConfig(path=folder, vision=vision)
        rollout = RolloutConfig(
            name=name, dtype="float32", enforce_eager=True, max_num_seqs=16, max_num_batched_tokens=1024
        )
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

        from pipeline.weights.publish import pack, parts

        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.requires_grad:
                    parameter += move * torch.randn(parameter.shape, generator=generator)
        weights = parts(self.policy, 0, torch.float32, self.policy.hf_name)
        shards = [pack(weights, 0, 60_000, lambda data: data)]
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

        ids = [self.vision.expand(one.unexpanded, one.images) for one in prompts]
        images = [one.images for one in prompts]
        batch = TokenBatch.of(ids, [generation.token_ids for generation in generations], images)
        packs, _ = pack_rows(batch, list(range(len(ids))), 10_000, False, False)
        reader = self.policy.image_reader
        assert reader is not None
        made = pack(batch, packs, packed=True, place_images=reader.place)
        with torch.no_grad():
            found, *_ = self.policy(
                made.input_ids,
                made.logit_index,
                made.targets,
                positions=made.positions,
                packing=made.packing,
                images=made.images,
            )
        ours = found[np.argsort(made.token_index)].numpy()
        return ours, np.concatenate([generation.log_probs for generation in generations])


def gaps(folder: str, vision: str, name: str = "vllm", **overrides: Any) -> list[tuple[float, float]]:
    """The gaps of three versions, with text only and with images."""
    side, found = Side(folder, vision, name, **overrides), []
    for move in (0.0, 0.02, 0.02):
        side.publish(move)
        found.append(side.gap())
    return found


def gap_after_update(folder: str, name: str = "vllm") -> tuple[int, int, float]:
    """The numbers of tokens before and after an update in flight, and the gap of the tokens after it."""
    side = Side(folder, "trained", name)
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
