"""Whole runs whose prompts have images: training, the folder of the run, and what reads it afterwards."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jobs import evaluate, show
from jobs.tiny_vision import FAMILIES
from pipeline.config.model import ModelConfig
from pipeline.models.batch import TokenBatch
from pipeline.models.packing import pack
from pipeline.models.policy import load_policy
from pipeline.models.sharing import Passes, pack_rows
from pipeline.replay.recording import Recording
from pipeline.rows import SCHEMA
from pipeline.track.trajectories import read_trajectories
from tests.pictures import picture, save_tiny
from tests.runs import Run, replayed, starter

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS, SAMPLES = 8, 3
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 3)
"""


def settings(folder: Path, family: str) -> list[str]:
    """A run on prompts with 0, 1 and 2 images. The questions with one image have the same tokens."""
    save_tiny(folder / "model", family)
    (folder / "reward.py").write_text(REWARD)
    shown = [[picture(number, 60, 90)] * (number % 3) for number in range(PROMPTS)]
    content = ["<image> and " * len(images) + "What colour is the shape?" for images in shown]
    table = {
        "data_source": ["pictures"] * PROMPTS,
        "prompt": [[{"role": "user", "content": text}] for text in content],
        "images": pa.array(shown, pa.list_(pa.binary())),
        "reward_model": [{"ground_truth": "4"}] * PROMPTS,
    }
    pq.write_table(pa.table(table), folder / "prompts.parquet")
    return [
        *(f"data.train_files={folder / 'prompts.parquet'}", f"data.val_files={folder / 'prompts.parquet'}"),
        *(f"data.train_batch_size={PROMPTS}", f"rollout.chunk_prompts={PROMPTS // 2}", f"rollout.n={SAMPLES}"),
        *("data.max_prompt_length=96", "data.max_response_length=8", "rollout.max_num_seqs=32"),
        *("rollout.dtype=float32", "rollout.enforce_eager=true", "rollout.cpu_kvcache_space_gb=1"),
        *(f"model.path={folder / 'model'}", "model.vision=trained", "actor.optim.lr=1e-2", "trainer.num_workers=2"),
        *(f"reward.custom_reward_function.path={folder / 'reward.py'}", "trainer.max_log_prob_gap=1e-4"),
        *("trainer.ray_num_cpus=8", f"trainer.default_local_dir={folder / 'runs'}"),
    ]


def check(run: Run, folder: Path, iteration: int) -> None:
    """The images of a recorded iteration are there once a group, and the rows are of the version before it."""
    assert "with an image" in json.loads((run.folder / "handshake.json").read_text())["found"]
    assert run.records[iteration]["training/rollout_log_probs_diff_max"] < 1e-4
    rows = read_trajectories(str(run.folder), iteration).to_pylist()
    given = pq.read_table(folder / "prompts.parquet")["images"].to_pylist()
    assert len(rows) == PROMPTS * SAMPLES
    for row in rows:
        assert row["images"] == (given[row["prompt_index"]] if row["sample"] == 0 else None)
        assert len(row["image_hash"]) == len(given[row["prompt_index"]])


def gap(model: Path, run: Run, iteration: int) -> float:
    """Largest difference of the engine's log-probs in an iteration from those of the model in a folder."""
    recording = Recording(str(run.folder), str(iteration), images=True)
    rows = recording.rows(0, PROMPTS)
    policy = load_policy(ModelConfig(path=str(model), vision="frozen"))
    assert policy.image_reader is not None and Passes.of(policy, "auto").shared
    tokens = TokenBatch.from_table(rows)
    packs, _ = pack_rows(tokens, list(range(len(rows))), 10_000, True, False)
    batch = pack(tokens, packs, packed=True, place_images=policy.image_reader.place)
    where = {"positions": batch.positions, "packing": batch.packing, "images": batch.images}
    with torch.no_grad():
        found, *_ = policy(batch.input_ids, batch.logit_index, batch.targets, **where)
    engine = np.concatenate(rows["rollout_log_probs"].to_pylist())[batch.token_index]
    return float(np.abs(found.numpy() - engine).max())


def test_a_run_with_images(tmp_path: Path, ray_session: None) -> None:
    start = starter(settings(tmp_path, "qwen2_5_vl"))
    run = start("shown", "trainer.total_training_steps=2", "trainer.test_freq=2")
    for iteration in (1, 2):
        check(run, tmp_path, iteration)
    assert gap(tmp_path / "model", run, 1) < 1e-4 < gap(tmp_path / "model", run, 2), "the second is of new weights"
    rows = read_trajectories(str(run.folder), 1).to_pylist()
    uid, page = next(row["uid"] for row in rows if row["prompt_index"] == 2), io.StringIO()
    with contextlib.redirect_stdout(page):
        assert show.main([str(run.folder), "--split", "val", "--uid", "val-2"]) == 0
        assert show.main([str(run.folder), "--iteration", "1", "--uid", uid, "--sample", "1"]) == 0
    assert page.getvalue().count("[image 60 x 90 PNG] and [image 60 x 90 PNG] and What colour") == 2
    assert (run.folder / "model" / "processor_config.json").is_file()


