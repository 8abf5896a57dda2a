"""Settings to functions, and how the user's code is found."""

import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_config
from pipeline.config.reward import CustomRewardConfig, RewardConfig
from pipeline.reward.functions import ONLY, Function, functions, limit_of, load
from tests.reward.rewards import written

KEY = "reward.custom_reward_function"


def own(path: str, **settings: Any) -> Function:
    return Function("own", "reward.functions.own", 1.0, path, **settings)


def test_the_sandbox_has_limits_of_its_own() -> None:
    config = RewardConfig(timeout_s=5)
    (rule,) = functions(config)
    assert limit_of(rule, "gsm8k", config) == 5
    assert limit_of(rule, "taco", config) > config.sandbox.total_timeout_s
    config.sandbox.url = "http://host"
    assert limit_of(rule, "taco", config) > config.sandbox.url_timeout_s
    assert limit_of(own("m"), "taco", config) == 1


def test_files_of_one_name_are_two_modules_and_one_file_is_loaded_once(tmp_path: Path) -> None:
    source = "count = []\ndef f(**row):\n    count.append(1)\n    return len(count)\ng = f\n"
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, source)
    f = load(own(str(tmp_path / "a" / "mine.py"), attribute="f"))
    g = load(own(str(tmp_path / "a" / "mine.py"), attribute="g"))
    other = load(own(str(tmp_path / "b" / "mine.py"), attribute="f"))
    assert (f(), g(), other()) == (1, 2, 1)
    assert f.__module__ in sys.modules and f.__module__ != other.__module__


@pytest.mark.parametrize(
    ("path", "why"),
    [
        *((path, r"does not exist \(no .*\); check the path") for path in ("no/such/file.py", "/nope.py", "folder/")),
        *((path, r"is neither a Python file \(.py\) nor a module") for path in ("not a module", "", "a..b")),
        ("/tmp", "is a folder"),
    ],
)
def test_a_path_that_is_neither_file_nor_module(path: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"reward\.functions\.own\.path is .*, which {why}"):
        load(own(path))


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("raise OSError('no disk')", {}, "failed with OSError: no disk"),
        ("def compute_score(solution_strs): return []", {"batch": True}, r"compute_score\(data_sources, "),
        ("def compute_score(table, other): return []", {"batch": True}, r"called as compute_score\(table\)"),
        ("compute_score = 3", {}, "has no such function"),
        ("def compute_score(**row): return 1", {"kwargs": {"extra_info": 1}}, r"own\.kwargs may not hold extra_info"),
    ],
)
def test_a_function_that_cannot_be_called(tmp_path: Path, source: str, settings: dict[str, Any], message: str) -> None:
    path = written(tmp_path, source)
    for _ in range(2):  # a module that failed is not half there
        with pytest.raises(ValueError, match=message):
            load(own(path, **settings))


def test_settings_become_functions_in_their_order() -> None:
    assert functions(RewardConfig(timeout_s=7)) == (Function(ONLY, KEY, 7),)
    custom = CustomRewardConfig(path="a.b", name="grade", reward_kwargs={"x": 1})
    (grade,) = functions(RewardConfig(custom_reward_function=custom))
    assert grade == Function(ONLY, KEY, 60, "a.b", "grade", {"x": 1})
    given = [
        *("reward.functions.b.path=m", "reward.functions.b.weight=0.5", "reward.functions.b.batch=true"),
        *("reward.functions.b.timeout_s=9", "reward.functions.b.kwargs={longest: 200}"),
        *("reward.functions.a.name=grade", "reward.timeout_s=3"),
    ]
    b, a = functions(load_config(given).reward)
    kwargs = {"longest": 200}
    assert b == Function("b", "reward.functions.b", 9, "m", kwargs=kwargs, weight=0.5, batch=True)
    assert a == Function("a", "reward.functions.a", 3, attribute="grade")


@pytest.mark.parametrize("batch", [False, True])
def test_a_function_that_is_built_in_and_has_no_signature_is_named(batch: bool) -> None:
    with pytest.raises(ValueError, match=r"^reward\.functions\.own: max in builtins is built in, and does not say"):
        load(own("builtins", attribute="max", batch=batch))
