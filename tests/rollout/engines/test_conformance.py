"""Every engine: its log-probs are the trainer's after every weight update, and its tokens are the ones it is asked."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import rows
from pipeline.config.engines import FACTS
from tests.rollout.engines.place import (
    BLOCK,
    MAX_TOKENS,
    PROMPT_TOKENS,
    Engine,
    acknowledged,
    baselines,
    cached_prompts,
    greedy,
    in_flight,
    open_place,
    overlapping,
    refused,
    repeated,
    responses,
    stopped,
    supports,
    updates,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


ENGINES = [name for name in FACTS if name != "sglang"]
"""SGLang's server needs an environment of its own (`tests/rollout/engines/sglang/`)."""


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    running = Engine(open_place, request.param, True, str(tmp_path_factory.mktemp("engine") / "model"))
    running.name = request.param
    yield running
    running.close()


@pytest.mark.parametrize("name", ENGINES)
def test_log_probs_of_an_untied_head_with_a_bias_are_the_trainers_after_every_update(name: str, tmp_path: Path) -> None:
    untied = Engine(open_place, name, False, str(tmp_path / "model"))
    try:
        test_log_probs_are_the_trainers_after_every_update(untied)
    finally:
        untied.close()


def test_log_probs_are_the_trainers_after_every_update(engine: Engine) -> None:
    found = engine(updates, 0.7)
    assert all(seen == {version} for version, seen in found["versions"])
    assert max(found["gaps"]) < 1e-4, found
    # The weights did change, so an engine that kept any of the old ones would have been noticed.
    assert min(found["stale"]) > 0.1, found


def test_greedy_validation(engine: Engine) -> None:
    found = engine(greedy)
    assert found["rows"] == 4, "one response for each prompt, none for rows that fill up the chunk"
    assert found["gap"] < 1e-4
    assert found["regret"] < 1e-5, "the likeliest token everywhere"
    assert found["same"]


def test_chunks_of_two_versions_in_flight(engine: Engine) -> None:
    found = engine(overlapping)
    assert found["versions"] == found["wanted"]
    assert max(found["gaps"]) < 1e-4, found


def test_seed_makes_responses_repeatable(engine: Engine) -> None:
    found = engine(repeated)
    assert found["first"] == found["again"]
    assert found["first"] != found["other"]
    for prompt in range(4):
        samples = found["first"][4 * prompt : 4 * prompt + 4]
        assert len({tuple(sample) for sample in samples}) == 4, "the samples of a group differ"


def test_greedy_baselines_beside_the_samples(engine: Engine) -> None:
    found = engine(baselines)
    samples, plain, greedy, alone = (found[name] for name in ("samples", "plain", "greedy", "alone"))
    assert found["rows"] == len(samples) + len(greedy) == 4 * 4 + 4
    assert greedy["uid"].to_pylist() == [f"0-{i}" for i in range(4)] and set(greedy["sample"].to_pylist()) == {4}
    for column in ("response_ids", "response", "finish_reason"):
        assert greedy[column].equals(alone[column]), "what the engine gives for a greedy request on its own"
        assert samples[column].equals(plain[column]), "what it gives without greedy requests"
    assert found["regret"] < 1e-5, "the likeliest token everywhere"
    assert max(found["gap"], found["greedy_gap"]) < 1e-4
    sampled = {tuple(ids) for ids in samples["response_ids"].to_pylist()}
    assert not sampled & {tuple(ids) for ids in greedy["response_ids"].to_pylist()}


def test_rows_of_responses(engine: Engine) -> None:
    table, eos, version = engine(responses)
    assert table.schema.names == [*rows.PROMPT.names, *rows.ROLLOUT.names]
    assert table["uid"].to_pylist() == [f"0-{i}" for i in range(24) for _ in range(4)]
    assert table["sample"].to_pylist() == [0, 1, 2, 3] * 24
    assert set(table["policy_version"].to_pylist()) == {version}
    ended = Counter()
    for row in table.to_pylist():
        ids = row["response_ids"]
        ended[row["finish_reason"]] += 1
        assert len(ids) == len(row["rollout_log_probs"]) == len(row["response_mask"]) and set(row["response_mask"]) == {
            1
        }
        assert "<|im_end|>" not in row["response"]
        if row["finish_reason"] == "stop":
            assert ids.index(eos) == len(ids) - 1, "the end-of-sequence token is the last one, and there"
        else:
            assert len(ids) == MAX_TOKENS and eos not in ids
    assert set(ended) == {"stop", "length"}, ended


def test_prefix_cache_serves_prompts_within_a_version(engine: Engine) -> None:
    """Else the tests above would say nothing about stale entries in it. Only vLLM keeps one."""
    if engine.name == "vllm":
        found = engine(cached_prompts)
        assert min(found["cached"]) >= PROMPT_TOKENS // BLOCK * BLOCK - BLOCK > 0, found


