"""Chat templates in the manner of several model families, each with a small tokenizer that has its control tokens."""

from dataclasses import dataclass
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "The value of an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}, "digits": {"type": "integer"}},
            "required": ["expression"],
        },
    },
}
GET = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {"type": "object", "properties": {"keys": {"type": "array", "items": {"type": "string"}}}},
    },
}
TOOLS = [CALC, GET]
PIECES = r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""As in most vocabularies: several newlines are one token, and punctuation takes the newlines behind it along."""

CHATML = """\
{%- if tools %}<|im_start|>system
You may call tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Thinking is left out of answers in front of the last user; neighbouring results share a turn of the user.
THINKING = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}{{ '\\n' }}<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in m.content -%}
{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if not think | default(true) %}<think>

</think>

{% endif %}{% endif %}"""

# Contents are trimmed, results are quoted as JSON, and an answer holds one call at most.
HEADERS = """\
<|begin_of_text|>
{%- for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ m.content | tojson if m.role == 'tool' else m.content | trim }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# User and model alternate strictly; there is no role for results.
ALTERNATING = """\
<bos>
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{#- #}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

# Channels; an answer in last place ends with another token; a result names the tool of the call in front of it.
CHANNELS = """\
{%- set ns = namespace(tool=none) %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if ns.tool is none %}{{ raise_exception('a result needs a call in front of it') }}{% endif %}
{#- #}<|start|>functions.{{ ns.tool }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}
{%- set ns.tool = m.tool_calls[0].function.name %}
{#- #}<|start|>assistant to=functions.{{ ns.tool }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# White space in front of the closing marker; calls in one list, whose arguments must be text; ids of nine characters.
INSTRUCT = """\
<s>
{%- for m in messages %}
{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + ', "id": "' + call.id + '"}' }}
{{- '' if loop.last else ', ' }}
{%- endfor %}] </s>
{%- else %} {{ m.content | trim }} </s>
{%- endif %}
{%- endfor %}"""

# Nothing ends an answer but the role of the next message.
UNCLOSED = """\
[gMASK]
{%- for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>
{% if m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>{% else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor %}
</tool_call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A chat template and its control tokens."""

    template: str
    special: str
    """Special tokens, the end of a turn first."""
    added: str = ""
    """Added tokens that are not special."""
    tool: bool = True
    """Whether it can continue with results of tools."""


FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|> <|im_start|>"),
    "thinking": Family(
        THINKING,
        "<|im_end|> <|im_start|>",
        "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>",
    ),
    "headers": Family(HEADERS, "<|eot_id|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|python_tag|>"),
    "alternating": Family(ALTERNATING, "<end_of_turn> <bos> <start_of_turn>", tool=False),
    "channels": Family(CHANNELS, "<|return|> <|end|> <|call|> <|start|> <|channel|> <|message|>"),
    "instruct": Family(INSTRUCT, "</s> <s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]"),
    "unclosed": Family(
        UNCLOSED,
        "<|user|> [gMASK] <|assistant|> <|observation|> <|system|>",
        "<tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>",
    ),
}


@cache
def plain(name: str) -> Tokenizer:
    """The family's byte-level tokenizer, to which all text is ordinary."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(
        [FAMILIES[name].template, "\n\n higher lower user\n assistant\n\n\n observed 12?\n\n"] * 9, trainer
    )
    return backend


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer."""
    family = FAMILIES[name]
    special = family.special.split()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain(name),
        eos_token=special[0],
        additional_special_tokens=special[1:],
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )
    made.add_tokens(family.added.split())
    return made
