"""Images in the trainer's packed passes, against the model of transformers on one row after the other."""

import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.model import LoraConfig, ModelConfig
from pipeline.models import lora
from pipeline.models.batch import TokenBatch
from pipeline.models.fsdp import save_hf
from pipeline.models.packing import pack
from pipeline.models.policy import load_frozen, load_policy
from pipeline.models.processor import FAMILIES, Vision, decode
from pipeline.models.sharing import Passes, pack_rows
from pipeline.models.value import load_value_model
from pipeline.models.vision import tower
from pipeline.rows import CONTEXTS, SCHEMA
from tests.pictures import picture, save_tiny

LIKE = 299
"""A token that gets the embedding of the placeholder, in whose place transformers would look for an image."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp(family) / "model"
    save_tiny(folder, family)
    return folder


@pytest.fixture
def policy(folder):
    found = load_policy(ModelConfig(path=str(folder), vision="trained"))
    assert Passes.of(found, "auto").shared
    with torch.no_grad():
        embedding = found.lm.get_input_embeddings().weight
        embedding[LIKE] = embedding[found.image_reader.vision.placeholder]
    return found


class Rows:
    """Rows of prompts with 0, 1 and 2 images; a response has the placeholder among its sampled tokens."""

    def __init__(self, policy, seed=0):
        self.vision = policy.image_reader.vision
        rng = np.random.default_rng(seed)
        images = [picture(1, 60, 60), picture(2, 90, 60), picture(3, 60, 120)]
        self.shown = [(images[0],), (), (images[1], images[2]), (images[2],)]
        mark = self.vision.processor.image_token
        tokenizer = self.vision.processor.tokenizer
        self.prompts = []
        for shown in self.shown:
            parts = [
                {"type": "text", "text": "How many"},
                *[{"type": "image"}] * len(shown),
                {"type": "text", "text": "?"},
            ]
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
            )
            assert text.count(mark) == len(shown)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            self.prompts.append(np.array(self.vision.expand(ids, shown), dtype=np.int32))
        self.of = [0, 0, 1, 1, 2, 2, 3]
        self.responses = [rng.integers(3, 290, n).astype(np.int32) for n in (5, 9, 4, 7, 6, 3, 8)]
        for row in (1, 4):
            self.responses[row][2] = self.vision.placeholder
        self.responses[2][1] = self.vision.placeholder
        prompts = [self.prompts[number] for number in self.of]
        self.batch = TokenBatch.of(prompts, self.responses, [self.shown[number] for number in self.of])

    def packed(self, policy, rows=None, shared=True):
        """[N] log-probs of the responses in one packed pass."""
        chosen = list(range(len(self.of))) if rows is None else rows
        packs, _ = pack_rows(self.batch, chosen, 10_000, shared, False)
        batch = pack(self.batch, packs, packed=True, place_images=policy.image_reader.place)
        found, *_ = policy(
            batch.input_ids,
            batch.logit_index,
            batch.targets,
            positions=batch.positions,
            packing=batch.packing,
            images=batch.images,
        )
        return found[np.argsort(batch.token_index)]

    def alone(self, lm):
        """[N] log-probs of the responses by the model's own pass over each row; the placeholder is `LIKE`."""
        found = []
        for logits, sampled in self.outputs(lm):
            found.append(torch.log_softmax(logits.float(), -1).gather(1, sampled[:, None])[:, 0])
        return torch.cat(found)

    def hidden(self, lm):
        """Last hidden states that predict each response, by the model's own pass over each row."""
        head = lm.get_output_embeddings()
        seen = []
        handle = head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        numbers = [len(sampled) for _, sampled in self.outputs(lm)]
        handle.remove()
        return [states[0, -1 - number : -1] for states, number in zip(seen, numbers, strict=True)]

    def outputs(self, lm):
        """Logits that predict each response by the model's own pass over the row, and the response."""
        found = []
        for row, (number, response) in enumerate(zip(self.of, self.responses, strict=True)):
            prompt = torch.from_numpy(self.prompts[number]).long()
            shown = self.batch.images[row]
            later = [token for image in shown[len(self.shown[number]) :] for token in self.vision.expansion(image)]
            own = np.flatnonzero(response == self.vision.placeholder)[: later.count(self.vision.placeholder)]
            sampled = np.where(response == self.vision.placeholder, LIKE, response)
            sampled[own] = self.vision.placeholder
            sampled = torch.from_numpy(sampled).long()
            ids = torch.cat([prompt, sampled])[None]
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if shown:
                images = [[decode(image) for image in shown]]
                mark = self.vision.processor.image_token
                made = self.vision.processor(text=[mark * len(shown)], images=images, return_tensors="pt")
                inputs |= {
                    name: made[name]
                    for name in ("pixel_values", "image_grid_thw", "pixel_attention_mask")
                    if name in made
                }
            if hasattr(lm.base_model, "get_rope_index"):
                inputs["mm_token_type_ids"] = (ids == self.vision.placeholder).int()
            found.append((lm(**inputs).logits[0, len(prompt) - 1 : -1], sampled))
        return found


