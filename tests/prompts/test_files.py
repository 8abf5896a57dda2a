from functools import partial
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.config.agent import AgentConfig
from pipeline.prompts.files import resolve
from pipeline.prompts.parquet import Slice, check_prompts, data_sources
from pipeline.sampling import row_limits

KEY = "data.train_files"


@pytest.fixture
def three(write, tmp_path, prompt_row):
    for number, name in enumerate(("b.parquet", "a.parquet", "deep/c.parquet")):
        write([prompt_row(i, data_source=f"source{number}") for i in range(number + 1)], name)
    (tmp_path / "_SUCCESS").touch()
    write([prompt_row(0)], "_temporary/d.parquet")
    return tmp_path


def names(files):
    return [Path(file.name).name for file in files]


def test_file_folder_glob_url_and_list_become_ordered_files(three):
    assert names(resolve(str(three), KEY)) == ["a.parquet", "b.parquet", "c.parquet"]
    assert names(resolve(three / "b.parquet", KEY)) == ["b.parquet"]
    assert names(resolve(f"{three}/?.parquet", KEY)) == ["a.parquet", "b.parquet"]
    assert names(resolve(f"{three}/**/c.parquet", KEY)) == ["c.parquet"]
    assert names(resolve(f"file://{three}/a.parquet", KEY)) == ["a.parquet"]
    assert names(resolve([f"{three}/b.parquet", f"{three}/[a]*", f"{three}/b.parquet"], KEY)) == [
        "b.parquet",
        "a.parquet",
        "b.parquet",
    ]


def test_a_name_with_wildcard_letters_is_taken_literally_when_it_exists(write, prompt_row):
    path = write([prompt_row(0)], "data[1].parquet")
    assert [file.name for file in resolve(path, KEY)] == [path]


def test_fsspec_url(three, named):
    memory = fsspec.filesystem("memory")
    memory.put(str(three / "a.parquet"), "/bucket/x/a.parquet")
    memory.put(str(three / "b.parquet"), "/bucket/x/b.parquet")
    try:
        for url in ("memory://bucket/x", "memory://bucket/*/*.parquet"):
            files = resolve(url, KEY)
            assert names(files) == ["a.parquet", "b.parquet"]
            assert files[0].name.startswith("memory://")
            assert data_sources(files) == {None: ["source0", "source1"]}
        with pytest.raises(FileNotFoundError) as refused:
            resolve("memory://bucket/y", KEY)
        named(refused.value, "data.train_files memory://bucket/y")
    finally:
        memory.rm("/bucket", recursive=True)


def test_slices_of_row_groups_are_read_in_file_order(write, prompt_row):
    path = write([prompt_row(i) for i in range(25)], row_group_rows=10)
    (file,) = resolve(path, KEY)
    assert file.row_groups == (10, 10, 5)
    assert file.rows == 25
    assert file.place(2, 3).row == 23
    read = list(file.read([Slice(2, 0, 2), Slice(1, 8, 10), Slice(1, 3, 4)], ["extra_info"]))
    assert [part for part, _ in read] == [Slice(1, 3, 4), Slice(1, 8, 10), Slice(2, 0, 2)]
    assert [row["extra_info"]["index"] for _, batch in read for row in batch.to_pylist()] == [13, 18, 19, 20, 21]


def test_data_sources(three, write, prompt_row, named):
    assert data_sources(resolve(str(three), KEY)) == {None: ["source0", "source1", "source2"]}
    path = write([prompt_row(i, data_source=None if i == 13 else "x") for i in range(20)], "null.parquet")
    with pytest.raises(ValueError) as refused:
        data_sources(resolve(path, KEY))
    named(refused.value, "null.parquet 13 1 data_source")


def test_data_sources_of_each_agent(write, prompt_row):
    names = [None, "calc", "calc", "game"]
    path = write([prompt_row(i, data_source=f"s{i}", agent_name=name) for i, name in enumerate(names)], "named.parquet")
    limits = row_limits(Config(agent=AgentConfig(named={"calc": {"tools": ["a:b"]}})))["train"]
    assert data_sources(resolve(path, KEY)) == {None: ["s0"], "calc": ["s1", "s2"], "game": ["s3"]}
    assert data_sources(resolve(path, KEY), True, limits.check_agent) == {None: ["s0"], "calc": ["s1", "s2"]}
    words = (
        r"named\.parquet, row 3 .*`agent_name` is 'game', which is not an agent of the config \(.*calc\); declare agent"
    )
    with pytest.raises(ValueError, match=words):
        data_sources(resolve(path, KEY), False, limits.check_agent)


def test_nothing_there(three, named):
    with pytest.raises(FileNotFoundError) as refused:
        resolve(f"{three}/aa.parquet", KEY)
    named(refused.value, "data.train_files /aa.parquet 'a.parquet'")
    with pytest.raises(FileNotFoundError) as refused:
        resolve(f"{three}/*.json", KEY)
    named(refused.value, "/*.json")
    (three / "empty").mkdir()
    with pytest.raises(FileNotFoundError) as refused:
        resolve(f"{three}/empty", KEY)
    named(refused.value, "/empty")


@pytest.mark.parametrize("paths", [None, 5, {"a": 1}, []])
def test_not_a_path(paths, named):
    with pytest.raises(ValueError) as refused:
        resolve(paths, "data.val_files")
    named(refused.value, "data.val_files")


def test_unknown_scheme(named):
    with pytest.raises(ValueError) as refused:
        resolve("zz://a/b", KEY)
    named(refused.value, "data.train_files zz://a/b")


