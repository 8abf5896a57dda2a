"""The processor's tokens and pixels: the same as those of a whole prompt, and bad images refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from jobs.tiny_vision import FAMILIES as FAMILY_TOKENS
from pipeline.config.model import ModelConfig
from pipeline.models import processor
from pipeline.models.processor import FAMILIES, Vision, decode, load_vision, why_not
from tests.pictures import encoded, picture, save_tiny

SIZES = ((60, 60), (30, 90), (200, 40), (13, 17), (112, 84))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "model"
    save_tiny(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def vision(folder):
    return load_vision(ModelConfig(path=str(folder), vision="frozen"))


def test_a_processor_that_keeps_no_pixels(folder):
    vision = load_vision(ModelConfig(path=str(folder), vision="frozen"), kept_bytes=0)
    first = vision.pixels(picture(1))
    assert not vision._pixels and vision._bytes == 0
    again = vision.pixels(picture(1))
    assert all(np.array_equal(first[name], again[name]) for name in first)


def test_formats_that_start_programs_are_not_read(vision):
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{} loop\n%%EOF\n"
    with pytest.raises(ValueError, match="cannot be decoded: it begins as no known format"):
        vision.expansion(eps)


def test_the_tokens_of_images_without_end_take_no_more_memory(folder, monkeypatch):
    vision = load_vision(ModelConfig(path=str(folder), vision="frozen"))
    monkeypatch.setattr(processor, "MOST_EXPANSIONS", 3)
    images = [picture(number, 60, 60) for number in range(100, 106)]
    assert len({len(vision.expansion(image)) for image in images}) == 1
    assert len(vision._expansions) == 3
    for _ in range(3):
        # Their pixels are still there, and count once.
        assert [vision.expansion(image) for image in images]
    assert vision._bytes == sum(map(processor._size, vision._pixels.values())) > 0
    assert vision.expansion(images[0]) == vision.expansion(images[-1])


@pytest.mark.parametrize("tiles", [False, True])
def test_expansions_are_those_of_the_whole_prompt(folder, tiles):
    """200 random prompts of up to three images, against one call of the model's processor on each whole text."""
    vision = load_vision(ModelConfig(path=str(folder), vision="frozen"))
    if tiles and "smolvlm" in str(folder):
        vision.processor.image_processor.do_image_splitting = True
        vision.processor.image_processor.size = {"longest_edge": 112}
    rng, tokenizer = np.random.default_rng(0), vision.processor.tokenizer
    mark = FAMILY_TOKENS[next(name for name in FAMILIES if name in str(folder))][1]
    images = [picture(number, *size) for number, size in enumerate(SIZES)]
    words = ["How many ", "blocks", " \n", "17", "\n\n", " are there?", ""]
    for _ in range(200):
        shown = [images[number] for number in rng.integers(0, len(images), rng.integers(0, 4))]
        text = "<|im_start|>user\n" + "".join(rng.choice(words, 2))
        for _ in shown:
            text += mark + "".join(rng.choice(words, 2))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        pictures = {"images": [[decode(image) for image in shown]]} if shown else {}
        whole = vision.processor(text=[text], add_special_tokens=False, **pictures)["input_ids"][0]
        assert vision.expand(ids, shown) == list(whole)
        assert whole.count(vision.placeholder) >= len(shown)


def test_a_tokens_number_follows_the_pixels(folder):
    family = json.loads((folder / "config.json").read_text())["model_type"]
    model = ModelConfig(path=str(folder), vision="frozen", min_pixels=784, max_pixels=2 * 1024)
    if family == "smolvlm":
        with pytest.raises(ValueError, match="model.min_pixels and model.max_pixels do nothing with .* family smolvlm"):
            load_vision(model)
        return
    few, plain = load_vision(model), load_vision(replace(model, min_pixels=None, max_pixels=None))
    large, small = picture(1, 200, 200), picture(2, 14, 14)
    assert len(few.expansion(large)) < len(plain.expansion(large))
    more = load_vision(replace(model, min_pixels=8 * 1024, max_pixels=None))
    assert len(more.expansion(small)) > len(plain.expansion(small))
    assert few.hash(large) != plain.hash(large), "pixels depend on the settings"
    assert few.hash(large) != few.hash(small) and few.hash(large) == load_vision(model).hash(large)