GALLERY = """
import io

from PIL import Image

from pipeline.agent import Environment, Observation


def picture(number):
    file = io.BytesIO()
    Image.new("RGB", (60, 60 + 30 * (number % 2)), (40 * number % 256, 90, 200)).save(file, "PNG")
    return file.getvalue()


class Gallery(Environment):
    def reset(self, row, seed):
        self.turn, self.seed = 0, seed
        return Observation("Look: <image>", images=[picture(seed)])

    def step(self, message):
        self.turn += 1
        if self.turn == 2:
            return Observation(done=True, reward=len(message.text) % 3)
        new = [picture(self.seed + 1), picture(len(message.text))]
        return Observation("<image> and <image>, which is taller?", images=new, reward=0.5)
"""


@pytest.mark.long
@pytest.mark.parametrize("engine", ["vllm", "hf"])
@pytest.mark.parametrize("family", FAMILIES)
def test_episodes_whose_observations_are_pictures(tmp_path: Path, family: str, engine: str, ray_session: None) -> None:
    given = [word for word in settings(tmp_path, family) if not word.startswith(("reward.", "data.max_"))]
    (tmp_path / "gallery.py").write_text(GALLERY)
    agent = (f"agent.environment={tmp_path / 'gallery.py'}:Gallery", "agent.max_turns=3", "agent.max_turn_tokens=6")
    lengths = ("data.max_prompt_length=160", "data.max_response_length=160")
    more = (f"rollout.name={engine}", *agent, *lengths, "trainer.total_training_steps=2", "trainer.test_freq=2")
    run = starter(given)("gallery", *more)
    given_images = pq.read_table(tmp_path / "prompts.parquet")["images"].to_pylist()
    for iteration in (1, 2):
        assert run.records[iteration]["training/rollout_log_probs_diff_max"] < 1e-4
        rows = Recording(str(run.folder), str(iteration), episodes=True, images=True).rows(0, PROMPTS).to_pylist()
        for row in rows:
            assert row["env_error"] is None
            own = given_images[row["prompt_index"]]
            # A policy of so few tokens writes the placeholder at times, which ends its episode.
            further = 1 if row["ended"] == "malformed" else 3
            assert row["images"][: len(own)] == own and len(row["images"]) == len(own) + further
            assert len(row["image_hash"]) == len(row["images"])
        assert sum(row["ended"] == "done" for row in rows) > len(rows) / 2
        assert len({tuple(row["images"]) for row in rows}) > PROMPTS, "samples of a group see pictures of their own"
    written = read_trajectories(str(run.folder), 1).to_pylist()
    assert all(row["images"] is not None for row in written if row["sample"] == 0)
    chosen = next(row for row in written if row["ended"] == "done" and row["images"] is not None)
    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        words = ("--iteration", "1", "--uid", chosen["uid"], "--sample", str(chosen["sample"]))
        assert show.main([str(run.folder), *words]) == 0
    assert page.getvalue().count("[image 60 x ") == len(chosen["images"])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_hf_and_a_critic_read_images(tmp_path: Path, family: str, ray_session: None) -> None:
    start = starter(settings(tmp_path, family))
    more = ("rollout.name=hf", "algorithm=ppo", "critic.optim.lr=1e-2", "trainer.total_training_steps=2")
    run = start("valued", *more)
    for iteration in (1, 2):
        check(run, tmp_path, iteration)
    assert run.records[2]["critic/grad_norm"] > 0
    assert gap(tmp_path / "model", run, 1) < 1e-4 < gap(tmp_path / "model", run, 2), "the second is of new weights"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_continues_and_what_reads_it(tmp_path: Path, family: str, ray_session: None) -> None:
    given = settings(tmp_path, family)
    start = starter(given)
    start("shown", "trainer.total_training_steps=2", "trainer.save_freq=1")
    run = start("shown", "trainer.total_training_steps=4", "trainer.save_freq=1")
    assert sorted(run.records)[-4:] == [1, 2, 3, 4]
    for iteration in (1, 2, 3, 4):
        check(run, tmp_path, iteration)
    again = replayed(run.folder, "again", "trainer.ray_num_cpus=8")
    for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
        assert again.records[1][name] == pytest.approx(run.records[1][name], rel=1e-4, abs=1e-6)
    assert "images" in SCHEMA.names and gap(again.folder / "model", run, 4) > 1e-4
    out = tmp_path / "evaluated"
    files = [f"data.val_files={tmp_path / 'prompts.parquet'}", f"model.path={run.folder / 'model'}"]
    rest = [word for word in given if word.startswith(("data.max_", "rollout.", "reward.", "model.vision"))]
    assert evaluate.main([*rest, *files, "trainer.ray_num_cpus=8", "--out", str(out)]) == 0
    (part, *_) = sorted((out / "responses").glob("*.parquet"))
    assert "image_hash" in pq.read_schema(part).names
