"""Prompts of a generator before those of the files; what samplers and generators learn, and how they are resumed."""

import json
import random
import re
from pathlib import Path

import pytest

from pipeline.config.data import DataConfig
from pipeline.prompts.feedback import Outcome
from pipeline.prompts.generator import Generator, make_generator
from pipeline.prompts.sampler import Sampler, make_sampler
from pipeline.store.cursor import PromptCursor
from tests.prompts.recorded import record


def row(text, **changes):
    return {
        "data_source": "made",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"ground_truth": len(text)},
    } | changes


class Random(Generator):
    """Some random rows; what was solved changes what comes."""

    def __init__(self, data, seed, most=3):
        super().__init__(data, seed)
        self.most, self.solved = most, 0.0
        self.random = random.Random(seed)

    def generate(self, iteration, count):
        many = min(count, self.random.randint(1, self.most))
        return [row(f"{iteration} {self.random.random()} {self.solved}") for _ in range(many)]

    def update(self, iteration, outcomes):
        self.solved += sum(outcome.solved for outcome in outcomes) * iteration

    def state_dict(self):
        return {"random": self.random.getstate(), "solved": self.solved}

    def load_state_dict(self, state):
        if state:
            version, internal, gauss = state["random"]
            self.random.setstate((version, tuple(internal), gauss))
            self.solved = state["solved"]
        else:
            self.random.seed(self.seed)
            self.solved = 0.0


class Says(Generator):
    """Gives its argument."""

    def __init__(self, data, seed, says=None):
        super().__init__(data, seed)
        self.says = says

    def generate(self, iteration, count):
        return self.says(count) if callable(self.says) else self.says


class BadState(Random):
    def state_dict(self):
        return {"set": {1}}


class Curious(Sampler):
    """Keeps the iterations whose outcomes it was given."""

    def __init__(self, data, seed):
        super().__init__(data, seed)
        self.seen = []

    def update(self, iteration, outcomes):
        self.seen.append([iteration, len(outcomes)])

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = list(state.get("seen", []))


@pytest.fixture
def loader(loader_of, write, prompt_row):
    """Makes a loader of ten rows, or of no files."""

    def make(files=True, lag=2, **data):
        rows = [prompt_row(i, data_source="abc"[i % 3]) for i in range(10)]
        return loader_of(write(rows) if files else None, lag=lag, **data)

    return make


def name(generator):
    return f"{__name__}:{generator.__name__}"


def recorded(loader, number, rows):
    stamped = [row | {"split": "train", "chunk": 0, "iteration": number} for row in rows]
    record(loader._run_dir, stamped, [[float(row["prompt_index"] % 2), number / 100] for row in rows])


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"sampler": "weighted", "source_weights": {"a": 1, "b": 2, "c": 1}},
        {"sampler": "solve_rate"},
        {"sampler": "tests.prompts.test_sampler:EasyFirst"},
        {"generator": name(Random)},
        {"generator": name(Random), "sampler": "solve_rate", "generator_kwargs": {"most": 2}},
    ],
)
def test_a_run_that_goes_on_from_any_state_makes_the_same_prompts(loader, data):
    first, whole, states = loader(**data), [], [PromptCursor()]
    for number in range(1, 9):
        whole.append(first.iteration(number, 5))
        states.append(PromptCursor.from_json(json.loads(json.dumps(first.cursor.to_json()))))
        recorded(first, number, whole[-1])
    assert len({row["uid"] for rows in whole for row in rows}) == 40
    for stop in range(8):
        # In another process, and in the same.
        for again in (loader(**data), first):
            again.load(states[stop])
            for number in range(stop + 1, 9):
                assert again.iteration(number, 5) == whole[number - 1], (stop, number)


def test_outcomes_come_in_turn_and_late(loader):
    made = loader(sampler=name(Curious), lag=3)
    for number in range(1, 7):
        rows = made.iteration(number, 4)
        assert made.sampler.seen == [[iteration, 4] for iteration in range(1, number - 2)]
        recorded(made, number, rows)
    again = loader(sampler=name(Curious), lag=3)
    again.load(made.cursor)
    again.iteration(7, 4)
    assert again.sampler.seen == [[i, 4] for i in range(1, 5)]


def test_generated_prompts_come_first_and_files_fill_up(loader):
    made = loader(generator=name(Says), generator_kwargs={"says": [row("x"), row("y")]}, shuffle=False)
    rows = made.iteration(3, 5)
    assert [row["uid"] for row in rows] == ["g3-0", "g3-1", "0-0", "0-1", "0-2"]
    assert [row["prompt_index"] for row in rows] == [-1, -1, 0, 1, 2]
    assert [row["data_source"] for row in rows] == ["made", "made", "a", "b", "c"]
    assert (made.generated, rows[0]["ground_truth"], rows[0]["extra_info"]) == (2, "1", "{}")
    assert [row["uid"] for row in made.iteration(4, 5)][2:] == ["0-3", "0-4", "0-5"]


