"""The folder of an evaluation: what may go on in it, and what is refused."""

import copy
import csv
import json
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


@pytest.mark.parametrize("content", [b"", b"\0\0", b"[]", b"{}", b'{"files": 1, "settings": {}}', b"\xff"])
def test_a_damaged_description_is_named(config: Config, tmp_path: Path, content: bytes) -> None:
    folder = Folder(tmp_path)
    folder.begin(description(config))
    (tmp_path / "evaluation.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/evaluation.json is damaged .*; choose another --out"):
        folder.check(description(config))


@pytest.mark.parametrize("half", [0, 100, -100])
def test_damaged_responses_are_named(config: Config, tmp_path: Path, half: int) -> None:
    folder = Folder(tmp_path)
    folder.begin(description(config))
    folder.add(3, rows(3))
    part = folder.parts()[3]
    part.write_bytes(part.read_bytes()[:half])
    with pytest.raises(ConfigError, match=f"^{part} is damaged .*; delete it, and the same command"):
        folder.read(Summary([1]))
    part.unlink()
    assert folder.read(Summary([1])) == frozenset()


def test_a_damaged_result_is_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_bytes(b"\0")
    assert Folder(tmp_path).result() == {}


def test_other_settings_are_refused(config: Config, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out")
    folder.begin(description(config))
    config.rollout.num_engines = 5
    folder.check(description(config))
    config.rollout.val_kwargs.temperature = 0.25
    with pytest.raises(ConfigError, match=r"another evaluation: .*temperature \(0.0 there, 0.25 now\); choose another"):
        folder.check(description(config))


def project(config: Config, place: Path) -> None:
    """Let the evaluation read files in `place`, which are written if there are none."""
    files = {"reward.py": "import helpers", "game.py": "", "tools.py": "", "program.py": "", "helpers.py": ""}
    (place / "model").mkdir(parents=True, exist_ok=True)
    for name in ("model/config.json", "model/model.safetensors", *files):
        if not (place / name).exists():
            (place / name).write_text(files.get(name, "before"))
    if not (place / "val.parquet").exists():
        pq.write_table(pa.table({"prompt": [1, 2]}), place / "val.parquet")
    config.agent.named = {"other": {"program": f"{place}/program.py:run"}}
    config.agent.environment, config.agent.tools = f"{place}/game.py:Game", [f"{place}/tools.py", "module:calc"]
    config.model.path, config.data.val_files = f"{place}/model", f"{place}/val.parquet"
    config.reward.custom_reward_function.path = f"{place}/reward.py"


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("model/model.safetensors", "model.path: model.safetensors has"),
        ("val.parquet", "data.val_files: val.parquet has"),
        ("reward.py", "reward.custom_reward_function.path: reward.py has"),
        ("helpers.py", "reward.custom_reward_function.path: helpers.py has"),
        ("game.py", "agent.environment: game.py has"),
        ("tools.py", "agent.tools: tools.py has"),
        ("program.py", "agent.named.other.program: program.py has"),
        ("model/added_tokens.json", "model.path: added_tokens.json is new"),
    ],
)
def test_changed_files_are_refused(config: Config, tmp_path: Path, name: str, setting: str) -> None:
    project(config, tmp_path / "old")
    folder, before = Folder(tmp_path / "out"), description(config)
    folder.begin(before)
    changed = tmp_path / "old" / name
    kept = changed.read_bytes() if changed.exists() else None
    changed.write_text("# behind it")
    with pytest.raises(ConfigError, match=f"already holds another evaluation: {setting}"):
        folder.check(description(config))
    assert digest(description(config)) != digest(before)
    changed.unlink() if kept is None else changed.write_bytes(kept)
    folder.check(description(config))
    assert digest(description(config)) == digest(before)


def test_files_that_moved_are_the_same(config: Config, tmp_path: Path) -> None:
    project(config, tmp_path / "old")
    folder, before = Folder(tmp_path / "out"), description(config)
    folder.begin(before)
    (tmp_path / "old").rename(tmp_path / "new")
    project(config, tmp_path / "new")
    folder.check(description(config))
    assert digest(description(config)) == digest(before)
    config.agent.environment = f"{tmp_path}/new/game.py:Other"
    with pytest.raises(ConfigError, match="another evaluation: agent.environment"):
        folder.check(description(config))
    assert digest(description(config)) != digest(before)


def test_an_evaluation_of_an_earlier_version(config: Config, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out")
    folder.begin(description(config) | {"files": {"/a/b.parquet": "1 bytes of 2"}})
    with pytest.raises(ConfigError, match="an evaluation of an earlier version, which cannot be continued"):
        folder.check(description(config))


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