def test_only_prompts_with_the_same_images_are_shared(policy):
    """The tokens of a question about two images of the same size are the same."""
    rows = Rows(policy)
    rows.shown = [(picture(4),), (picture(5),), (), ()]
    rows.prompts = [rows.prompts[0], rows.prompts[0], rows.prompts[1], rows.prompts[1]]
    rows.of = [0, 0, 1, 1, 2, 3, 3]
    prompts = [rows.prompts[number] for number in rows.of]
    rows.batch.prompt_ids, rows.batch.prompt_offsets = np.concatenate(prompts), np.cumsum([0, *map(len, prompts)])
    rows.batch.images = np.fromiter((rows.shown[number] for number in rows.of), dtype=object, count=len(rows.of))
    packs, _ = pack_rows(rows.batch, list(range(len(rows.of))), 10_000, True, False)
    assert packs == [[0, 1], [2, 3], [4, 5, 6]]
    with torch.no_grad():
        shared, single = rows.packed(policy), rows.packed(policy, shared=False)
    assert (shared - single).abs().max() < 1e-5


def test_packed_rows_get_the_log_probs_and_gradients_of_single_rows(policy):
    rows = Rows(policy)
    names = [name for name, _ in policy.lm.named_parameters()]
    weights = torch.linspace(-1, 1, len(rows.batch.response_ids))

    def gradients(log_probs):
        policy.zero_grad()
        (log_probs * weights).sum().backward()
        return {name: p.grad.clone() for name, p in policy.lm.named_parameters() if p.grad is not None}

    ours = rows.packed(policy)
    packed = gradients(ours)
    unshared = rows.packed(policy, shared=False)
    text = policy.decoder.config.get_text_config()
    text._attn_implementation = "sdpa"
    theirs = rows.alone(policy.lm)
    single = gradients(theirs)
    text._attn_implementation = "packed"
    assert (ours - theirs).abs().max() < 1e-5
    assert (unshared - theirs).abs().max() < 1e-5
    assert set(packed) == set(single) and len(packed) > 0.9 * len(names), "tower and projector are among them"
    placeholder = rows.vision.placeholder
    embedding = next(name for name in names if name.endswith("embed_tokens.weight"))
    for found in (packed, single):
        # The stand-in's share belongs to the placeholder.
        found[embedding][placeholder] += found[embedding][LIKE]
        found[embedding][LIKE] = 0
    for name in packed:
        scale = single[name].abs().max()
        assert (packed[name] - single[name]).abs().max() <= 1e-4 * scale + 1e-6, name


def test_images_of_observations_are_read_in_their_responses(policy):
    """After a first turn, responses 0, 2 and 5 have an observation with one or two images; 5 has none in its prompt."""
    rows = Rows(policy)
    vision = rows.vision
    rows.of = [0, 0, 1, 1, 2, 1, 1]
    further = {0: [picture(7, 60, 90)], 2: [picture(8), picture(9, 90, 60)], 5: [picture(7, 60, 90)]}
    for row, images in further.items():
        seen = [token for image in images for token in (11, *vision.expansion(image))]
        rows.responses[row] = np.array([5, 6, *seen, *rows.responses[row], vision.placeholder, 9], dtype=np.int32)
    rows.batch = TokenBatch.of(
        [rows.prompts[number] for number in rows.of],
        rows.responses,
        [(*rows.shown[number], *further.get(row, ())) for row, number in enumerate(rows.of)],
    )
    packs, _ = pack_rows(rows.batch, list(range(len(rows.of))), 10_000, True, False)
    assert packs == [[0], [1], [2], [3], [4], [5], [6]]
    rows.batch.images[1] = rows.batch.images[0]
    rows.responses[1] = rows.responses[0][:-1]
    rows.batch = TokenBatch.of([rows.prompts[number] for number in rows.of], rows.responses, rows.batch.images)
    packs, _ = pack_rows(rows.batch, list(range(len(rows.of))), 10_000, True, False)
    assert packs[0] == [0, 1], "the same images in prompt and observations"
    with torch.no_grad():
        ours, single = rows.packed(policy), rows.packed(policy, shared=False)
        policy.decoder.config.get_text_config()._attn_implementation = "sdpa"
        theirs = rows.alone(policy.lm)
    assert (ours - theirs).abs().max() < 1e-5
    assert (single - theirs).abs().max() < 1e-5
    policy.decoder.config.get_text_config()._attn_implementation = "packed"
    rows.batch.images[2] = rows.batch.images[2][:1]
    rows.batch.response_ids[rows.batch.response_offsets[2] + 3] = 12
    with pytest.raises(ValueError, match="do not stand in the tokens of its row: the row was cut"):
        rows.packed(policy)