def test_without_files_it_is_called_until_there_are_enough_or_none(loader):
    made = loader(files=False, generator=name(Says), generator_kwargs={"says": lambda count: [row("x")]})
    assert [row["uid"] for row in made.iteration(1, 4)] == [f"g1-{i}" for i in range(4)]
    made.generator.says = []
    assert made.iteration(2, 4) == []


FILTERED = {"max_prompt_length": 40, "filter_overlong_prompts": True}


def test_generated_rows_are_checked_like_others(loader):
    said = [row("x"), row("x" * 99), row("y", data_source=None), row("z")]
    made = loader(generator=name(Says), generator_kwargs={"says": said}, max_bad_rows=1, **FILTERED)
    rows = made.iteration(1, 5)
    assert [row["uid"] for row in rows][:2] == ["g1-0", "g1-3"]
    assert (made.encoder.filtered_overlong, made.encoder.quarantine.count) == (1, 1)
    with pytest.raises(ValueError, match=r"data\.generator, row 2 \(row group 2\): `data_source` is null"):
        made.iteration(2, 5)


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (None, "returned None; give a list of rows"),
        ([5], r"returned \[5\]; give a list of rows"),
        ([row("x")] * 5, "returned 5 rows, more than the 4"),
        (lambda count: [row("x" * 99)], "100 times for the prompts of iteration 1 and gave 100 rows, but too few"),
    ],
)
def test_what_a_generator_must_not_give(loader, says, message):
    made = loader(files=False, generator=name(Says), generator_kwargs={"says": says}, **FILTERED)
    with pytest.raises(ValueError, match=message):
        made.iteration(1, 4)


def test_a_state_that_json_cannot_hold(loader):
    made = loader(generator=name(BadState))
    with pytest.raises(ValueError, match=r"data\.generator: BadState\.state_dict\(\) returned what JSON cannot hold"):
        _ = made.cursor


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine", "'mine' is not an import path"),
        ("operator:add", "is not a class derived from .*Generator"),
        (name(Random), r"cannot be made with data.generator_kwargs=\{'least': 1\}"),
    ],
)
def test_generators_that_cannot_be_made(path, message):
    with pytest.raises(ValueError, match=message):
        make_generator(DataConfig(generator=path, generator_kwargs={"least": 1}), 0)


def test_the_classes_of_the_documentation_work(loader, tmp_path, monkeypatch, prompt_row):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    classes = [block for block in blocks if "class EasyFirst" in block or "class Sums" in block]
    assert len(classes) == 2
    (tmp_path / "my_data.py").write_text("\n".join(classes))
    monkeypatch.syspath_prepend(str(tmp_path))

    made = loader(generator="my_data:Sums", generator_kwargs={"most": 2})
    first, sampler = made.iteration(1, 4), make_sampler(DataConfig(sampler="my_data:EasyFirst"), 1)
    assert [row["data_source"] == "my-sums" for row in first] == [True, True, False, False]
    hard = prompt_row(0, extra_info={"difficulty": 1.05})
    assert sampler.chance(0, hard) == 0.0
    solved = [Outcome(-1, "my-sums", [], "3", {}, [1.0], 1.0)] * 9
    made.generator.update(1, solved)
    sampler.update(1, solved)
    assert sampler.chance(0, hard) == 1.0
    for one in (sampler, made.generator):
        again = type(one)(DataConfig(), 1)
        again.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert again.state_dict() == one.state_dict() != type(one)(DataConfig(), 1).state_dict()


def test_rows_that_pandas_read_have_no_nulls_of_other_rows(loader, write, prompt_row):
    """`pandas` gives arrays, and the nulls that Arrow adds."""
    import pandas as pd

    calls = [{"function": {"name": name, "arguments": given}} for name, given in (("f", {"x": 1}), ("g", {"y": None}))]
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"
    asked = [{"role": "user", "content": "x"}]
    prompts = [[*asked, {"role": "assistant", "content": "", "tool_calls": [call]}, *asked] for call in calls]
    frame = pd.read_parquet(write([prompt_row(i, prompt=prompt) for i, prompt in enumerate(prompts)], "seed.parquet"))
    made = loader(False, generator=name(Says), apply_chat_template_kwargs={"chat_template": template})
    made.generator.says = frame.to_dict("records")
    rows = made.generate(1, 2)
    arguments = [json.loads(row["prompt"])[1]["tool_calls"][0]["function"]["arguments"] for row in rows]
    assert arguments == [{"x": 1}, {}]


def test_a_generated_row_that_cannot_be_read_has_its_place(loader):
    made = loader(False, generator=name(Says))
    made.generator.says = [row("x"), row("y", extra_info="{")]
    with pytest.raises(ValueError, match=r"^data\.generator, row 1 .*: column 'extra_info': not JSON"):
        made.generate(1, 2)
