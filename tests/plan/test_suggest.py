"""What is suggested for a model and a number of GPUs passes the plan's own checks, fits, and finds room on nodes."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, load_config
from pipeline.plan.gpus import GIB, GPUS, Gpu
from pipeline.plan.memory import Models, read_models
from pipeline.plan.models import read_model
from pipeline.plan.placement import Node, place
from pipeline.plan.plan import Plan, plan
from pipeline.plan.suggest import laid_over, suggest, suggested
from tests.shapes import MODELS, write_shape

COUNTS = (1, 2, 4, 8, 16, 32, 64)
BATCH = [
    *("data.train_files=x.parquet", "data.train_batch_size=512", "data.max_prompt_length=512"),
    *("data.max_response_length=1024", "rollout.n=8", "rollout.chunk_prompts=32", "rollout.max_num_seqs=1024"),
    "actor.ppo_mini_batch_size=256",
]
GPU = GPUS["H100"]
PAGE = Path(__file__).parents[2] / "docs" / "gpus.md"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of all models by their names."""
    root = tmp_path_factory.mktemp("shapes")
    for name in MODELS:
        write_shape(name, root / name)
    return root


def asked(folders: Path, model: str, *settings: str) -> tuple[Config, Models]:
    config = load_config([*BATCH, f"model.path={folders / model}", *settings])
    models = read_models(config)
    assert models
    return config, models


def planned(config: Config, models: Models, gpus: int, gpu: Gpu = GPU) -> Plan | None:
    """The plan of what is suggested."""
    settings = suggest(config, models, gpus, gpu)
    return None if settings is None else plan(laid_over(config, settings), gpu=gpu)


def layout(config: Config) -> str:
    """Workers and engines, mesh, and what saves memory.

    `8 shared`: workers and engines on the same 8 GPUs; `4 + 2 x 2`: 4 workers, 2 engines of 2 GPUs. `t`, `r`: tensor,
    replicate. `c`: checkpointing, `o`, `h`: offload of the optimiser or all, `a`: of activations, `L`: adapters.
    """
    rollout, parallel, model = config.rollout, config.actor.parallel, config.model
    workers, offload = config.trainer.num_workers, config.actor.fsdp.offload
    engines = f"{rollout.num_engines}" + (f" x {rollout.tensor_parallel_size}" * (rollout.tensor_parallel_size > 1))
    words = [f"{workers} shared" if config.trainer.gpus_per_worker < 1 else f"{workers} + {engines}"]
    words += [f"t{parallel.tensor}"] * (parallel.tensor > 1) + [f"r{parallel.replicate}"] * (parallel.replicate > 1)
    saving = {"none": "", "optimizer": "o", "all": "h"}[offload] + "a" * model.activation_offload
    saving = "c" * model.enable_gradient_checkpointing + saving + "L" * (model.lora.rank > 0)
    return " ".join([*words, saving]).strip()


SUGGESTED = {
    "Qwen2.5-0.5B": (
        *("1 shared: 34", "2 shared: 30", "4 shared: 28", "8 shared: 27"),
        *("16 shared r2: 27", "32 shared r4: 27", "64 shared r8: 27"),
    ),
    "Qwen2.5-1.5B": (
        *("1 shared c: 29", "2 shared: 64", "4 shared: 59", "8 shared: 56"),
        *("16 shared r2: 56", "32 shared r4: 56", "64 shared r8: 56"),
    ),
    "Qwen2.5-7B": (
        *("1 shared ch: 13", "2 shared co: 41", "4 shared c: 41", "8 shared c: 27"),
        *("16 shared r2 c: 27", "32 shared r4 c: 27", "64 shared r8 c: 27"),
    ),
    "Qwen3-8B": (
        *("1 shared ch: 14", "2 shared co: 45", "4 shared c: 45", "8 shared c: 30"),
        *("16 shared r2 c: 30", "32 shared r4 c: 30", "64 shared r8 c: 30"),
    ),
    "Qwen3-14B": (
        *("1 shared ch: 18", "2 shared ch: 18", "4 shared co: 46", "8 shared c: 46"),
        *("16 shared r2 c: 46", "32 shared r4 c: 46", "64 shared r8 c: 46"),
    ),
    "Qwen3-32B": (
        *("", "", "2 + 1 x 2 ch: 25", "4 + 2 x 2 ch: 25"),
        *("8 + 4 x 2 co: 56", "16 + 8 x 2 c: 56", "32 + 16 x 2 c: 40"),
    ),
    "Qwen2.5-72B": ("", "", "", "4 + 1 x 4 cL: 70", "8 + 2 x 4 ch: 42", "16 + 4 x 4 coa: 56", "32 + 8 x 4 co: 59"),
    "Qwen3-30B-A3B": (
        *("", "", "2 + 1 x 2 t2 ch: 9", "4 + 2 x 2 t4 co: 63"),
        *("8 + 4 x 2 t4 c: 63", "16 + 8 x 2 t4 r2 c: 63", "32 + 16 x 2 t4 r4 c: 63"),
    ),
}
"""Layout and GiB of a train worker for each of `COUNTS`, as `layout` abbreviates them; empty if nothing fits."""


