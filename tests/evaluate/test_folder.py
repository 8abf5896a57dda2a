"""The folder of an evaluation: what may go on in it, and what is refused."""

import copy
import csv
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import Config, ConfigError
from pipeline.evaluate.folder import Folder, described, digest
from pipeline.evaluate.settings import used
from pipeline.evaluate.summary import Summary
from pipeline.rows import SPANS
from tests.evaluate.test_summary import TABLE


@pytest.fixture
def config(stream_config: Config) -> Config:
    return used(copy.deepcopy(stream_config))


def description(config: Config) -> dict:
    return described(config, [config.data.val_files])


def rows(chunk: int) -> pa.Table:
    table = TABLE.append_column("chunk", pa.array([chunk] * len(TABLE)))
    return table.append_column("split", pa.array(["val"] * len(TABLE)))


def test_parts_are_found_again(config: Config, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "deep" / "out")
    folder.check(description(config))
    folder.begin(description(config))
    for chunk in (0, 11, 2):
        folder.add(chunk, rows(chunk))
    assert list(folder.parts()) == [0, 2, 11]
    kept = pq.read_table(folder.parts()[11])
    assert kept["score"].equals(TABLE["score"]) and not {"chunk", "split"} & set(kept.column_names)
    (folder.responses / ".part-000003.parquet.tmp").write_text("half of one")
    summary = Summary([1])
    again = Folder(tmp_path / "deep" / "out")
    again.check(description(config))
    assert again.read(summary) == {0, 2, 11} and summary.prompts == 9
    assert len(pq.read_table(folder.responses)) == 3 * len(TABLE)


def test_parts_of_episodes_are_found_again(config: Config, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.begin(description(config))
    reply = [{"kind": 1, "tokens": len(ids) - 1} for ids in TABLE["response_ids"].to_pylist()]
    episodes = rows(0).append_column("spans", pa.array([[answer, {"tokens": 1, "kind": 0}] for answer in reply], SPANS))
    folder.add(0, episodes.append_column("turns", pa.array([1] * len(TABLE), pa.int32())))
    summary, plain = Summary([1]), Summary([1])
    folder.read(summary)
    plain.add(TABLE)
    assert summary.tokens == plain.tokens - len(TABLE) and summary.overall()["turns/mean"] == 1


def test_other_settings_are_refused(config: Config, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out")
    folder.begin(description(config))
    config.rollout.num_engines = 5
    folder.check(description(config))
    config.rollout.val_kwargs.temperature = 0.25
    with pytest.raises(ConfigError, match=r"another evaluation: .*temperature \(0.0 there, 0.25 now\); choose another"):
        folder.check(description(config))


def test_changed_files_are_refused(config: Config, tmp_path: Path) -> None:
    model, reward, prompts = tmp_path / "model", tmp_path / "reward.py", tmp_path / "val.parquet"
    game, tools, named = tmp_path / "game.py", tmp_path / "tools.py", tmp_path / "program.py"
    model.mkdir()
    for path in (model / "config.json", model / "model.safetensors", reward, prompts, game, tools, named):
        path.write_text("before")
    config.agent.named = {"other": {"program": f"{named}:run"}}
    config.agent.environment, config.agent.tools = f"{game}:Game", [str(tools), "module:calc"]
    config.model.path, config.data.val_files = str(model), str(prompts)
    config.reward.custom_reward_function.path = str(reward)
    folder, before = Folder(tmp_path / "out"), description(config)
    folder.begin(before)
    for path in (model / "model.safetensors", reward, prompts, game, tools, named):
        path.write_text("behind it")
        with pytest.raises(ConfigError, match=f"the file {path} has changed"):
            folder.check(description(config))
        assert digest(description(config)) != digest(before)
        path.write_text("before")
        size, when = before["files"][str(path)].split(" bytes of ")
        os.utime(path, ns=(int(when), int(when)))
        folder.check(description(config))
    assert size == "6"
    with pytest.raises(ConfigError, match="2 other prompt files"):
        folder.check(described(config, [config.data.val_files, "more.parquet"]))


def test_folders_of_something_else(config: Config, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match="is not empty and holds no evaluation.json; choose another --out"):
        Folder(tmp_path).check(description(config))
    with pytest.raises(ConfigError, match=r"notes.txt is a file; choose another --out"):
        Folder(tmp_path / "notes.txt" / "out").check(description(config))


def test_the_result(config: Config, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out")
    assert folder.result() == {}
    folder.begin(description(config))
    folder.add(0, rows(0))
    files = folder.report({"parts": 1, "complete": True}, [{"source": "s", "mean": 0.5}, {"source": "t", "maj@3": 1.0}])
    assert [path.name for path in files] == ["metrics.json", "table.csv"]
    assert folder.result()["complete"] and json.loads(files[0].read_text())["parts"] == 1
    with files[1].open() as file:
        assert list(csv.reader(file)) == [["source", "mean", "maj@3"], ["s", "0.5", ""], ["t", "", "1.0"]]
    folder.add(1, rows(1))
    assert folder.result() == {}, "it is not that of these parts"
