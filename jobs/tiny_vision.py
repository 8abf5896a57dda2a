"""Tiny vision-language models with random weights, and their processors, for `python -m jobs.tiny --vision FAMILY`.

Each family stands for a way to join pictures and text: Qwen2.5-VL has positions of three axes and a tower with windows,
Qwen3-VL adds features of the tower to several layers of the decoder, and SmolVLM has an ordinary Llama as decoder. A
picture becomes 1 to 16 tokens in the first two, and 4 in the third.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SMOLVLM_TOKENS = [
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]
FAMILIES: dict[str, tuple[list[str], str]] = {
    "qwen2_5_vl": (QWEN_TOKENS, "<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen3_vl": (QWEN_TOKENS, "<|vision_start|><|image_pad|><|vision_end|>"),
    "smolvlm": (SMOLVLM_TOKENS, "<image>"),
}
"""Special tokens of each family, and the text that its chat template writes for a picture."""
TEXT_CONTENT = "{{ message['content'] }}<|im_end|>"
PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PICTURE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>"
)
QUESTIONS = [
    *("How many blocks are there?\n", "What colour is the shape?\n"),
    *(f"{word}\n" for word in ("red", "green", "blue", "yellow", *map(str, range(10)))),
]
"""Texts that train the tokenizer unless files are given."""
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16, "smolvlm": 14}
"""Side of a patch of a picture, in pixels."""
TOWER = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
WEIGHT_RANGE = 0.1
"""Standard deviation of the weights: large enough that another picture gives other log-probs."""


def prepare_tokenizer(tokenizer: PreTrainedTokenizerFast, family: str) -> PreTrainedTokenizerFast:
    """Add the special tokens of `family`, and let the chat template write pictures. Returns `tokenizer`."""
    tokens, picture = FAMILIES[family]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    template = tokenizer.chat_template
    assert isinstance(template, str) and TEXT_CONTENT in template
    tokenizer.chat_template = template.replace(TEXT_CONTENT, PARTS.replace("PICTURE", picture))
    return tokenizer


def build_vision_model(tokenizer: PreTrainedTokenizerFast, family: str, decoder: Mapping[str, Any], seed: int) -> Any:
    """Return a model of `family` with random weights.

    Args:
        tokenizer: from `prepare_tokenizer`.
        family: a key of `FAMILIES`.
        decoder: sizes of the decoder, as entries of its configuration.
        seed: seed of the weights.
    """
    import transformers

    torch.manual_seed(seed)
    number = tokenizer.convert_tokens_to_ids
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    text = {**decoder, **ends, "initializer_range": WEIGHT_RANGE}
    half = text["head_dim"] // 2
    tower: dict[str, Any] = {**TOWER, "patch_size": PATCH[family]}
    more: dict[str, Any] = {**ends, "tie_word_embeddings": text["tie_word_embeddings"]}
    if family == "smolvlm":
        tower |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56}
        more |= {"image_token_id": number("<image>"), "scale_factor": 2}
        config: Any = transformers.SmolVLMConfig(
            text_config={"model_type": "llama", **text}, vision_config=tower, dtype="float32", **more
        )
        return transformers.SmolVLMForConditionalGeneration(config)
    tower |= {"depth": 2, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
    tower |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    more |= {
        **{"image_token_id": number("<|image_pad|>"), "video_token_id": number("<|video_pad|>")},
        **{"vision_start_token_id": number("<|vision_start|>"), "vision_end_token_id": number("<|vision_end|>")},
    }
    # The shares of the three axes are as in the published models.
    third = half * 3 // 8 if family == "qwen2_5_vl" else half * 5 // 16
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * third, third, third]}
    if family == "qwen2_5_vl":
        tower |= {"window_size": 56, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope}, vision_config=tower, dtype="float32", **more
        )
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    config = transformers.Qwen3VLConfig(
        text_config={**text, "rope_parameters": {**rope, "mrope_interleaved": True}},
        **{"vision_config": tower, "dtype": "float32", **more},
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def build_processor(tokenizer: PreTrainedTokenizerFast, family: str) -> Any:
    """Return the processor of `family`, whose pictures have up to 16 tokens.

    Args:
        tokenizer: from `prepare_tokenizer`.
        family: a key of `FAMILIES`.
    """
    import transformers

    side = 2 * PATCH[family]
    template = {"tokenizer": tokenizer, "chat_template": tokenizer.chat_template}
    if family == "smolvlm":
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        size = {"longest_edge": 56}
        pictures: Any = SmolVLMImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
        videos: Any = transformers.SmolVLMVideoProcessor()
        return transformers.SmolVLMProcessor(pictures, video_processor=videos, image_seq_len=4, **template)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": side * side, "longest_edge": 16 * side * side}
    if family == "qwen2_5_vl":
        pictures = Qwen2VLImageProcessorPil(size=size, patch_size=PATCH[family])
        videos = transformers.Qwen2VLVideoProcessor()
        return transformers.Qwen2_5_VLProcessor(pictures, video_processor=videos, **template)
    half = [0.5, 0.5, 0.5]
    pictures = Qwen2VLImageProcessorPil(size=size, patch_size=PATCH[family], image_mean=half, image_std=half)
    return transformers.Qwen3VLProcessor(pictures, video_processor=transformers.Qwen3VLVideoProcessor(), **template)


def save_vision(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast, family: str) -> None:
    """Save the model, its tokenizer and its processor in `folder`."""
    model.save_pretrained(folder)
    build_processor(tokenizer, family).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
