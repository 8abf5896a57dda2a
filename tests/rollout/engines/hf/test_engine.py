"""The engine hf in this process: what only it does. `test_conformance.py` has what all engines do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import Config
from pipeline.generation import EngineOutput, EngineRequest
from pipeline.models.batch import TokenBatch
from pipeline.models.packing import pack as lay_out
from pipeline.rollout.engines import build
from pipeline.rollout.engines.hf.engine import HuggingFace
from pipeline.sampling import Sampling
from pipeline.weights.publish import pack, parts

SAMPLED = Sampling(1.0, 1.0, -1, 0, 20, ())
PROMPTS = [[5, 6, 7, 8], [9, 10], [11] * 7]


def engine(folder: Path, **settings: Any) -> HuggingFace:
    config = Config()
    config.model.path = str(folder)
    config.rollout.name, config.rollout.dtype = "hf", "float32"
    for name, value in settings.items():
        assert hasattr(config.rollout, name)
        setattr(config.rollout, name, value)
    made = build(config.model, config.rollout, 64, 0)
    assert isinstance(made, HuggingFace)
    return made


def run(own: HuggingFace, requests: list[EngineRequest], steps: int = 10_000) -> dict[str, EngineOutput]:
    """What finishes of the requests."""
    for number, request in enumerate(requests):
        own.add(str(number), request)
    done: dict[str, EngineOutput] = {}
    while len(done) < len(requests) and (steps := steps - 1) >= 0:
        done |= {output.request_id: output for output in own.step()}
    return done


def ids(done: dict[str, EngineOutput]) -> list[list[int]]:
    return [done[name].generation.token_ids.tolist() for name in sorted(done, key=int)]


def requests(n: int = 2, sampling: Sampling = SAMPLED) -> list[EngineRequest]:
    return [EngineRequest(prompt, sampling, 10 * p + s) for p, prompt in enumerate(PROMPTS) for s in range(n)]


def count_passes(own: HuggingFace, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the ids that the model gets from now on."""
    shapes: list[tuple[int, ...]] = []
    forward = own.policy.decoder.forward

    def counted(**named: Any) -> Any:
        shapes.append(tuple(named["input_ids"].shape))
        return forward(**named)

    monkeypatch.setattr(own.policy.decoder, "forward", counted)
    return shapes


def test_a_prompt_is_read_once_for_all_of_its_samples(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shared, rows in ((True, 3), (False, 24)):
        own = engine(tiny_model, enable_prefix_caching=shared)
        shapes = count_passes(own, monkeypatch)
        run(own, requests(n=8), steps=1)
        assert shapes == [(rows, 7)]


def test_prompts_wait_until_a_step_has_room_for_them(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine(tiny_model, max_num_batched_tokens=1, max_num_seqs=5)
    # A step takes at least one whole row of the longest length.
    own._tokens = 10
    shapes = count_passes(own, monkeypatch)
    run(own, requests(), steps=4)
    assert shapes == [(2, 4), (1, 7), (5, 1), (5, 1)], "two prompts, one more, and the sixth row waits"
    assert len(own._waiting) == 1


def test_the_memory_of_the_settings_bounds_the_rows(tiny_model: Path) -> None:
    own = engine(tiny_model)
    assert own._cells == 2**30 // own._cell_bytes
    own._cells = 3 * 64
    whole = ids(run(engine(tiny_model), requests()))
    most = []

    def watch(outputs: list[EngineOutput]) -> list[EngineOutput]:
        most.append(len(own._running))
        return outputs

    for number, request in enumerate(requests()):
        own.add(str(number), request)
    done: dict[str, EngineOutput] = {}
    while len(done) < 6:
        done |= {output.request_id: output for output in watch(own.step())}
    assert max(most) <= 3 and ids(done) == whole, "the same rows, some of them later"
    own._cells = 1
    assert ids(run(own, requests()[:1])) == whole[:1], "one row always runs"


def test_requests_without_seeds_differ(tiny_model: Path) -> None:
    own = engine(tiny_model)
    made = ids(run(own, [EngineRequest(PROMPTS[0], SAMPLED)] * 3))
    assert len({tuple(row) for row in made}) == 3


def test_aborted_rows_never_finish_and_the_others_do(tiny_model: Path) -> None:
    whole = ids(run(engine(tiny_model), requests()))
    own = engine(tiny_model, max_num_seqs=4)
    run(own, requests(), steps=3)
    own.abort(["1", "5"])
    done: dict[str, EngineOutput] = {}
    while len(done) < 4:
        done |= {output.request_id: output for output in own.step()}
    assert ids(done) == [whole[number] for number in (0, 2, 3, 4)]
    assert not own._running and not own._waiting


@pytest.mark.parametrize("mine", [{}, {"max_num_seqs": 1}])
def test_without_a_cache_rows_are_the_same_and_their_gap_is_0(tiny_model: Path, mine: dict[str, Any]) -> None:
    """Trainer and engine pass single rows through the same code, so that no bit differs in float32."""
    plain, cached = engine(tiny_model, engine_kwargs={"use_cache": False}, **mine), engine(tiny_model)
    assert not plain.uses_cache and cached.uses_cache
    made = run(plain, requests())
    assert ids(made) == ids(run(cached, requests()))
    for number, request in enumerate(requests()):
        generation = made[str(number)].generation
        row = lay_out(TokenBatch.of([request.prompt_ids], [generation.token_ids]), [[0]])
        own, *_ = plain.policy(row.input_ids, row.logit_index, row.targets)
        assert np.array_equal(own.numpy(), generation.log_probs)


def test_a_row_of_two_versions_keeps_the_log_probs_of_each(tiny_model: Path) -> None:
    own = engine(tiny_model, engine_kwargs={"use_cache": False})
    shards = [pack(parts(own.policy.lm, 0, torch.float32), 0, 1 << 20, lambda data: data)]
    own.load(shards, 1.0, 3)
    run(own, [EngineRequest(PROMPTS[0], SAMPLED, 1, ignore_eos=True)], steps=5)
    before = list(own._running[0].log_probs)
    own.update(shards, 1.0, 4, recompute=True)
    done = run(own, [])
    while not done:
        done = {output.request_id: output for output in own.step()}
    assert done["0"].generation.version_runs == ((3, 5), (4, 15))
    assert done["0"].generation.log_probs[:5].tolist() == np.array(before, np.float32).tolist()


def test_a_model_whose_cache_computes_other_numbers_passes_whole_rows(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipeline.rollout.engines.hf.cache.WindowCache.decode", lambda self, lm, tokens: 1 / 0)
    own = engine(tiny_model)
    assert not own.uses_cache
    assert "passes whole rows, which is slow" in caplog.text and "division by zero" in caplog.text
    assert len(ids(run(own, requests()))) == 6


def test_a_text_ends_a_response_when_its_last_token_comes(tiny_model: Path) -> None:
    own = engine(tiny_model)
    tokenizer = own._tokenizer
    tokens = tokenizer.encode("say 12 = 7 + 5 now", add_special_tokens=False)
    ends = [count for count in range(1, len(tokens) + 1) if own._has_stop(tokens[:count], ["7 +", "none"])]
    (end,) = ends
    assert "7 +" in tokenizer.decode(tokens[:end]) and "7 +" not in tokenizer.decode(tokens[: end - 1])
    assert not own._has_stop(tokens, ["8"])


def test_only_settings_that_the_engine_honours_pass(tiny_model: Path) -> None:
    own = engine(tiny_model)
    with pytest.raises(NotImplementedError):
        own.sleep()
    with pytest.raises(NotImplementedError):
        own.wake([], 1.0, 0)
