"""The arguments (Jinja variables) that a chat template reads, and a check of `data.apply_chat_template_kwargs`."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.errors import nearest
from pipeline.omissions import remedy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags around assistant messages that transformers adds to Jinja and that plain Jinja cannot parse."""
_CHOOSES = "chat_template"
"""Argument that replaces the tokenizer's chat template, or chooses one of several by name."""
_GIVEN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Variables that transformers passes to each template, in addition to special tokens."""


def check_template_arguments(tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `data.apply_chat_template_kwargs` that the chat template does not read.

    Raises:
        ValueError: such an argument was given; the sentence names it, and the arguments that the template reads.
    """
    names = [str(name) for name in arguments if name != _CHOOSES]
    if not names:
        return
    read = arguments_of(tokenizer, arguments.get(_CHOOSES))
    for name in names:
        if name not in read:
            known = sorted(read - _GIVEN - set(tokenizer.special_tokens_map))
            raise ValueError(
                f"data.apply_chat_template_kwargs.{name}: the model's chat template does not read {name!r}"
                f"{nearest(name, known)}; it reads {', '.join(known) or 'no argument'}. Leave it out, "
                f"or {remedy('reads it')}"
            )


def arguments_of(tokenizer: "PreTrainedTokenizerBase", template: str | None = None) -> set[str]:
    """Return the names of the variables that the chat template reads and does not set itself.

    Args:
        tokenizer: the tokenizer.
        template: a template to use instead, or the name of one of the tokenizer's templates; None for the tokenizer's
            template, or for all of them if there are several.

    Raises:
        ValueError: the template does not exist, or is not valid Jinja.
    """
    import jinja2.meta

    several = tokenizer.chat_template
    texts = (
        [*several.values()] if isinstance(several, dict) and not template else [tokenizer.get_chat_template(template)]
    )
    jinja = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = [jinja.parse(_GENERATION.sub("", text)) for text in texts]
        return set().union(*map(jinja2.meta.find_undeclared_variables, parsed))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the model's chat template is not valid Jinja: {error}") from error