def test_log_probs_depend_on_the_images(policy):
    rows = Rows(policy)
    with torch.no_grad():
        right = rows.packed(policy)
        rows.batch.images[0] = rows.batch.images[1] = (picture(9, 60, 60),)
        wrong = rows.packed(policy)
    first = slice(0, int(rows.batch.response_offsets[2]))
    assert (right - wrong)[first].abs().max() > 1e-3
    assert (right - wrong)[first.stop :].abs().max() < 1e-5


def test_rows_without_images_need_no_tower(policy, monkeypatch):
    rows = Rows(policy)
    with torch.no_grad():
        right = rows.packed(policy)[rows.batch.response_offsets[2] : rows.batch.response_offsets[4]]
        monkeypatch.setattr(policy.image_reader, "_features", None)
        alone = rows.packed(policy, [2, 3])
    assert (right - alone).abs().max() < 1e-5
    # A tower over several ranks gets a blank image, which changes nothing.
    monkeypatch.undo()
    with torch.no_grad():
        ids = torch.arange(8)[None]
        blank = policy.image_reader.embed(ids, None, sharded=True)
    assert torch.equal(blank["inputs_embeds"], policy.lm.get_input_embeddings()(ids))
    policy.image_reader.embed(ids, None, sharded=True)["inputs_embeds"].sum().backward()
    assert all(parameter.grad is not None for parameter in tower(policy.lm) if parameter.requires_grad)


def test_a_frozen_tower_gets_no_gradients(folder):
    policy = load_policy(ModelConfig(path=str(folder), vision="frozen"))
    Passes.of(policy, "auto")
    own = {id(parameter) for parameter in tower(policy.lm)}
    assert 0 < len(own) < len(list(policy.parameters()))
    Rows(policy).packed(policy).sum().backward()
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is None) == (id(parameter) in own), name
        assert parameter.requires_grad != (id(parameter) in own), name


def test_adapters_are_in_the_decoder_only(folder):
    config = ModelConfig(path=str(folder), vision="frozen", lora=LoraConfig(rank=2))
    policy = load_policy(config)
    adapted = {name for name, _ in policy.decoder.named_parameters() if ".lora_" in name}
    assert adapted and len(adapted) == sum(".lora_" in name for name, _ in policy.named_parameters())
    assert lora.coverage(config).complete is not None
    Passes.of(policy, "auto")
    Rows(policy).packed(policy).sum().backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert trained and all(".lora_" in name for name in trained)


def test_a_reference_reads_the_same_images(folder, policy):
    reference = load_frozen(ModelConfig(path=str(folder), vision="trained"), ModelConfig(path=str(folder)))
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    Passes.of(reference, "auto")
    with torch.no_grad():
        embedding = reference.lm.get_input_embeddings().weight
        embedding[LIKE] = embedding[reference.image_reader.vision.placeholder]
        assert torch.equal(Rows(policy).packed(policy), Rows(reference).packed(reference))


@pytest.mark.parametrize("vision", ["trained", "frozen"])
def test_a_critic_reads_the_same_images(folder, policy, vision):
    critic = load_value_model(ModelConfig(path=str(folder), vision=vision))
    assert Passes.of(critic, "auto").shared
    rows, lm = Rows(policy), policy.lm
    with torch.no_grad():
        critic.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        embedding = critic.decoder.get_input_embeddings().weight
        embedding[LIKE] = embedding[rows.vision.placeholder]
    packs, _ = pack_rows(rows.batch, list(range(len(rows.of))), 10_000, True, False)
    batch = pack(rows.batch, packs, packed=True, place_images=critic.image_reader.place)
    # In float64: the gradients of some biases are 0 but for rounding, which differs by the kind of CPU.
    critic.double()
    policy.lm.double()
    values = critic(batch.input_ids, batch.logit_index, batch.positions, batch.packing, batch.images)
    text = policy.decoder.config.get_text_config()
    text._attn_implementation = "sdpa"
    expected = torch.cat([hidden @ critic.head.weight[0] for hidden in rows.hidden(lm)])
    assert (values[np.argsort(batch.token_index)] - expected).abs().max() < 1e-4 * expected.abs().max()
    values.sum().backward()
    expected.sum().backward()
    theirs = {name: parameter for name, parameter in lm.named_parameters() if parameter in set(tower(lm))}
    ours = dict(critic.tower.named_parameters())
    assert len(ours) == len(theirs) > 0
    for name, parameter in theirs.items():
        found = ours[name.removeprefix("model.")].grad
        if vision == "frozen":
            assert found is None
        else:
            assert (found - parameter.grad).abs().max() <= 1e-4 * parameter.grad.abs().max() + 1e-6, name


