import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.data import DataConfig
from pipeline.prompts.chat import ChatTokenizer

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
        (None, "None is not a list of messages"),
        ([], r"\[\] is not a list of messages"),
        ("text", r"not JSON \(.*\): text; a list or an object is needed"),
        (["text"], "message 0 is 'text'"),
        ([*user("x"), {"role": "user", "content": None}], "message 1 has no content"),
        ([{"role": None, "content": "x"}], "message 0 has no role"),
        ([{"content": "x"}], "message 0 has no role"),
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
