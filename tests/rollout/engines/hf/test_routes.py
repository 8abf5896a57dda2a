"""The experts that the engine hf writes: those of its own passes, which the trainer replays without a difference."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.tiny import build_model, build_tokenizer, countdown_texts
from pipeline.config.model import ModelConfig
from pipeline.generation import EngineOutput, EngineRequest
from pipeline.models.batch import TokenBatch
from pipeline.models.packing import pack as lay_out
from pipeline.models.policy import Policy, load_policy
from pipeline.models.sharing import Passes
from pipeline.rows import UNROUTED
from pipeline.sampling import Sampling
from pipeline.weights.publish import pack, parts
from tests.rollout.engines.hf.test_engine import engine, run

LAYERS, CHOSEN = 3, 2
PROMPTS = [[5, 6, 7, 8], [9, 10], [11] * 7]
SAMPLED = Sampling(1.0, 1.0, -1, 0, 12, ())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny mixture of 16 experts; bfloat16 chooses others now and then."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    tokenizer = build_tokenizer(countdown_texts(200, seed=0), vocab_size=300)
    model = build_model(tokenizer, hidden=64, layers=LAYERS, heads=2, kv_heads=2, tie=True, seed=0, experts=16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Experts whose choice matters; each token has several nearly equal ones.
            parameter.mul_(8.0 if "experts" in name else 1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def requests(n: int = 3, sampling: Sampling = SAMPLED, for_training: bool = True) -> list[EngineRequest]:
    return [
        EngineRequest(prompt, sampling, 10 * p + s, for_training=for_training)
        for p, prompt in enumerate(PROMPTS)
        for s in range(n)
    ]


def batch(asked: list[EngineRequest], done: dict[str, EngineOutput]) -> tuple[TokenBatch, np.ndarray]:
    """The rows as the trainer gets them, and the engine's log-probs."""
    made = [done[str(number)].generation for number in range(len(asked))]
    rows = TokenBatch.of([request.prompt_ids for request in asked], [each.token_ids for each in made])
    routes = [each.routes for each in made]
    assert all(each is not None for each in routes)
    rows.routes = np.concatenate([each for each in routes if each is not None])
    return rows, np.concatenate([each.log_probs for each in made])


def trained(own: Policy, rows: TokenBatch, packs: Sequence[Sequence[int]]) -> tuple[np.ndarray, float, int]:
    """Log-probs of the trainer, and the numbers of differing and of replayed experts."""
    with torch.no_grad():
        inputs = lay_out(rows, packs, packed=True)
        found = own(**inputs.arguments).log_probs.numpy()
    log_probs = np.zeros(len(rows.response_ids), np.float32)
    log_probs[inputs.token_index] = found
    return log_probs, *own.routers.differing()


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "whole rows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainer_computes_what_the_engine_did(mixture: Path, dtype: str, cache: bool) -> None:
    own = engine(mixture, dtype=dtype, replay_routes=True, engine_kwargs={"use_cache": cache})
    asked = requests()
    rows, engines = batch(asked, run(own, asked))
    assert rows.routes is not None and rows.routes.shape == (sum(rows.lengths), LAYERS * CHOSEN)
    ends = rows.token_offsets[1:] - 1
    known = rows.routes != UNROUTED
    assert not known[ends].any() and np.delete(known, ends, axis=0).all(), "all but the last token of a row have passed"
    policy = load_policy(ModelConfig(path=str(mixture), dtype=dtype))
    Passes.of(policy, "always")
    packs = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    replayed, differing, count = trained(policy, rows, packs)
    assert count == (len(rows.routes) - len(rows) - 2 * sum(map(len, PROMPTS))) * LAYERS * CHOSEN, (
        "of shared prompts one"
    )
    gap = np.abs(replayed - engines)
    if dtype == "float32":
        assert differing == 0 and gap.max() < 1e-5
        return
    rows.routes = None
    plain = np.abs(trained(policy, rows, packs)[0] - engines)
    assert differing > 0, "bfloat16 would choose others"
    assert gap.mean() < 0.8 * plain.mean() and gap.max() < plain.max()


def test_nothing_is_noted_unless_it_is_wanted(mixture: Path, tiny_model: Path) -> None:
    own = engine(mixture, replay_routes=True)
    asked = requests(n=1, for_training=False)
    assert all(output.generation.routes is None for output in run(own, asked).values())
    made = run(engine(mixture, replay_routes=False), requests(n=1))
    assert all(output.generation.routes is None for output in made.values())
    with pytest.raises(
        ValueError, match="rollout.replay_routes=true, but Qwen3ForCausalLM of model.path=.* has no rout"
    ):
        engine(tiny_model, replay_routes=True)


@pytest.mark.parametrize("shared", [True, False])
def test_routes_do_not_depend_on_the_other_rows(mixture: Path, shared: bool) -> None:
    asked = requests()
    together = run(engine(mixture, replay_routes=True, enable_prefix_caching=shared, max_num_seqs=4), asked)
    for number, request in enumerate(asked):
        (alone,) = run(engine(mixture, replay_routes=True), [request]).values()
        assert np.array_equal(alone.generation.routes, together[str(number)].generation.routes)


@pytest.mark.parametrize("recompute", [True, False])
def test_an_update_in_flight_keeps_one_entry_for_each_token(mixture: Path, recompute: bool) -> None:
    own = engine(mixture, replay_routes=True)
    asked = requests(n=1)
    done = run(own, asked, steps=5)
    assert not done
    with torch.no_grad():
        weights = parts(own.policy, 0, torch.float32, Policy.hf_name)
        changed = [replace(part, block=part.block * 1.02) for part in weights]
    shard = pack(changed, 0, 1 << 20, lambda data: data)
    own.update([shard], 1.0, 7, recompute)
    while len(done) < len(asked):
        done |= {output.request_id: output for output in own.step()}
    rows, _ = batch(asked, done)
    assert rows.routes is not None
    ends = rows.token_offsets[1:] - 1
    assert (np.delete(rows.routes, ends, axis=0) != UNROUTED).all() and (rows.routes[ends] == UNROUTED).all()
