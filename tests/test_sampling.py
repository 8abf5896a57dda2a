"""How responses are sampled: by the run's settings, and by what a row asks for."""

import json
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.sampling import KEY, Sampling, asked, check_agents, row_limits


@pytest.fixture
def config() -> Config:
    made = Config()
    made.data.max_response_length = 64
    made.rollout.top_p, made.rollout.stop, made.rollout.min_tokens = 0.9, ["###"], 2
    made.rollout.val_kwargs.temperature, made.rollout.val_kwargs.top_k = 0.4, 30
    return made


def row(**values: Any) -> str:
    return json.dumps({"index": 3, KEY: values})


def test_each_split_has_its_settings(config: Config) -> None:
    assert Sampling.of(config.rollout, 64, "train") == Sampling(1.0, 0.9, -1, 2, 64, ("###",))
    assert Sampling.of(config.rollout, 64, "val") == Sampling(0.4, 1.0, 30, 2, 64, ("###",))
    assert Sampling.of(config.rollout, 64, "val").greedy() == Sampling(0.0, 1.0, -1, 2, 64, ("###",))


@pytest.mark.parametrize(
    ("key", "value", "means"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 2.0, 2.0),
        ("top_p", 1, 1.0),
        ("top_k", -1, -1),
        ("top_k", 5.0, 5),
        ("min_p", 0.05, 0.05),
        ("min_tokens", 0, 0),
        ("max_tokens", 64, 64),
        ("stop", "</answer>", ("</answer>",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", [], ()),
    ],
)
def test_a_row_changes_one_thing_and_leaves_the_rest(config: Config, key: str, value: Any, means: Any) -> None:
    own = Sampling.of(config.rollout, 64, "val")
    changed = own.of_row(row(**{key: value}))
    assert vars(changed) == vars(own) | {key: means}
    assert type(getattr(changed, key)) is type(means)
    row_limits(config)["val"].check({KEY: {key: value}} if key != "min_tokens" else None)


@pytest.mark.parametrize(
    "text", ["{}", "null", '"text"', "[1]", '{"index": 3}', f'{{"{KEY}": null}}', row(), row(stop=None)]
)
def test_most_rows_ask_for_nothing(config: Config, text: str) -> None:
    own = Sampling.of(config.rollout, 64, "train")
    assert own.of_row(text) == own
    row_limits(config)["train"].check(json.loads(text))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("hot", f"`extra_info.{KEY}` is 'hot'; it must be an object"),
        ({"temprature": 1}, f"`extra_info.{KEY}.temprature` is not known; a row may set temperature, top_p"),
        ({"temperature": "hot"}, "temperature` is 'hot'; it must be 0, or from 0.01 to 2"),
        ({"temperature": 0.001}, "temperature` is 0.001; it must be 0, or from 0.01 to 2"),
        ({"temperature": 2.5}, "temperature` is 2.5;"),
        ({"temperature": -1}, "temperature` is -1;"),
        ({"temperature": True}, "temperature` is True;"),
        ({"temperature": float("nan")}, "temperature` is nan;"),
        ({"top_p": 0}, "top_p` is 0; it must be a number above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p` is 1.1;"),
        ({"top_k": 0}, "top_k` is 0; it must be a whole number of at least 1, or -1"),
        ({"top_k": 2.5}, "top_k` is 2.5;"),
        ({"min_p": 1.5}, "min_p` is 1.5; it must be a number from 0 to 1"),
        ({"min_tokens": -1}, "min_tokens` is -1;"),
        ({"max_tokens": 0}, "max_tokens` is 0; it must be a whole number of at least 1"),
        ({"max_tokens": float("inf")}, "max_tokens` is inf;"),
        ({"max_tokens": 65}, "max_tokens` is 65, above data.max_response_length=64"),
        ({"min_tokens": 9, "max_tokens": 8}, "at least min_tokens=9 and at most max_tokens=8 tokens"),
        ({"max_tokens": 1}, "at least min_tokens=2 and at most max_tokens=1 tokens"),
        ({"stop": 5}, "stop` is 5; it must be a text or a list of texts"),
        ({"stop": [""]}, "stop` holds ''; it must be"),
        ({"stop": ["a", None]}, "stop` holds None;"),
        ({"stop": ["x"] * 17}, "stop` has 17 texts, more than 16;"),
        ({"stop": "x" * 257}, "stop` holds a text of 257 characters, more than 256;"),
    ],
)
def test_what_cannot_be_sampled_is_refused(config: Config, values: Any, words: str) -> None:
    with pytest.raises(ValueError) as error:
        row_limits(config)["val"].check({KEY: values})
    assert words in str(error.value)


def test_training_rows_keep_the_temperature_that_the_trainer_takes(config: Config) -> None:
    with pytest.raises(ValueError, match="this row may not set it: the trainer computes .* remove it from the row"):
        row_limits(config)["train"].check({KEY: {"temperature": 0.5}})
    row_limits(config)["val"].check({KEY: {"temperature": 0.5}})


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "min_tokens"])
@pytest.mark.parametrize(("name", "allowed"), [("vllm", True), ("hf", True), ("sglang", False)])
def test_training_rows_are_truncated_where_the_engine_names_the_tokens(
    config: Config, key: str, name: str, allowed: bool
) -> None:
    config.rollout.name = name
    limits, wanted = row_limits(config), {KEY: {key: 2 if key == "min_tokens" else 1}}
    limits["val"].check(wanted)
    limits["train"].check({KEY: {"max_tokens": 8, "stop": "x"}})
    if allowed:
        limits["train"].check(wanted)
        return
    with pytest.raises(ValueError, match=f"rollout.name={name} does not return the tokens"):
        limits["train"].check(wanted)


@pytest.mark.parametrize("split", ["train", "val"])
def test_no_text_ends_an_answer_that_may_call_tools(config: Config, split: str) -> None:
    config.agent.tools = ["my_tools:calc"]
    row_limits(config)[split].check({KEY: {"max_tokens": 8}})
    with pytest.raises(
        ValueError, match="stop` is .*this row may not set it: a text could end an answer inside a call"
    ):
        row_limits(config)[split].check({KEY: {"stop": "x"}})


def test_names_are_those_of_the_file() -> None:
    everything = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "min_tokens": 1,
        "max_tokens": 2,
        "stop": ["a"],
    }
    assert asked({KEY: everything}) == everything | {"stop": ("a",)}


def test_agents_that_no_row_chooses_are_refused() -> None:
    check_agents({"solver": {}}, {None, "solver", "other"})
    with pytest.raises(ValueError, match=r"named.solvr is chosen by no row; .* solver \(the nearest is 'solver'\)"):
        check_agents({"solvr": {}}, {None, "solver"})
    with pytest.raises(ValueError, match="`agent_name` are: none$"):
        check_agents({"solver": {}}, {None})