def test_updates_in_flight_give_each_token_the_log_prob_of_its_version(engine: Engine) -> None:
    found = engine(in_flight, "recompute")
    runs = [[run["version"] for run in row] for row in found["old"]]
    assert runs == [[found["first"], found["second"]]] * 16, "every response goes on with the new weights"
    assert all(sum(run["tokens"] for run in row) == MAX_TOKENS for row in found["old"])
    assert found["oldest"] == [found["first"]] * 16
    assert found["new"] == [[{"version": found["second"], "tokens": MAX_TOKENS}]] * 16
    assert max(found["gaps"].values()) < 1e-4, found["gaps"]


def test_updates_in_flight_may_keep_the_kv_cache(engine: Engine) -> None:
    found = engine(in_flight, "keep")
    assert [[run["version"] for run in row] for row in found["old"]] == [[found["first"], found["second"]]] * 16
    gaps = found["gaps"]
    assert gaps["old 0"] < 1e-4 and gaps["new 1"] < 1e-4, "new requests do not read what old weights cached"
    assert gaps["old 1"] > 1e-3, "the old ones do"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainers_log_probs_within_the_support_are_the_engines(engine: Engine, temperature: float) -> None:
    plain, *found = engine(supports, temperature)
    assert set(plain["table"]["support_sizes"].to_pylist()) == {None}
    *whole, cut = found
    for case in whole:
        assert abs(case["with"] - 1) < 1e-4 and case["gap with"] < 1e-4, case
        assert case["unknown"] == 0, case
        if case["settings"] == {"min_tokens": 40}:
            # The one token that ends a response is left out, up to the 40th token.
            sizes = case["table"]["support_sizes"].to_pylist()
            assert all(row == [-1] * 40 + [0] * (len(row) - 40) for row in sizes), sizes
        else:
            assert case["without"] < 0.999 and case["gap without"] > 1e-3, case
    tokens = sum(map(len, cut["table"]["response_ids"].to_pylist()))
    assert cut["unknown"] == tokens, "4 tokens are more than 2, and so are all others"


def test_what_ends_a_response(engine: Engine) -> None:
    found = engine(stopped)
    texts, stop = found["stop"]["response"].to_pylist(), found["text"]
    ended = [text for text in texts if stop in text]
    assert ended and all(text.index(stop) + len(stop) > len(text) - 10 for text in ended), "a part of a token"
    plain = found["plain"]["response_ids"].to_pylist()
    for ids, log_probs, before in zip(
        found["stop"]["response_ids"].to_pylist(), found["stop"]["rollout_log_probs"].to_pylist(), plain, strict=True
    ):
        assert ids == before[: len(ids)] and len(log_probs) == len(ids), "the same sample, cut off"
    assert any(
        len(ids) < len(before) for ids, before in zip(found["stop"]["response_ids"].to_pylist(), plain, strict=True)
    )
    assert found["gap"] < 1e-4
    assert min(map(len, plain)) < MAX_TOKENS == min(map(len, found["least"]["response_ids"].to_pylist()))
    assert max(map(len, found["most"]["response_ids"].to_pylist())) == 5
    shorter = 0
    columns = (found["turn"][name].to_pylist() for name in ("response_ids", "response_mask", "finish_reason"))
    for ids, mask, reason, before in zip(*columns, plain, strict=True):
        expected = before[: before.index(found["end"]) + 1] if found["end"] in before else before
        assert ids == expected and mask == [1] * len(ids), "the end belongs to the response"
        assert reason == "stop" or len(ids) == MAX_TOKENS
        shorter += len(ids) < len(before)
    assert shorter
    assert min(map(len, found["ignored"]["response_ids"].to_pylist())) == MAX_TOKENS


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (True, "bucket 1 of train rank 0 arrived damaged"),
        (False, "model.norm.weight"),
    ],
)
def test_wrong_weights_are_refused(engine: Engine, damaged: bool, words: str) -> None:
    said = engine(refused, damaged)
    assert words in said and said.endswith("afterwards True")


def test_every_version_is_loaded_and_acknowledged_once(engine: Engine) -> None:
    (first, *_), found = engine(updates, 1.0)["versions"], engine(acknowledged)
    versions = [version for _, version, _ in found["seen"]]
    assert versions == sorted(set(versions)) and first[0] in versions
    assert all(crc == found["published"][version] for _, version, crc in found["seen"])
    assert {name for name, _, _ in found["seen"]} == {found["name"]}
    assert found["name"].endswith(f":{engine.pid}"), "one process, one engine, all the time"
