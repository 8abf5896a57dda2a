"""Rows whose assertions cannot be judged: counted before anything starts, refused or set aside as they are read."""

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.config.agent import AgentConfig
from pipeline.config.data import DataConfig
from pipeline.prompts import files
from pipeline.prompts.assertions import check_assertions
from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.encode import PromptEncoder
from pipeline.prompts.loader import PromptLoader
from pipeline.prompts.quarantine import Quarantine
from pipeline.reward.truths import TruthCheck, truth_check
from pipeline.sampling import row_limits

FINE, KIND, LAMBDA = "assert f(1) == 2", "assert isinstance(f(1), int)", "assert f(lambda: 1) == 2"
CHECK = TruthCheck(frozenset([None]))


@pytest.fixture
def loader(write: Callable[..., str], prompt_row: Callable[..., dict[str, Any]], tokenizer: Any) -> Any:
    """Makes the loader of a file with these asserts, a list for each row."""

    def make(*truths: Any, source: str = "taco", name: str = "f.parquet", most: int = 0, **data: Any) -> PromptLoader:
        rows = [
            prompt_row(i, data_source=source, reward_model={"ground_truth": truth}) for i, truth in enumerate(truths)
        ]
        config = DataConfig(train_files=write(rows, name), shuffle=False, max_bad_rows=most, **data)
        encoder = PromptEncoder(ChatTokenizer(tokenizer, config), Quarantine(most), row_limits(Config())["train"])
        return PromptLoader(files.resolve(config.train_files, "data.train_files"), config, encoder, 0)

    return make


def test_rows_are_counted_by_what_cannot_be_judged(loader: Any) -> None:
    two = [loader([FINE], [FINE, KIND], [LAMBDA]), loader([KIND], [FINE], name="g.parquet")]
    counted = r"3 of 5 rows' assertions cannot be judged: `isinstance` \(2\), a lambda \(1\)"
    place = r"data\.train_files: .*f\.parquet, row 1 \(row group 0\): .*\[1\] cannot be judged: `isinstance`"
    with pytest.raises(ValueError, match=rf"^{counted}\. The first: {place}.*data\.max_bad_rows=3$"):
        check_assertions(two, CHECK, 2)
    assert check_assertions(two, CHECK, 3).endswith("they are set aside (data.max_bad_rows=3)")
    assert check_assertions([loader([FINE])], CHECK, 0) == ""


def test_other_rows_do_not_count(loader: Any) -> None:
    assert check_assertions([loader([KIND], source="countdown")], CHECK, 0) == ""
    assert check_assertions([loader([KIND])], TruthCheck(), 0) == ""
    # Rows that are not read, and rows with a fault of another kind.
    assert check_assertions([loader([FINE], [KIND], train_max_samples=1)], CHECK, 0) == ""
    assert check_assertions([loader(["f(1)"])], CHECK, 1).startswith("1 of 1 rows")
    assert check_assertions([loader('{"inputs": []}')], CHECK, 0) == ""


def test_a_row_is_refused_as_it_is_read(loader: Any) -> None:
    with pytest.raises(
        ValueError, match=r"f\.parquet, row 1 \(row group 0\): reward_model\.ground_truth .*`isinstance`"
    ):
        loader([FINE], [FINE, KIND], [FINE]).iteration(1, 3)
    lenient = loader([FINE], [FINE, KIND], [FINE], most=1)
    assert [row["prompt_index"] for row in lenient.iteration(1, 2)] == [0, 2]
    assert lenient.counts()["prompts/quarantined"] == 1
    with pytest.raises(ValueError, match="needs its output"):
        loader('{"inputs": ["1"], "outputs": ["1", "2"]}').iteration(1, 1)
    assert len(loader([KIND], source="countdown").iteration(1, 1)) == 1


def test_ground_truths_that_no_rule_reads_are_not_checked() -> None:
    config = Config()

    def checked(agent: AgentConfig, *names: str | None) -> list[bool]:
        check = truth_check(config.reward, agent)
        return [check.applies("taco", name) for name in names]

    assert checked(AgentConfig(), None) == [True]
    assert not truth_check(config.reward, AgentConfig()).applies("countdown", None)
    named = AgentConfig(environment="m:E", reward="environment", named={"b": {"reward": "sum"}})
    assert checked(named, None, "b") == [False, True]
    config.reward.functions = {"own": {"path": "my.module"}}
    assert checked(AgentConfig(), None) == [False]
    config.reward.functions = {"own": {"path": "my.module"}, "rule": {}}
    assert checked(AgentConfig(), None) == [True]
    config.reward.functions, config.reward.model.path = {}, "judge"
    assert checked(AgentConfig(), None) == [False]
