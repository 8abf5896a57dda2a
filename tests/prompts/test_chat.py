import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.prompts.chat import ChatTokenizer, load_tokenizer
from pipeline.prompts.prompt_file import Place

PLACE = Place("f.parquet", 2, 17)
WHERE = r"f\.parquet, row 17 \(row group 2\), column 'prompt' \(data\.prompt_key\): "


def user(content):
    return [{"role": "user", "content": content}]


def test_tokens_are_those_of_the_chat_template_with_generation_prompt(tokenizer):
    conversations = [user("hé 1"), [{"role": "system", "content": "s"}, *user("two")], user("")]
    chat = ChatTokenizer(tokenizer, DataConfig())
    expected = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] for messages in conversations
    ]
    assert chat(conversations, [PLACE] * 3) == expected
    assert tokenizer.decode(expected[0]) == "<user>hé 1<assistant>"
    assert chat([], []) == []


def test_template_arguments(tokenizer):
    loud = ChatTokenizer(tokenizer, DataConfig(apply_chat_template_kwargs={"shout": True}))
    assert tokenizer.decode(loud([user("x")], [PLACE])[0]) == "<user>xLOUD<assistant>"
    with pytest.raises(ValueError, match=r"data\.apply_chat_template_kwargs sets tokenize, which"):
        ChatTokenizer(tokenizer, DataConfig(apply_chat_template_kwargs={"tokenize": False}))


def test_fields_that_are_null_are_not_there_for_the_template(tokenizer):
    chat = ChatTokenizer(tokenizer, DataConfig())
    (ids,) = chat([[{"role": "user", "content": "x", "tool": None}]], [PLACE])
    assert tokenizer.decode(ids) == "<user>x<assistant>"
    (ids,) = chat([[{"role": "user", "content": "x", "tool": "t"}]], [PLACE])
    assert tokenizer.decode(ids) == "<user>x!t<assistant>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "the prompt is null"),
        ([], "the prompt is an empty list"),
        ("text", "the prompt is of type str"),
        (["text"], "message 0 is 'text'"),
        ([*user("x"), {"role": "user", "content": None}], "`content` of message 1 is None"),
        ([{"role": None, "content": "x"}], "`role` of message 0 is None"),
        ([{"content": "x"}], "`role` of message 0 is None"),
        ([{"role": "alien", "content": "x"}], "the model's chat template fails on this prompt: .*no aliens.* Change"),
    ],
)
def test_a_row_that_is_not_chat_messages_is_named(tokenizer, messages, message):
    chat = ChatTokenizer(tokenizer, DataConfig())
    with pytest.raises(ValueError, match=WHERE + message):
        chat([user("fine"), messages], [Place("f.parquet", 0, 1), PLACE])


def test_a_template_that_makes_nothing(tokenizer):
    chat = ChatTokenizer(tokenizer, DataConfig(apply_chat_template_kwargs={"chat_template": "{{ '' }}"}))
    with pytest.raises(ValueError, match=WHERE + "the chat template makes an empty prompt"):
        chat([user("x")], [PLACE])


def test_a_broken_template(tokenizer):
    chat = ChatTokenizer(tokenizer, DataConfig(apply_chat_template_kwargs={"chat_template": "{% if %}"}))
    with pytest.raises(ValueError, match=WHERE + "the model's chat template fails on this prompt: TemplateSyntaxError"):
        chat([user("x")], [PLACE])


@given(length=st.integers(1, 40), limit=st.integers(1, 40))
def test_truncation_is_exact(tokenizer, length, limit):
    ids = list(range(length))

    def fit(truncation):
        return ChatTokenizer(tokenizer, DataConfig(max_prompt_length=limit, truncation=truncation)).fit(ids, PLACE)

    assert fit("left") == ids[max(length - limit, 0) :]
    assert fit("right") == ids[:limit]
    middle = fit("middle")
    assert len(middle) == min(length, limit)
    if length <= limit:
        assert middle == ids == fit("error")
    else:
        head = limit // 2
        assert middle[:head] == ids[:head]
        assert middle[head:] == ids[length - (limit - head) :]


def test_overlong(tokenizer):
    data = DataConfig(max_prompt_length=18)
    fits, long = user("x"), user("xx")
    places = [Place("f.parquet", 2, 16), PLACE]
    assert len(ChatTokenizer(tokenizer, data)([fits], [PLACE])[0]) == 18
    with pytest.raises(ValueError, match=WHERE + r"the prompt is 19 tokens .*data\.max_prompt_length=18; raise .* or"):
        ChatTokenizer(tokenizer, data)([fits, long], places)
    data.filter_overlong_prompts = True
    assert ChatTokenizer(tokenizer, data)([fits, long], places)[1] is None


def test_settings_out_of_range(tokenizer):
    with pytest.raises(ValueError, match=r"data\.truncation is 'center'; it must be one of error, left, right, middle"):
        ChatTokenizer(tokenizer, DataConfig(truncation="center"))
    with pytest.raises(ValueError, match=r"data\.max_prompt_length is 0"):
        ChatTokenizer(tokenizer, DataConfig(max_prompt_length=0))


def test_load_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "model").mkdir()
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path / "model"), tokenizer_path=str(tmp_path / "tokenizer")))
    data = DataConfig()
    assert ChatTokenizer(loaded, data)([user("x")], [PLACE]) == ChatTokenizer(tokenizer, data)([user("x")], [PLACE])


def test_load_tokenizer_refuses(tokenizer, tmp_path):
    def refuses(match, **settings):
        with pytest.raises(ValueError, match=match):
            load_tokenizer(ModelConfig(**settings))

    model, bare, broken = (tmp_path / name for name in ("model", "bare", "broken"))
    for folder in (model, broken):
        folder.mkdir()
    refuses(r"model\.path is not set")
    refuses(r"model\.path=/no/such/folder: there is no folder", path="/no/such/folder")
    refuses(rf"model\.path: folder {re.escape(str(model))} holds no tokenizer .*model\.tokenizer_path", path=str(model))
    refuses(r"model\.tokenizer_path=/no/such: there is no folder", path=str(model), tokenizer_path="/no/such")
    (model / "file").touch()
    refuses(r"file is a file; give a folder", path=str(model / "file"))
    (broken / "tokenizer.json").write_text("{")
    refuses(r"the tokenizer of .*broken cannot be loaded: ", path=str(broken))
    tokenizer.save_pretrained(bare)
    (bare / "chat_template.jinja").unlink()
    refuses(r"model\.path: the tokenizer of .*bare has no chat template; use", path=str(bare))
    assert load_tokenizer(ModelConfig(path=str(bare)), needs_chat_template=False).chat_template is None


def test_remote_code_runs_only_when_allowed(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*model\.trust_remote_code=true"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert not (tmp_path / "ran").exists()
