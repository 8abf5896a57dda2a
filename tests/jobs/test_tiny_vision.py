"""Tiny vision-language models: they load, and their processors expand a picture to the tokens of its features."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from jobs import tiny
from jobs.tiny_vision import FAMILIES

MESSAGES = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "How many"}, {"type": "image"}, {"type": "text", "text": "?"}],
    }
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_becomes_as_many_tokens_as_it_has_features(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "model"
    options = ["--hidden", "64", "--layers", "2", "--vocab", "320"]
    assert tiny.main(["--out", str(folder), "--vision", family, *options]) == 0
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    before, after = text.split(FAMILIES[family][1])
    assert before.endswith("How many") and after == "?<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(text=[text], images=[Image.new("RGB", (60, 90), "red")], return_tensors="pt")
    ids = inputs["input_ids"][0]
    placeholders = int((ids == model.config.image_token_id).sum())
    features = model.model.get_image_features(
        **{name: value for name, value in inputs.items() if name in ("pixel_values", "image_grid_thw")}
    ).pooler_output
    found = features.flatten(0, 1) if isinstance(features, torch.Tensor) else torch.cat(list(features))
    assert found.shape == (placeholders, 64) and placeholders > 1
    assert (
        tokenizer(after, add_special_tokens=False)["input_ids"] == ids[-len(tokenizer(after)["input_ids"]) :].tolist()
    )
    assert torch.isfinite(model(**inputs).logits).all()
    # Digits are single tokens, as in the model without pictures.
    assert len(tokenizer("17", add_special_tokens=False)["input_ids"]) == 2