def test_unreadable_file(three, named):
    whole = (three / "a.parquet").read_bytes()
    for content in (whole[: len(whole) // 2], b"PAR1", b"not parquet at all"):
        (three / "a.parquet").write_bytes(content)
        with pytest.raises(ValueError) as refused:
            resolve(str(three), KEY)
        named(refused.value, "data.train_files /a.parquet")
    (three / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError) as refused:
        resolve(str(three), KEY)
    named(refused.value, "a.parquet 0")


def test_no_rows(write, prompt_row, named):
    path = write(pa.Table.from_pylist([prompt_row(0)]).slice(0, 0))
    with pytest.raises(ValueError) as refused:
        resolve(path, KEY)
    named(refused.value, "train.parquet")


@pytest.mark.parametrize("column", ["data_source", "reward_model"])
def test_missing_column(write, column, prompt_row, named):
    row = {name + "s" if name == column else name: value for name, value in prompt_row(0).items()}
    with pytest.raises(ValueError) as refused:
        resolve(write([row]), KEY)
    named(refused.value, f"'{column}' '{column}s'")


def test_prompt_key(write, prompt_row, named):
    path = write([{**prompt_row(0), "chat": prompt_row(0)["prompt"]}])
    assert len(resolve(path, KEY, partial(check_prompts, prompt_key="chat"))) == 1
    with pytest.raises(ValueError) as refused:
        resolve(path, KEY, partial(check_prompts, prompt_key="prompts"))
    named(refused.value, "'prompts' 'prompt' data.prompt_key")


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"prompt": 1}, "'prompt' data.prompt_key int64"),
        ({"prompt": ["plain text"]}, "'prompt' string"),
        ({"prompt": [{"role": "user", "text": "x"}]}, "'prompt' text"),
        ({"prompt": [{"role": "user", "content": 3}]}, "int64"),
        ({"data_source": 3}, "'data_source' int64"),
        ({"reward_model": 42}, "'reward_model' int64"),
        ({"reward_model": {"ground_truths": "42"}}, "'ground_truths'"),
    ],
)
def test_wrong_type(write, changes, keys, prompt_row, named):
    with pytest.raises(ValueError) as refused:
        resolve(write([prompt_row(0, **changes)]), KEY)
    named(refused.value, f"data.train_files train.parquet {keys}")


def test_large_and_dictionary_types_are_accepted(write, prompt_row):
    message = pa.struct([("role", pa.dictionary(pa.int32(), pa.string())), ("content", pa.large_string())])
    table = pa.Table.from_pylist([prompt_row(0)])
    columns = {name: table[name] for name in table.column_names}
    columns["prompt"] = pa.array([[{"role": "user", "content": "x"}]], pa.large_list(message))
    for source in (table["data_source"].dictionary_encode(), table["data_source"].cast(pa.string_view())):
        columns["data_source"] = source
        assert data_sources(resolve(write(pa.table(columns)), KEY)) == {None: ["countdown"]}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson.gz", "rows.json", "data.arrow"])
def test_other_formats_are_refused_with_the_command_that_converts_them(tmp_path, name, named):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError) as refused:
        resolve(str(tmp_path / name), KEY)
    named(refused.value, f"{name}")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.parquet", "test.parquet"),
        ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"),
        ("sft_train.parquet", "sft_validation.parquet"),
        ("train/0.parquet", "dev/0.parquet"),
    ],
)
def test_a_folder_with_two_splits_is_refused(write, tmp_path, prompt_row, train, test, named):
    write([prompt_row(0)], train)
    assert names(resolve(str(tmp_path), KEY)) == [Path(train).name]
    write([prompt_row(1)], test)
    with pytest.raises(FileNotFoundError) as refused:
        resolve(str(tmp_path), KEY)
    named(refused.value, f"{KEY} {tmp_path}")
    assert names(resolve(f"{tmp_path}/{train}", KEY)) == [Path(train).name]
    assert len(resolve(f"{tmp_path}/**/*.parquet", KEY)) == 2


def test_words_that_only_contain_the_name_of_a_split_are_no_splits(write, tmp_path, prompt_row):
    for name in ("latest.parquet", "trainer.parquet", "contest.parquet", "train_1.parquet", "train_unit_test.parquet"):
        write([prompt_row(0)], name)
    write([prompt_row(0)], "_old/test.parquet")
    assert len(resolve(str(tmp_path), KEY)) == 5


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "Delta Lake"),
        (".hoodie/hoodie.properties", "Hudi"),
        ("metadata/00001-5f3c.metadata.json", "Iceberg"),
    ],
)
def test_a_table_whose_log_says_which_files_count_is_refused(write, tmp_path, prompt_row, log, kind, named):
    write([prompt_row(0)], "part-0.parquet")
    (tmp_path / log).parent.mkdir()
    (tmp_path / log).write_text("{}")
    with pytest.raises(FileNotFoundError) as refused:
        resolve(str(tmp_path), KEY)
    named(refused.value, f"{KEY} {tmp_path} {kind}")


def test_two_columns_of_one_name_are_refused(write, prompt_row, named):
    table = pa.Table.from_pylist([prompt_row(0)])
    path = write(table.append_column("prompt", table["prompt"]), "twice.parquet")
    for check in (check_prompts, lambda schema, where: None):
        with pytest.raises(ValueError) as refused:
            resolve(path, KEY, check)
        named(refused.value, "data.train_files twice.parquet 'prompt'")
