"""A replica scores rows with images as the policy does in the trainer."""

import numpy as np
import pyarrow as pa
import torch

from pipeline.config.learner import ActorConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ReferenceConfig
from pipeline.models.policy import load_policy
from pipeline.models.sharing import Passes
from pipeline.rows import SCHEMA
from pipeline.scoring.reference import Reference
from tests.models.test_vision import Rows
from tests.pictures import save_tiny

NAMES = ("prompt_ids", "response_ids", "images")


def test_the_reference_reads_images(tmp_path):
    save_tiny(tmp_path / "model", "qwen3_vl")
    model = ModelConfig(path=str(tmp_path / "model"), vision="frozen")
    policy = load_policy(model)
    Passes.of(policy, "auto")
    rows = Rows(policy)
    table = pa.Table.from_pylist(
        [
            {"prompt_ids": rows.prompts[number], "response_ids": response, "images": list(rows.shown[number])}
            for number, response in zip(rows.of, rows.responses, strict=True)
        ],
        schema=pa.schema([SCHEMA.field(name) for name in NAMES]),
    )
    stage = Reference(model, ReferenceConfig(num_gpus=0), ActorConfig(), temperature=1.0)
    found = np.concatenate([row.values.to_numpy() for row in stage(table)["ref_log_probs"]])
    with torch.no_grad():
        expected = rows.packed(policy).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
