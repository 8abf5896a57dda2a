import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.prompts.chat import ChatTokenizer, load_tokenizer

WHERE = r"^column 'prompt' \(data\.prompt_key\): "


def user(content):
    return [{"role": "user", "content": content}]


def test_tokens_are_those_of_the_chat_template_with_generation_prompt(tokenizer):
    conversations = [user("hé 1"), [{"role": "system", "content": "s"}, *user("two")], user("")]
    chat = ChatTokenizer(tokenizer, DataConfig())
    expected = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] for messages in conversations
    ]
    assert chat.encode(conversations) == expected
    assert tokenizer.decode(expected[0]) == "<user>hé 1<assistant>"
    assert chat.encode([]) == []


def test_template_arguments(tokenizer):
    loud = ChatTokenizer(tokenizer, DataConfig(apply_chat_template_kwargs={"shout": True}))
    assert tokenizer.decode(loud.encode([user("x")])[0]) == "<user>xLOUD<assistant>"
    with pytest.raises(ValueError, match=r"data\.apply_chat_template_kwargs sets tokenize, which"):
        ChatTokenizer(tokenizer, DataConfig(apply_chat_template_kwargs={"tokenize": False}))


def test_fields_that_are_null_are_not_there_for_the_template(tokenizer):
    chat = ChatTokenizer(tokenizer, DataConfig())
    for tool, text in ((None, "<user>x<assistant>"), ("t", "<user>x!t<assistant>")):
        (ids,) = chat.encode([[{"role": "user", "content": "x", "tool": tool}]])
        assert tokenizer.decode(ids) == text


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
        ([{"role": "alien", "content": "x"}], "the model's chat template fails on this prompt: .*no aliens"),
    ],
)
def test_what_is_not_chat_messages(tokenizer, messages, message):
    with pytest.raises(ValueError, match=WHERE + message):
        ChatTokenizer(tokenizer, DataConfig()).encode([messages])


@pytest.mark.parametrize(
    ("template", "message"), [("{{ '' }}", "makes an empty prompt"), ("{% if %}", "fails on this prompt: TemplateSynt")]
)
def test_templates_that_cannot_be_used(tokenizer, template, message):
    chat = ChatTokenizer(tokenizer, DataConfig(apply_chat_template_kwargs={"chat_template": template}))
    with pytest.raises(ValueError, match=message):
        chat.encode([user("x")])


@given(length=st.integers(1, 40), limit=st.integers(1, 40))
def test_truncation_is_exact(tokenizer, length, limit):
    ids = list(range(length))

    def fit(truncation):
        return ChatTokenizer(tokenizer, DataConfig(max_prompt_length=limit, truncation=truncation)).fit(ids)

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
        with pytest.raises(ValueError, match=rf"the prompt is {length} tokens .*data\.max_prompt_length={limit}"):
            fit("error")


def test_overlong_prompts_are_filtered_whatever_the_truncation(tokenizer):
    data = DataConfig(max_prompt_length=2, filter_overlong_prompts=True)
    chat = ChatTokenizer(tokenizer, data)
    assert chat.fit([1, 2]) == [1, 2]
    assert chat.fit([1, 2, 3]) is None


def test_load_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "model").mkdir()
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path / "model"), tokenizer_path=str(tmp_path / "tokenizer")))
    data = DataConfig()
    assert ChatTokenizer(loaded, data).encode([user("x")]) == ChatTokenizer(tokenizer, data).encode([user("x")])


def test_load_tokenizer_refuses(tokenizer, tmp_path):
    def refuses(match, **settings):
        with pytest.raises(ValueError, match=match):
            load_tokenizer(ModelConfig(**settings))

    model, bare, broken = (tmp_path / name for name in ("model", "bare", "broken"))
    for folder in (model, broken):
        folder.mkdir()
    refuses(r"model\.path is not set")
    refuses(r"model\.path=/no/such/folder: there is no folder", path="/no/such/folder")
    refuses(rf"model\.path: folder {re.escape(str(model))} holds no tokenizer", path=str(model))
    refuses(r"model\.tokenizer_path=/no/such: there is no folder", path=str(model), tokenizer_path="/no/such")
    (broken / "tokenizer.json").write_text("{")
    refuses(r"the tokenizer of .*broken cannot be loaded: ", path=str(broken))
    tokenizer.save_pretrained(bare)
    (bare / "chat_template.jinja").unlink()
    refuses(r"model\.path: the tokenizer of .*bare has no chat template", path=str(bare))
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
