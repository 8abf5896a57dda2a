"""Arguments that a chat template does not read are refused by name."""

import pytest

from pipeline.models.template_arguments import arguments_of, check_template_arguments

TEMPLATE = (
    "{% if not date is defined %}{% set date = 'today' %}{% endif %}{{ bos_token }}{{ date }}"
    "{% for message in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}"
)


class Tokenizer:
    """As much of a tokenizer as is looked at."""

    special_tokens_map = {"bos_token": "<s>"}

    def __init__(self, template: str | dict[str, str]) -> None:
        self.chat_template = template

    def get_chat_template(self, template: str | None) -> str:
        return template or self.chat_template  # type: ignore[return-value]


def test_what_a_template_reads() -> None:
    assert arguments_of(Tokenizer(TEMPLATE)) == {"date", "bos_token", "messages", "enable_thinking"}  # type: ignore[arg-type]
    several = Tokenizer({"default": "{{ a }}", "tool_use": "{{ b }}"})
    assert arguments_of(several) == {"a", "b"}  # type: ignore[arg-type]


def test_arguments_that_it_does_not_read_are_named() -> None:
    tokenizer = Tokenizer(TEMPLATE)
    check_template_arguments(tokenizer, {"enable_thinking": False, "date": "1 May"})  # type: ignore[arg-type]
    check_template_arguments(tokenizer, {"chat_template": "{{ 数 }}", "数": 1})  # type: ignore[arg-type]
    sentence = (
        r"data.apply_chat_template_kwargs.enable_thinkng: the model's chat template does not read 'enable_thinkng' "
        r"\(the nearest is 'enable_thinking'\); it reads date, enable_thinking. Leave it out"
    )
    with pytest.raises(ValueError, match=sentence):
        check_template_arguments(tokenizer, {"date": "x", "enable_thinkng": False})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it reads no argument"):
        check_template_arguments(Tokenizer("{{ messages }}"), {"message": 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not valid Jinja"):
        check_template_arguments(Tokenizer("{% if %}"), {"a": 1})  # type: ignore[arg-type]
