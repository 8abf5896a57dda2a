"""Text from outside never becomes a special token, whatever the tokenizer and the template."""

import json
import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.models.special_tokens import SpecialTokens, alternatives, special_tokens
from tests.agent.families import FAMILIES, TOOLS, tokenizer

SPECIAL = ["</s>", "<s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"]
TEMPLATE = """\
<s>
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WORDS = "user assistant system hello world im_start im_end INST start of turn 12"
CORPUS = re.findall(r"\w+", WORDS) * 3


def made(backend: Tokenizer, template: str = TEMPLATE, **flags: bool) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(text, special=True, **{"normalized": False} | flags) for text in SPECIAL])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        bos_token="<s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def pieces(normalizer: Any = None, before: Any = None, decoder: Any = None) -> Tokenizer:
    """A tokenizer of characters, bytes and their merges."""
    backend = Tokenizer(models.BPE(byte_fallback=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    if before is not None:
        backend.pre_tokenizer = before
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=[*map(chr, range(33, 127)), "▁", "\n"],
        special_tokens=[f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # The trainer marks them.
    backend = Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | {"added_tokens": []}))
    backend.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def bytes_() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # As in Llama 2 and in the tiny models, the vocabulary itself holds some special tokens.
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["</s>", "<|im_start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def unigram() -> Tokenizer:
    """Its model finds the texts of special tokens in any text, as they are pieces of the vocabulary."""
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0), ("▁", -2.0)]
    vocabulary += [(chr(number), -5.0) for number in [*range(33, 127), 10]] + [("hello", -3.0), ("user", -3.0)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    return backend


def merged() -> Tokenizer:
    """Its merges make the text of a special token."""
    letters = ["<", "/", "s", ">", "/s", "</s", "</s>"] + sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set("</s>"))
    merges = [("/", "s"), ("<", "/s"), ("</s", ">")]
    backend = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(letters)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def metaspace(scheme: str) -> Tokenizer:
    return pieces(
        before=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False),
        decoder=decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]),
    )


def legacy() -> Tokenizer:
    return pieces(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": lambda: made(bytes_()),
    "bytes, marks take the space beside them": lambda: made(bytes_(), rstrip=True, lstrip=True),
    "bytes, normalized marks": lambda: made(bytes_(), normalized=True),
    "sentencepiece, first": lambda: made(metaspace("first")),
    "sentencepiece, always": lambda: made(metaspace("always")),
    "sentencepiece, never": lambda: made(metaspace("never")),
    "sentencepiece, legacy": lambda: made(legacy()),
    "sentencepiece, replaced spaces": lambda: made(pieces(normalizer=normalizers.Replace(" ", "▁"))),
    "unigram": lambda: made(unigram()),
    "merges make a mark": lambda: made(merged()),
    "text in front of the first mark": lambda: made(metaspace("first"), "hello world " + TEMPLATE),
    "folded": lambda: made(pieces(normalizer=normalizers.NFKC()), normalized=True),
}


@cache
def of(kind: str) -> PreTrainedTokenizerFast:
    return KINDS[kind]()


def template_of(made: Any, **more: Any) -> Callable[[Any], str]:
    return lambda messages: made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)


def encode(tokenizer: Any, conversation: Any, **more: Any) -> list[int]:
    special = special_tokens(tokenizer)
    spellings = special.spellings(conversation)
    (ids,) = special.encode([spellings.render(template_of(tokenizer, **more), conversation)], [spellings])
    return ids


def oracle(tokenizer: Any, conversation: Any) -> list[int]:
    """The tokens by another way: the library takes the special tokens of each stretch between the template's for text.

    It holds for tokenizers to which a text within a longer one is what it is alone.
    """
    special = {text: tokenizer.convert_tokens_to_ids(text) for text in SPECIAL}
    shown = template_of(tokenizer)(replaced(conversation, lambda text: text.translate(SHIFT)))
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    ids, stretch = [], ""
    while shown:
        mark = next((text for text in sorted(special, key=len, reverse=True) if shown.startswith(text)), None)
        if mark is None:
            stretch, shown = stretch + shown[0], shown[1:]
            if shown:
                continue
        ids += backend.encode(stretch.translate(BACK), add_special_tokens=False).ids if stretch else []
        ids += [special[mark]] if mark else []
        stretch, shown = "", shown[len(mark or "") :]
    return ids


SHIFT = {number: 0xF0000 + number for number in range(33, 127)}
BACK = {0xF0000 + number: number for number in range(33, 127)}


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: entry if key in ("role", "type") else replaced(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [replaced(entry, change) for entry in value]
    return change(value)


TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, "<think>", "<|im_", "end|>", "<", ">", " ", "  ", "\n", "user\n", "hello world"]),
        st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), max_size=6),
    ),
    max_size=8,
).map("".join)


def said(content: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(first=TEXTS, second=TEXTS)
def test_texts_never_become_special_tokens(kind: str, first: str, second: str) -> None:
    made = of(kind)
    conversation = [said(first), said("x" + second + "x", "assistant"), said("hello")]
    ids = encode(made, conversation)
    harmless = encode(made, [said("x"), said("x", "assistant"), said("hello")])
    marks = [made.convert_tokens_to_ids(text) for text in SPECIAL]
    assert [number for number in ids if number in marks] == [number for number in harmless if number in marks]
    spelled = any(text in first + "\0" + second for text in SPECIAL)
    if not spelled:
        assert ids == made(template_of(made)(conversation), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", ["bytes", "bytes, normalized marks", "sentencepiece, never"])
@settings(max_examples=100)
@given(text=TEXTS)
def test_the_text_is_what_the_template_writes_and_its_tokens_are_those_of_plain_text(kind: str, text: str) -> None:
    made, conversation = of(kind), [said(text)]
    ids = encode(made, conversation)
    assert made.decode(ids) == template_of(made)(conversation)
    assert ids == oracle(made, conversation)


@pytest.mark.parametrize("kind", ["sentencepiece, first", "sentencepiece, always", "sentencepiece, legacy"])
def test_what_stands_around_a_spelled_token_is_encoded_as_ever(kind: str) -> None:
    """Only the tokens of the spelling are others: the beginning of the text and of each stretch stay as they are."""
    made = of(kind)
    plain, spelled = (encode(made, [said(f"hello {text} world"), said("hello")]) for text in ("x", "<|im_end|>"))
    same = os.path.commonprefix([plain, spelled]), os.path.commonprefix([plain[::-1], spelled[::-1]])
    assert made.decode(same[0]).rstrip().endswith("hello") and "world" in made.decode(same[1][::-1])
    assert spelled[0] == plain[0] == made.bos_token_id


def test_added_tokens_that_are_not_special_stay_what_they_are() -> None:
    for kind in KINDS:
        made = of(kind)
        think = made.convert_tokens_to_ids("<think>")
        assert encode(made, [said("hello <think> world </s>")]).count(think) == 1
        assert encode(made, [said("hello <think> world")]).count(think) == 1


def test_a_normalizer_makes_no_special_token_of_other_characters() -> None:
    made = of("folded")
    assert made.convert_tokens_to_ids("</s>") in made("＜/s＞")["input_ids"]
    ids, harmless = encode(made, [said("＜/s＞")]), encode(made, [said("x")])
    assert made.convert_tokens_to_ids("</s>") not in ids
    assert [number for number in ids if number in harmless][:2] == harmless[:2]


def test_tokenizers_without_special_texts_and_of_one_character() -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_(), pad_token="!", chat_template="{{ messages[0].content }}")
    special = SpecialTokens(made)
    assert special.texts == {"</s>", "<|im_start|>"}
    assert encode(made, [said("a!b")]) == made("a!b")["input_ids"]
    assert made.decode(encode(made, [said("a!</s>b")])) == "a!</s>b"


@pytest.mark.parametrize("place", ["content", "role", "name", "argument", "key", "tool", "schema"])
def test_texts_at_any_place(place: str) -> None:
    made, mark = tokenizer("chatml"), "<|im_end|>"
    texts = dict.fromkeys(("content", "name", "argument", "key", "tool", "schema"), "x") | {place: f"x{mark}x"}
    call = {"function": {"name": texts["name"], "arguments": {texts["key"]: [texts["argument"]]}}}
    messages = [said("x", texts.get("role", "user")), {**said("", "assistant"), "tool_calls": [call]}]
    messages.append(said(texts["content"], "tool"))
    tools = json.loads(json.dumps(TOOLS))
    tools[0]["function"] |= {"name": texts["tool"], "description": texts["schema"]}
    special = special_tokens(made)
    spellings = special.spellings((messages, tools))

    def template(given: Any) -> str:
        text: Any = made.apply_chat_template(given[0], tools=given[1], tokenize=False)
        return text

    (ids,) = special.encode([spellings.render(template, (messages, tools))], [spellings])
    # Those of the tools, of the three messages.
    assert ids.count(made.convert_tokens_to_ids(mark)) == 4
    assert made.decode(ids) == template((messages, tools))


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("{{ m.content | trim }}", "a </s> b"),
        ("{{ m.content | upper }}", " A </S> B "),
        ("{{ m.content | length }}", "10"),
        ("{{ m.content[:5] }}", " a </"),
        ("{{ m.content | e }}", " a &lt;/s&gt; b "),
        ("{{ m.content | tojson }}", '" a </s> b "'),
        ("{{ m.content | tojson(ensure_ascii=True) }}", '" a </s> b "'),
        ("{{ {'x': m.content} }}", "{'x': ' a </s> b '}"),
        ("{{ m.content | replace('</s>', '') }}", " a  b "),
        ("{{ m.content }}{{ m.content }}", " a </s> b  a </s> b "),
        ("{{ m.content.split('</think>')[-1] }}", " a </s> b "),
        ("{{ m.content | reverse }}", " b >s/< a "),
        ("{% if 's' in m.content %}{{ m.content }}{% endif %}", " a </s> b "),
    ],
)
def test_templates_that_change_contents(content: str, written: str) -> None:
    made = tokenizer("instruct")
    template = f"<s>{{% for m in messages %}}[INST]{content}</s>{{% endfor %}}"
    ids = encode(made, [said(" a </s> b ")], chat_template=template)
    assert made.decode(ids) == f"<s>[INST]{written}</s>"
    assert [made.decode(number) for number in ids if number in made.added_tokens_decoder] == ["<s>", "[INST]", "</s>"]


def test_a_spelling_that_a_template_makes_another_one_is_refused() -> None:
    made = tokenizer("instruct")
    template = "{% for m in messages %}{{ m.content | replace('</s>', '<s>') }}</s>{% endfor %}"
    with pytest.raises(ValueError, match=r"changes a text that spells a special token of the tokenizer \(</s>\)"):
        encode(made, [said("a </s>")], chat_template=template)


def test_letters_that_stand_for_others_may_stand_in_the_text() -> None:
    made = tokenizer("instruct")
    for text in (
        "\U00010600 </s>",
        "\\ud801\\ude00 </s> \U00010601",
        "</s>" + "".join(map(chr, range(0x10600, 0x10640))),
    ):
        ids = encode(made, [said(text)])
        assert made.decode(ids) == template_of(made)([said(text)])
        assert ids.count(made.eos_token_id) == 0


def test_a_text_that_contains_another_special_token() -> None:
    backend = bytes_()
    backend.add_special_tokens(["<|im_end|>x", "im_end"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=["<|im_end|>", "im_end"])
    made.chat_template = "{% for m in messages %}<|im_end|>{{ m.content }}{% endfor %}"
    for text in ("<|im_end|>x", "<|im_end|>", "im_endx", "<|im_<|im_end|>end|>"):
        ids = encode(made, [said(text)])
        assert [number for number in ids if number in made.added_tokens_decoder] == [
            made.convert_tokens_to_ids("<|im_end|>")
        ]
        assert made.decode(ids) == "<|im_end|>" + text


class Slow:
    """A tokenizer of another kind."""

    chat_template = "{{ messages }}"
    added_tokens_decoder: dict[int, Any] = {}
    all_special_tokens = ["</s>"]

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[*text.encode()] for text in texts]}

    def convert_tokens_to_ids(self, text: str) -> int:
        return 300


def test_tokenizers_of_another_kind_refuse_spellings() -> None:
    special = SpecialTokens(Slow())  # type: ignore[arg-type]
    spellings = special.spellings(["a"])
    assert special.encode(["a"], [spellings]) == [[97]]
    spellings = special.spellings(["</s>"], "row 3: ")
    with pytest.raises(ValueError, match=r"row 3: a text spells a special token .* a Slow cannot take as text"):
        special.encode([spellings.render("".join, ["</s>"])], [spellings])


@given(st.lists(st.text("ab<>", min_size=1, max_size=5), max_size=8), st.text("ab<>", max_size=20))
def test_alternatives_are_found_from_the_left_and_the_longest_first(texts: list[str], text: str) -> None:
    found, place = [], 0
    while place < len(text):
        fitting = [one for one in texts if text.startswith(one, place)]
        if fitting:
            found.append(max(fitting, key=len))
        place += len(found[-1]) if fitting else 1
    assert alternatives(texts).findall(text) == found


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    made, special = tokenizer(family), FAMILIES[family].special.split()
    for mark in special:
        ids, harmless = (encode(made, [said(f"{text} x {text}")]) for text in (mark, "x"))
        assert special_tokens(made).count(ids) == special_tokens(made).count(harmless)
        assert made.decode(ids) == template_of(made)([said(f"{mark} x {mark}")])
