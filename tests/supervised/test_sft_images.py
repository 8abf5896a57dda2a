"""Conversations with images: what is encoded, what is refused, and the loss against the model's own pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jobs import sft as job
from pipeline.config.model import ModelConfig
from pipeline.config.supervised import SFTDataConfig
from pipeline.models.policy import load_policy
from pipeline.models.processor import decode, load_vision
from pipeline.models.sharing import Passes
from pipeline.supervised.data import check_rows
from pipeline.supervised.sft import collate
from pipeline.supervised.sft_data import SFTEncoder
from tests.pictures import picture, save_tiny

A, B = picture(1, 60, 60), picture(2, 90, 60)
SHOWN = [[A], [], [A, B]]
QUESTIONS = ["<image>How many?", "Why is <image> plain text here?", "Is <image> like <image>?"]
ANSWERS = ["4", "No image.", "green"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("vision") / "model"
    save_tiny(folder, "qwen2_5_vl")
    return ModelConfig(path=str(folder), vision="trained")


Encode = Callable[..., pa.Table]


@pytest.fixture
def encode(model: ModelConfig, tmp_path: Path) -> Encode:
    def run(shown: list[Any] = SHOWN, questions: list[str] = QUESTIONS, after: str = "", **data: Any) -> pa.Table:
        conversations = [
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            + ([{"role": "user", "content": after}] if after else [])
            for question, answer in zip(questions, ANSWERS, strict=False)
        ]
        file = tmp_path / "f.parquet"
        pq.write_table(pa.table({"messages": conversations, "images": pa.array(shown)}), file)
        encoder = SFTEncoder.of(model, SFTDataConfig(**data))
        groups = encoder.find_row_groups(str(file), "data.train_files", encoder.data)
        check_rows(groups, [], encoder)
        (group,) = groups
        places = [f"f.parquet, row {row}" for row in range(group.rows)]
        return encoder.encode(encoder.whole(pq.read_table(file), group), places)

    return run


def test_placeholders_are_expanded_and_only_answers_train(model: ModelConfig, encode: Encode) -> None:
    vision = load_vision(model)
    for row, shown, question, answer in zip(encode().to_pylist(), SHOWN, QUESTIONS, ANSWERS, strict=True):
        features = sum(vision.expansion(image).count(vision.placeholder) for image in shown)
        assert row["input_ids"].count(vision.placeholder) == features and row["images"] == shown
        learnt = [token for token, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on]
        tokenizer = vision.processor.tokenizer
        assert tokenizer.decode(learnt) == f"{answer}<|im_end|>"
        assert (question in tokenizer.decode(row["input_ids"])) == (not shown), "a mark without images is text"


def test_the_packed_loss_is_that_of_the_model_row_by_row(model: ModelConfig, encode: Encode) -> None:
    policy, table = load_policy(model), encode()
    assert policy.image_reader is not None
    assert Passes.of(policy, "auto").packed
    vision, rows = policy.image_reader.vision, table.to_pylist()
    batch, places, targets = collate(table, [2, 0, 1], packed=True, place_images=policy.image_reader.place)
    where = {"positions": batch.positions, "packing": batch.packing, "images": batch.images}
    found = policy(batch.input_ids, places, targets, **where)[0]
    wanted = []
    for number in (2, 0, 1):
        row = rows[number]
        ids = torch.tensor(row["input_ids"])[None]
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if shown := SHOWN[number]:
            mark, images = vision.processor.image_token, [[decode(image) for image in shown]]
            made = vision.processor(text=[mark * len(shown)], images=images, return_tensors="pt")
            inputs |= {name: made[name] for name in ("pixel_values", "image_grid_thw")}
            inputs["mm_token_type_ids"] = (ids == vision.placeholder).int()
        log_probs = torch.log_softmax(policy.lm(**inputs).logits[0].float(), -1)
        wanted += [log_probs[at - 1, row["input_ids"][at]] for at, on in enumerate(row["loss_mask"]) if on]
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=0)
    other = table.set_column(2, "images", pa.array([[B], [], [A, B]]))
    with pytest.raises(ValueError, match="placeholders of features"):
        collate(other, [0], packed=True, place_images=policy.image_reader.place)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"shown": [[A], [], [A]]}, "row 2.*<image> stands 2 times in the prompt, which has 1 images"),
        ({"shown": [[b"no picture"], [], [A, B]]}, "row 0.*an image of 10 bytes cannot be decoded"),
        ({"max_length": 12, "truncation": "right"}, "more than data.max_length=12, and one with images cannot be cut"),
        ({"max_image_bytes": 100}, "more than data.max_image_bytes=100; scale them down"),
        ({"questions": ["Hm?"], "after": "<image>?", "shown": [[A]]}, "an image comes after the last answer"),
    ],
)
def test_rows_that_cannot_be_trained(given: dict[str, Any], sentence: str, encode: Encode) -> None:
    with pytest.raises(ValueError, match=sentence):
        encode(**given)


def test_a_column_of_another_name(model: ModelConfig, tmp_path: Path) -> None:
    file = tmp_path / "f.parquet"
    messages = [[{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "4"}]]
    (tmp_path / "a.png").write_bytes(A)
    pq.write_table(pa.table({"messages": messages, "shown": [[{"bytes": None, "path": "a.png"}]]}), file)
    encoder = SFTEncoder.of(model, SFTDataConfig(image_key="shown"))
    (group,) = encoder.find_row_groups(str(file), "data.train_files", encoder.data)
    (row,) = encoder.encode(encoder.whole(pq.read_table(file), group), ["f.parquet, row 0"]).to_pylist()
    assert row["images"] == [A], "paths are relative to the file"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_learns_from_images(model: ModelConfig, tmp_path: Path, ray_session: None) -> None:
    """Questions and answers alone cannot be told apart: the images must be read."""
    file, out = tmp_path / "f.parquet", tmp_path / "out"
    shown, answers = [A, B] * 16, ["1", "2"] * 16
    messages = [
        [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": answer}] for answer in answers
    ]
    pq.write_table(pa.table({"messages": messages, "images": [[one] for one in shown]}), file)
    given = (f"out={out}", f"model.path={model.path}", "model.vision=trained", f"data.train_files={file}")
    steps = ("trainer.total_training_steps=30", "data.train_batch_size=16", "data.max_length=64", "optim.lr=3e-3")
    assert job.main([*given, *steps, "trainer.logger=[]", "trainer.num_workers=2", "trainer.ray_num_cpus=8"]) == 0
    trained = load_policy(ModelConfig(path=str(out), vision="frozen"))
    assert trained.image_reader is not None and Passes.of(trained, "auto").packed
    encoder = SFTEncoder.of(ModelConfig(path=str(out), vision="frozen"), SFTDataConfig())
    (group,) = encoder.find_row_groups(str(file), "data.train_files", encoder.data)
    table = encoder.encode(encoder.whole(pq.read_table(file), group), [f"row {row}" for row in range(32)])
    batch, places, targets = collate(table, [0, 1], packed=True, place_images=trained.image_reader.place)
    where = {"positions": batch.positions, "packing": batch.packing, "images": batch.images}
    with torch.no_grad():
        assert trained(batch.input_ids, places, targets, **where)[0].exp().min() > 0.8