def test_pixels_are_kept_up_to_a_size(vision, monkeypatch):
    fresh = Vision(vision.processor)
    first, second = picture(1), picture(2)
    kept = fresh.pixels(first)
    assert fresh.pixels(first) is kept, "made once"
    monkeypatch.setattr(processor, "CACHED_BYTES", sum(values.nbytes for values in kept.values()))
    again = fresh.pixels(second)
    assert fresh.pixels(second) is again
    assert fresh.pixels(first) is not kept, "the oldest makes room"


def test_placeholders_and_images_must_be_as_many(vision):
    with pytest.raises(ValueError, match="writes the placeholder .* 1 times for 2 images"):
        vision.expand([1, vision.placeholder], [picture(1), picture(2)])
    with pytest.raises(ValueError, match="0 times for 1 images"):
        vision.expand([1, 2], [picture(1)])


def test_images_need_a_token_between_their_features(folder, vision):
    ids, images = [vision.placeholder, vision.placeholder], [picture(1), picture(2)]
    if "smolvlm" in str(folder):
        assert len(vision.expand(ids, images)) > 2
        return
    with pytest.raises(ValueError, match="twice without a token between them"):
        vision.expand(ids, images)


def huge() -> bytes:
    """A small file of many pixels."""
    return encoded(Image.new("1", (8000, 8000)))


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (b"", "an image of 0 bytes cannot be decoded"),
        (b"no picture", "an image of 10 bytes cannot be decoded"),
        (picture(1)[:-200], "cannot be decoded"),
        (picture(1, form="JPEG")[:300], "cannot be decoded"),
        (huge(), "8000 x 8000 pixels, more than"),
    ],
)
def test_images_that_cannot_be_decoded(image, words):
    with pytest.raises(ValueError, match=words):
        decode(image)


def test_images_become_upright_and_rgb():
    turned = Image.new("RGB", (20, 10), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(turned, "JPEG", exif=exif.tobytes())).size == (10, 20)
    for mode in ("L", "RGBA", "P", "1", "I;16", "CMYK"):
        found = decode(encoded(Image.new(mode, (8, 8)), "TIFF" if mode == "CMYK" else "PNG"))
        assert (found.mode, found.size) == ("RGB", (8, 8))


def test_a_processor_may_refuse_an_image(folder, vision):
    if "smolvlm" in str(folder):
        assert vision.expansion(picture(1, 1, 500))
        return
    with pytest.raises(ValueError, match="an image cannot be processed: .*aspect ratio"):
        vision.expansion(picture(1, 1, 500))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gemma3", "its image tokens attend to later ones"),
        ("llava_next", "does not know the names"),
        ("internvl", "it was not tried"),
        ("qwen2_5_omni", "it was not tried"),
    ],
)
def test_other_families_are_refused_by_name(family, words):
    reason = why_not(family)
    assert reason is not None and words in reason and "take a model of qwen2_5_vl, qwen3_vl, smolvlm" in reason


def test_missing_packages_are_named(monkeypatch):
    absent = {"num2words"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else object())
    assert why_not("qwen3_vl") is None
    assert "needs the Python package num2words" in (why_not("smolvlm") or "")
    absent.add("torchvision")
    assert "pip install torchvision" in (why_not("qwen3_vl") or "")


def test_a_folder_without_processor(folder, tmp_path, tiny_model):
    with pytest.raises(
        ValueError, match=r"model.path=.* is of the family qwen3, which cannot be trained on images: it was"
    ):
        load_vision(ModelConfig(path=str(tiny_model), vision="frozen"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ValueError, match="the processor cannot be loaded|has no processor of images"):
        load_vision(ModelConfig(path=str(tmp_path), vision="frozen"))
