"""Prompts with images: the formats of files, the tokens, and each bad row by its place."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.models.processor import load_vision
from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.encode import PromptEncoder, first_prompt, stamp, to_table
from pipeline.prompts.files import resolve
from pipeline.prompts.loader import PromptLoader
from pipeline.prompts.quarantine import Quarantine
from pipeline.rows import IMAGES, prompt_columns
from tests.pictures import picture, save_tiny

STRUCTS = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
A, B = picture(1, 60, 60), picture(2, 90, 30)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "model"
    save_tiny(folder, request.param)
    return folder


@pytest.fixture
def read(model, tmp_path):
    """Reads the rows of a file with this column of images and these prompts."""

    def rows(images: pa.Array, texts: list, vision: bool = True, limit: int = 0, **changes):
        data = DataConfig(shuffle=False, max_bad_rows=limit, **changes)
        reads = load_vision(ModelConfig(path=str(model), vision="frozen")) if vision else None
        chat = ChatTokenizer(AutoTokenizer.from_pretrained(model), data)
        encoder = PromptEncoder(chat, Quarantine(limit, str(tmp_path / "run")), vision=reads)
        prompts = [text if isinstance(text, list) else [{"role": "user", "content": text}] for text in texts]
        table = pa.table(
            {
                "data_source": ["hiyouga/geometry3k"] * len(texts),
                "prompt": pa.array([json.dumps(prompt) for prompt in prompts]),
                "images": images,
                "reward_model": [{"style": "rule", "ground_truth": "48"}] * len(texts),
            }
        )
        pq.write_table(
            table.rename_columns([changes.get("image_key", n) if n == "images" else n for n in table.column_names]),
            tmp_path / "train.parquet",
        )
        files = resolve(str(tmp_path / "train.parquet"), "data.train_files")
        loader = PromptLoader(files, data, encoder, 1, epochs=1)
        return loader, loader.iteration(1, len(texts))

    return rows


def test_rows_of_all_formats(read, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "b.png").write_bytes(B)
    cells = [
        [{"bytes": A, "path": "a.png"}, {"bytes": None, "path": "pictures/b.png"}],
        [{"bytes": None, "path": str(tmp_path / "pictures" / "b.png")}],
        [],
        None,
    ]
    texts = [
        "<image>How many <image> blocks?",
        [
            {"role": "system", "content": "See."},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "17"}]},
        ],
        "17 blocks?",
        "<image> 17",
    ]
    loader, rows = read(pa.array(cells, STRUCTS), texts)
    vision = loader.encoder.vision
    assert [row["images"] for row in rows] == [[A, B], [B], [], []]
    assert [row["image_hash"] for row in rows] == [[vision.hash(image) for image in row["images"]] for row in rows]
    for row in rows:
        assert row["engine_prompt_ids"].count(vision.placeholder) == len(row["images"])
        assert vision.expand(row["engine_prompt_ids"], row["images"]) == row["prompt_ids"]
    tokenizer = loader.encoder.chat.tokenizer
    # Without images the mark is text, also if it is the name of a token.
    assert tokenizer.decode(rows[3]["prompt_ids"]).startswith("<|im_start|>user\n<image> 17<|im_end|>")
    assert rows[3]["prompt_ids"].count(vision.placeholder) == 0
    assert json.loads(rows[0]["prompt"]) == [{"role": "user", "content": "<image>How many <image> blocks?"}]
    assert json.loads(rows[1]["prompt"])[1] == {"role": "user", "content": "<image>17"}
    table = to_table(rows, loader.encoder.columns)
    stamped = stamp(table, "train", 0, 1)
    assert stamped.schema == prompt_columns(True) and set(IMAGES.names) <= set(stamped.column_names)
    (name, text), (also, shown) = first_prompt(table, loader.encoder)
    assert (name, also) == ("first prompt", "its images") and "60 x 60 pixels" in shown and "; 90 x 30" in shown
    assert text.count(vision.processor.image_token) == 2


def test_encoded_images_need_no_struct_and_the_column_has_any_name(read):
    _, rows = read(pa.array([[A], [A, B]], pa.list_(pa.binary())), ["<image>", "<image><image>"], image_key="shown")
    assert [row["images"] for row in rows] == [[A], [A, B]]


def test_the_template_writes_images_where_the_marks_stand(read, model):
    _, (row,) = read(pa.array([[A]], pa.list_(pa.binary())), ["How many <image> are there?"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    written = {"smolvlm": "<image>"}.get(
        model.parent.name.rstrip("0123456789"), "<|vision_start|><|image_pad|><|vision_end|>"
    )
    assert f"How many {written} are there?" in tokenizer.decode(row["engine_prompt_ids"])


BAD = [
    (b"no picture", "<image>", "an image of 10 bytes cannot be decoded"),
    (A[:-100], "<image>", "cannot be decoded"),
    (A, "no mark", "<image> stands 0 times in the prompt, which has 1 images"),
    (A, "<image><image>", "<image> stands 2 times in the prompt, which has 1 images"),
    ("gone.png", "<image>", "column 'images' (data.image_key), image 0 cannot be read from gone.png in"),
    ("https://a.b/c.png", "<image>", "image 0 is at https://a.b/c.png; download it"),
    (None, "<image>", "image 0 is {}; give a list of encoded images, or of structs {bytes, path}"),
    (picture(3, 700, 700), "<image>", "more than data.max_image_bytes=100000; scale them"),
    (
        A,
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<image>"}],
        "in a message of the assistant",
    ),
    (
        A,
        [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
        "a part of type 'image' has image; images are read from the column of images",
    ),
]


@pytest.mark.parametrize(("image", "text", "words"), BAD, ids=[words[:24] for _, _, words in BAD])
def test_a_bad_row_ends_the_run_with_its_place(read, image, text, words):
    entry = {"bytes": image if isinstance(image, bytes) else None, "path": image if isinstance(image, str) else None}
    cells = pa.array([[{"bytes": A, "path": None}], [entry]], STRUCTS)
    with pytest.raises(ValueError) as error:
        read(cells, ["<image> 17", text], max_image_bytes=100_000)
    assert "train.parquet, row 1 (row group 0)" in str(error.value) and words in str(error.value)


def test_bad_rows_go_to_quarantine_without_their_pixels(read, tmp_path):
    entries = [[{"bytes": image, "path": None}] for image in (A, A[:-100], B)]
    loader, rows = read(pa.array(entries, STRUCTS), ["<image>"] * 3, limit=1)
    assert [row["images"] for row in rows] == [[A], [B]] and loader.encoder.quarantine.count == 1
    (file,) = Path(tmp_path, "run", "quarantine").iterdir()
    (found,) = pq.read_table(file).to_pylist()
    assert found["row"] == 1 and json.loads(found["content"])["images"] == [{"bytes": f"{len(A) - 100} bytes"}]


def test_a_column_of_something_else(read):
    with pytest.raises(ValueError, match=r"column 'images' \(data.image_key\) is 5; give a list of encoded images"):
        read(pa.array([5]), ["<image>"])


def test_too_long_with_its_images(read):
    """The expanded prompt counts, not the one that the engine gets."""
    cells, texts = pa.array([[A, A, A, A]], pa.list_(pa.binary())), ["<image>" * 4]
    _, (row,) = read(cells, texts)
    most = len(row["prompt_ids"]) - 1
    assert len(row["engine_prompt_ids"]) < most
    with pytest.raises(ValueError, match=rf"the prompt is {most + 1} tokens long, more than data.max_prompt_length"):
        read(cells, texts, max_prompt_length=most)
    loader, rows = read(cells, texts, max_prompt_length=most + 1)
    assert len(rows) == 1


def test_a_run_of_text_refuses_images(read):
    with pytest.raises(ValueError, match="row 0 .* column `images` has content, and only text can be trained"):
        read(pa.array([[A]], pa.list_(pa.binary())), ["<image>"], vision=False)
    with pytest.raises(ValueError, match="has a part of type 'image'; only text"):
        read(pa.array([None], STRUCTS), [[{"role": "user", "content": [{"type": "image"}]}]])


def test_videos_are_refused(read, tmp_path):
    loader, _ = read(pa.array([[A]], pa.list_(pa.binary())), ["<image>"])
    (made,) = pq.read_table(tmp_path / "train.parquet").to_pylist()
    pq.write_table(pa.Table.from_pylist([made | {"videos": [{"bytes": b"x"}]}]), tmp_path / "videos.parquet")
    files = resolve(str(tmp_path / "videos.parquet"), "data.train_files")
    with pytest.raises(ValueError, match="column `videos` has content, and only text can be trained"):
        PromptLoader(files, loader.data, loader.encoder, 1, epochs=1).iteration(1, 1)


def test_a_template_that_shows_no_images(read, model):
    loader, _ = read(pa.array([[A]], pa.list_(pa.binary())), ["<image> 17"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | length }}{% endfor %}"
    encoder = PromptEncoder(ChatTokenizer(tokenizer, loader.data), Quarantine(0), vision=loader.encoder.vision)
    with pytest.raises(ValueError, match="row 0 .*the chat template writes the placeholder .* 0 times for 1 images"):
        PromptLoader(loader.files, loader.data, encoder, 1, epochs=1).iteration(1, 1)
