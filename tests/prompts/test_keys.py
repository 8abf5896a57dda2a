"""Every key of `data` does something: change the key, see the change in the prompts of the first iterations."""

import itertools
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.config.schema import keys
from pipeline.prompts import stage
from pipeline.prompts.generator import Generator
from pipeline.prompts.sampler import SolveRate
from pipeline.prompts.stage import Schedule, loaders
from pipeline.sampling import row_limits
from tests.config.test_keys import changed

# "question 10" is one letter longer than "question 9".
SHORT = len("<user>question 9<assistant>")


class Made(Generator):
    def __init__(self, data: Any, seed: int, text: str = "made") -> None:
        super().__init__(data, seed)
        self.text = text

    def generate(self, iteration: int, count: int) -> list[dict[str, Any]]:
        prompt = [{"role": "user", "content": self.text}]
        return [{"data_source": "a", "prompt": prompt, "reward_model": {"ground_truth": 1}}]


class Tried(SolveRate):
    """To which some rows have been shown that are always solved."""

    def __init__(self, data: Any, seed: int, **kwargs: Any) -> None:
        super().__init__(data, seed, **kwargs)
        self._rates = dict.fromkeys(range(10), 1.0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


MADE, TRIED = f"{__name__}:Made", f"{__name__}:Tried"
WEIGHTED = {"data.sampler": "weighted", "data.source_weights": {"a": 1.0, "b": 1.0}}

# key: another value, and the settings under which it matters; FILE and BAD stand for files of prompts.
SHOWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "data.train_files": ("FILE", {}),
    "data.val_files": (None, {}),
    "data.prompt_key": ("chat", {}),
    "data.train_batch_size": (8, {}),
    "data.max_prompt_length": (SHORT, {"data.truncation": "left"}),
    "data.filter_overlong_prompts": (True, {"data.truncation": "left", "data.max_prompt_length": SHORT}),
    "data.truncation": ("right", {"data.truncation": "left", "data.max_prompt_length": SHORT}),
    "data.shuffle": (False, {}),
    "data.shuffle_window_rows": (4, {}),
    "data.train_max_samples": (5, {}),
    "data.val_max_samples": (1, {}),
    "data.sampler": (TRIED, {}),
    "data.sampler_kwargs": ({"least": 1.0}, {"data.sampler": TRIED}),
    "data.source_weights": ({"a": 1.0, "b": 9.0}, WEIGHTED),
    "data.generator": (MADE, {}),
    "data.generator_kwargs": ({"text": "other"}, {"data.generator": MADE}),
    "data.max_bad_rows": (2, {"data.train_files": "BAD", "data.max_bad_rows": 1}),
    "data.apply_chat_template_kwargs": ({"shout": True}, {}),
}
ELSEWHERE = {
    **dict.fromkeys(("data.image_key", "data.max_image_bytes"), "prompts with images, tests/prompts/test_images.py"),
    "data.max_response_length": "asked of the engine, tests/rollout/test_stage.py",
    **dict.fromkeys(("data.recorded_run", "data.recorded_iterations"), "a replay, tests/prompts/test_stage.py"),
}


@pytest.fixture
def given(write: Any, prompt_row: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lays settings over a config with files of prompts."""
    monkeypatch.setattr(stage, "load_tokenizer", lambda model: tokenizer)

    def row(number: int, source: str, **changes: Any) -> dict[str, Any]:
        made = prompt_row(number, data_source=source)
        return made | {"chat": [{"role": "user", "content": f"chat {number}"}]} | changes

    base = [row(i, "ab"[i % 2]) for i in range(20)]
    files = {
        "BASE": write(base, "base.parquet", 4),
        "FILE": write([row(i, "a") for i in range(50, 90)], "other.parquet", 4),
        "BAD": write([row(i, "a", **({"prompt": None} if i in (3, 12) else {})) for i in range(20)], "bad.parquet", 4),
    }
    start = Config()
    start.data.train_files = start.data.val_files = files["BASE"]
    start.data.train_batch_size, start.rollout.chunk_prompts = 4, 2

    def make(settings: dict[str, Any], config: Config = start) -> Config:
        return changed(config, {k: files.get(v, v) if isinstance(v, str) else v for k, v in settings.items()})

    return make


def seen(config: Config) -> Any:
    """Two epochs of prompts in iterations, and those of the validation; or why there are none."""
    try:
        train, val = loaders(config.data, config.model, row_limits(config), 1, epochs=2, lag=1000)
        iterations = []
        for number in itertools.count(1):
            rows = train.iteration(number, config.data.train_batch_size)
            if number > 12 or not rows:
                break
            iterations.append([(row["uid"], row["prompt_ids"]) for row in rows])
        validation = [row for table in val.epoch(2) for row in table.to_pylist()] if val else None
        return iterations, validation, Schedule.of(config, 5)
    except ValueError as error:
        return str(error)


def test_every_key_has_an_entry() -> None:
    declared = {key for key in keys(Config) if key.startswith("data.")}
    assert declared == SHOWN.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("key", SHOWN)
def test_changing_the_key_changes_what_happens(key: str, given: Any) -> None:
    value, settings = SHOWN[key]
    base = given(settings)
    before, after = seen(base), seen(given({key: value}, base))
    assert before != after
    assert seen(base) == before
    assert isinstance(before, str) == (key == "data.max_bad_rows") and not isinstance(after, str)