def smallest(cells: tuple[str, ...], without: str) -> str:
    """Return the smallest of `COUNTS` whose cell has no saving of `without`."""
    fits = [count for count, cell in zip(COUNTS, cells, strict=True) if cell and not set(without) & set(saving(cell))]
    return str(fits[0]) if fits else f"more than {COUNTS[-1]}"


def saving(cell: str) -> str:
    """Return what saves memory in a cell of `SUGGESTED`."""
    last = cell.partition(":")[0].split()[-1]
    return "" if last == "shared" or last[-1].isdigit() else last


@pytest.mark.parametrize("model", MODELS)
def test_a_suggestion_passes_the_plan_and_fits(folders: Path, model: str) -> None:
    config, models = asked(folders, model)
    cells = []
    for count, expected in zip(COUNTS, SUGGESTED[model], strict=True):
        made = planned(config, models, count)
        assert (made is None) == (not expected), count
        if made is None:
            cells.append("")
            continue
        assert made.too_large == () and made.gpus <= count and made.memory
        assert place(made.stages, [Node({"CPU": 96, "GPU": min(count, 8)}) for _ in range(-(-count // 8))])
        cells.append(f"{layout(made.config)}: {made.memory.train_peak / GIB:.0f}")
    assert tuple(cells) == SUGGESTED[model]


@pytest.mark.parametrize("model", MODELS)
def test_the_page_has_the_smallest_numbers_of_gpus(model: str) -> None:
    cells = SUGGESTED[model]
    any_, whole = smallest(cells, ""), smallest(cells, "L")
    first = any_ if any_ == whole else f"{any_} (adapters), {whole}"
    assert f"| {model} | {first} | {smallest(cells, 'ohL')} |" in PAGE.read_text(encoding="utf-8").splitlines()


def test_what_is_printed_can_be_typed(folders: Path) -> None:
    config, _ = asked(folders, "Qwen3-8B")
    name, text = suggested(config, 8, GPU)
    settings, _, words = text.partition(" (")
    assert name == "suggested for 8 x H100" and words == "a train worker: 29.5 GiB of its GPU)"
    typed, _ = asked(folders, "Qwen3-8B", *settings.split())
    assert (typed.trainer.num_workers, typed.rollout.num_engines) == (8, 8) and not plan(typed, gpu=GPU).too_large
    assert suggested(typed, 8, GPU)[1].startswith("the settings as they are (")


def test_experts_are_divided_within_a_node_and_adapters_come_last(folders: Path) -> None:
    made = planned(*asked(folders, "Qwen3-30B-A3B"), 32)
    assert made and made.config.rollout.tensor_parallel_size == 2
    parallel = made.config.actor.parallel
    assert (parallel.tensor, parallel.expert, parallel.replicate) == (4, 4, 2)  # 4 heads of keys, and 16 train workers
    few, more = (planned(*asked(folders, "Qwen2.5-72B"), count) for count in (8, 16))
    assert few and few.config.model.lora.rank and few.config.model.dtype == "bfloat16"
    assert more and more.config.model.lora.rank == 0
    wanted = planned(*asked(folders, "Qwen3-8B", "model.lora.rank=16", "model.dtype=bfloat16"), 1)
    assert wanted and wanted.config.model.lora.rank == 16 and wanted.config.actor.fsdp.offload == "none"


def test_rows_for_which_a_gpu_is_too_small_are_divided(tmp_path: Path) -> None:
    """A quarter of a million tokens: half of them leave room on each of two workers with the same rows."""
    long = write_shape("Qwen3-8B", tmp_path / "long") / "config.json"
    long.write_text(json.dumps(MODELS["Qwen3-8B"] | {"max_position_embeddings": 262144}))
    rows = ["data.max_response_length=261632", "actor.ppo_max_token_len_per_gpu=262144"]
    made = planned(*asked(tmp_path, "long", *rows), 4)
    assert made and not made.too_large and made.actor.max_tokens == 262144
    assert (made.config.actor.parallel.sequence, made.config.actor.ppo_max_token_len_per_gpu) == (2, 131072)
    assert made.config.trainer.num_workers % 2 == 0 and not made.config.model.lora.rank
    odd = planned(
        *asked(tmp_path, "long", "data.max_response_length=261631", "actor.ppo_max_token_len_per_gpu=262143"), 4
    )
    assert odd and odd.config.actor.parallel.sequence == 2 and not odd.config.model.lora.rank


def values(folders: Path, model: str, count: int, *settings: str) -> dict[str, Any]:
    config, models = asked(folders, model, *settings)
    found = suggest(config, models, count, GPU)
    assert found
    return dict(found)


def test_engines_that_generate_ahead_do_not_sleep(folders: Path) -> None:
    assert values(folders, "Qwen2.5-1.5B", 8)["rollout.sleep"] is True
    ahead = values(folders, "Qwen2.5-1.5B", 8, "algorithm.max_staleness=1")
    assert ahead["rollout.sleep"] is False and ahead["trainer.num_workers"] == ahead["rollout.num_engines"] == 4


def test_replicas_keep_their_gpus_and_a_critic_is_offloaded_too(folders: Path) -> None:
    ppo = ["algorithm=ppo", "scoring.value.num_gpus=1", "scoring.reference.num_gpus=1"]
    config, models = asked(folders, "Qwen3-8B", *ppo)
    found = suggest(config, models, 8, GPU)
    assert found and found["critic.fsdp.offload"] == found["actor.fsdp.offload"]
    made = plan(laid_over(config, found), gpu=GPU)
    assert made.gpus <= 8 and made.too_large == ()
    _, text = suggested(config, 2, GPU)
    replicas = "the 2 GPUs of replicas (scoring.reference, scoring.value)"
    assert text.startswith(f"nothing: {replicas} leave none to train; lower their num_workers")
    _, text = suggested(config, 3, Gpu("Z0", 10 * GIB, None))
    assert text.startswith(f"nothing: no layout fits beside {replicas}; take more GPUs")


def test_every_worker_gets_whole_chunks(folders: Path) -> None:
    odd = values(folders, "Qwen2.5-0.5B", 8, "data.train_batch_size=60", "actor.ppo_mini_batch_size=30")
    assert odd["trainer.num_workers"] == 6 and odd["rollout.chunk_prompts"] == 5


def test_a_replay_has_no_engines(folders: Path) -> None:
    settings = values(folders, "Qwen3-8B", 4, "data.recorded_run=runs/x", "data.train_files=null")
    assert settings["trainer.num_workers"] == 4 and "rollout.num_engines" not in settings


def test_an_unknown_kind_of_gpu_gets_what_fits_first(folders: Path) -> None:
    unknown = Gpu("Z1", GPU.memory, None)
    made = planned(*asked(folders, "Qwen3-8B"), 8, unknown)
    assert made and made.too_large == ()
    small = Gpu("Z0", 5 * GIB, None)
    config, models = asked(folders, "Qwen3-8B")
    assert suggest(config, models, 8, small) is None
    assert suggested(config, 8, small)[1].startswith("nothing: no layout fits")
    config.model.path = "owner/model"
    assert suggested(config, 8, small)[1].startswith("nothing: model.path is not a local folder")


def test_the_shapes_have_the_published_numbers_of_parameters(folders: Path) -> None:
    found = [read_model(folders / name) for name in MODELS]
    published = [0.49, 1.54, 7.62, 8.19, 14.77, 32.76, 72.71, 30.53]
    assert [round(model.parameters / 1e9, 2) for model in found if model] == published