def test_a_critic_without_weights_of_its_tower_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "critic")
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "patch_embed" not in name}
    assert len(kept) < len(weights)
    save_file(kept, tmp_path / "critic/model.safetensors", {"format": "pt"})
    config = ModelConfig(path=str(folder), vision="frozen")
    with pytest.raises(ValueError, match="critic.path=.* lacks [12] weights, the first .*patch_embed"):
        load_value_model(config, str(tmp_path / "critic"))


def test_placeholders_that_do_not_fit_to_the_images(policy):
    rows = Rows(policy)
    rows.batch.images[0] = rows.batch.images[1] = ()
    with pytest.raises(
        ValueError, match="placeholders of features, and they are not those of its 0 images: the row was cut"
    ):
        rows.packed(policy)


def test_padded_rows_are_refused(policy):
    rows = Rows(policy)
    with pytest.raises(ValueError, match="rows with images must be packed"):
        pack(rows.batch, [[0]], packed=False, place_images=policy.image_reader.place)


def test_a_model_that_cannot_pack_is_refused(folder):
    policy = load_policy(ModelConfig(path=str(folder), vision="frozen", attn_implementation="eager"))
    with pytest.raises(ValueError, match="model.vision needs packed rows, but .* cannot: only attention 'sdpa'"):
        Passes.of(policy, "auto")


@pytest.mark.parametrize("counts", [(1, 1), (0, 2, 1), (0, 0), (2, 2)])
def test_rows_keep_their_images_in_batches(counts):
    rows = [
        {"prompt_ids": [1], "response_ids": [2], "images": [bytes([number, i]) for i in range(count)]}
        for number, count in enumerate(counts)
    ]
    names = ("prompt_ids", "response_ids", "images")
    table = pa.Table.from_pylist(rows, schema=pa.schema([SCHEMA.field(name) for name in names]))
    found = TokenBatch.from_table(table).images
    assert found.shape == (len(counts),) and [list(images) for images in found] == [row["images"] for row in rows]
    assert TokenBatch.from_table(table.drop_columns(["images"])).images is None
    contexts = pa.array([[{"prompt": None, "tokens": 1}, {"prompt": [3], "tokens": 0}]] * len(counts), CONTEXTS)
    with pytest.raises(ValueError, match="rows with images have several contexts"):
        TokenBatch.from_table(table.append_column("contexts", contexts))


def test_a_saved_model_keeps_its_images(policy, tmp_path):
    rows, vision = Rows(policy), policy.image_reader.vision
    with torch.no_grad():
        expected = rows.packed(policy)
    save_hf(policy, vision.processor.tokenizer, tmp_path / "saved")
    saved = load_policy(ModelConfig(path=str(tmp_path / "saved"), vision="frozen"))
    Passes.of(saved, "auto")
    image = rows.shown[0][0]
    assert saved.image_reader.vision.expansion(image) == vision.expansion(image)
    with torch.no_grad():
        assert torch.equal(rows.packed(saved), expected)


def test_an_image_of_several_tiles(tmp_path):
    """SmolVLM cuts large images into tiles, with tokens between them, and adds the whole image."""
    save_tiny(tmp_path / "model", "smolvlm")
    policy = load_policy(ModelConfig(path=str(tmp_path / "model"), vision="trained"))
    Passes.of(policy, "auto")
    vision = policy.image_reader.vision
    pictures = vision.processor.image_processor
    plain = len(vision.expansion(picture(1)))
    pictures.do_image_splitting, pictures.size = True, {"longest_edge": 112}
    policy.image_reader.vision = Vision(vision.processor)
    with torch.no_grad():
        embedding = policy.lm.get_input_embeddings().weight
        embedding[LIKE] = embedding[vision.placeholder]
        rows = Rows(policy)
        assert len(rows.vision.expansion(picture(1))) > 4 * plain
        ours = rows.packed(policy)
        policy.decoder.config.get_text_config()._attn_implementation = "sdpa"
        assert (ours - rows.alone(policy.lm)).abs().max() < 1e-5
