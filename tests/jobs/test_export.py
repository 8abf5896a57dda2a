"""Checkpoints of a tiny actor and critic as Hugging Face folders: weights, tokens, card, registered versions."""

import json
import pickle
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs as pafs
import pytest
import ray.train
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)

from jobs.export import main
from pipeline.advantage.kl_controller import FixedKL
from pipeline.config import Config, save_yaml
from pipeline.config.model import LoraConfig
from pipeline.export import registry
from pipeline.models.fsdp import full_state_dict
from pipeline.models.settings import FILE, load_settings
from pipeline.models.state import is_weight, tensors
from pipeline.storage.filesystem import filesystem_of
from pipeline.store.cursor import PromptCursor
from pipeline.store.status import TrainerState
from pipeline.train import checkpoint
from pipeline.train.setup import build_actor, build_critic
from tests.train.updates import CPU, make_config

ACC = "val-core/countdown/acc/mean@1"
SCORES = {0: 0.25, 2: 0.75, 3: 0.5, 4: 0.5}
"""Validation of the run by iteration; checkpoints are of 2, 3 and 4."""


def settings(model: Path, data: Path, rank: int = 0) -> Config:
    config = make_config(model)
    config.model.lora = LoraConfig(rank=rank, alpha=8.0)
    config.data.train_files, config.data.val_files = str(data / "train.parquet"), [str(data / "val.parquet")]
    config.data.apply_chat_template_kwargs = {"enable_thinking": False}
    config.rollout.dtype = "float32"
    config.critic.optim.lr = 1e-2
    config.reward.custom_reward_function.reward_kwargs = {"api_key": "hidden-in-cards", "bonus": 0.5}
    config.trainer.env_vars = {"SOME_TOKEN": "hidden-too"}
    config.trainer.experiment_name = "puzzles"
    return config


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Made"]:
    yield from made_run(tiny_model, tmp_path_factory)


@pytest.fixture(scope="module")
def adapted(run: "Made", tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Made"]:
    """A run with adapters."""
    dist.destroy_process_group()
    yield from made_run(tiny_model, tmp_path_factory, rank=4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def made_run(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, rank: int = 0, targets: str | list[str] = "all-linear"
) -> Iterator["Made"]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = tmp_path_factory.mktemp("runs") / "puzzles"
    folder.mkdir()
    data = folder.parent / "data"
    data.mkdir()
    for name in ("train", "val"):
        (data / f"{name}.parquet").write_bytes(name.encode())
    config = settings(tiny_model, data, rank)
    config.model.lora.target_modules = targets
    save_yaml(config, folder / "config.yaml")
    lines = [json.dumps({"iteration": i, "elapsed_s": i, ACC: score}) for i, score in SCORES.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    actor, critic = build_actor(config, CPU, 10), build_critic(config, CPU, 10)
    made = Made(folder, {}, {})

    def persist(saved: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        return ray.train.Checkpoint.from_directory(shutil.copytree(saved.path, folder / "checkpoints" / name))

    def report(
        metrics: Any, *, checkpoint: Any, checkpoint_dir_name: str, checkpoint_upload_fn: Any, **mode: Any
    ) -> None:
        checkpoint_upload_fn(checkpoint, checkpoint_dir_name)

    context = SimpleNamespace(get_storage=lambda: SimpleNamespace(persist_current_checkpoint=persist))
    stand_in = vars(ray.train) | {"report": report, "get_context": lambda: context}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.ray, "train", SimpleNamespace(**stand_in))
        written = partial(save_yaml, config)
        saver = checkpoint.Saver(str(folder), str(folder), 30.0, written, lambda version: None, pytest.fail)
        for iteration in (2, 3, 4):
            with torch.no_grad():
                for module in (actor.module, critic.module):
                    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
                    for number, parameter in enumerate(trained):
                        parameter.add_(torch.full_like(parameter, 0.01 * (iteration + number % 7)))
                    for tensor in biases(module):
                        tensor.add_(0.1001 * iteration)
            state = TrainerState(iteration, PromptCursor(0, iteration), True)
            saver.save([actor, critic], FixedKL(0.0), iteration, state)
            made.actor[iteration] = full_state_dict(actor.module)
            made.critic[iteration] = full_state_dict(critic.module)
    yield made
    dist.destroy_process_group()


def biases(module: Any) -> list[torch.Tensor]:
    """Persistent buffers; few families have any."""
    return [tensor for _, tensor in tensors(module) if not is_weight(tensor)]


class Made(SimpleNamespace):
    """A run's folder and the weights of its checkpoints."""

    def __init__(self, folder: Path, actor: dict[int, Any], critic: dict[int, Any]) -> None:
        super().__init__(folder=folder, actor=actor, critic=critic)


@pytest.fixture
def own(run: Made, tmp_path: Path) -> Path:
    """A copy of the run's folder, to be damaged."""
    return Path(shutil.copytree(run.folder, tmp_path / "puzzles"))


def unlisted(checkpoint: Path) -> None:
    """Let a checkpoint be one that does not list its files, which may then be changed."""
    (checkpoint / "complete_0").write_text("")


def reconfigure(run_dir: Path, config: Config) -> None:
    """Other settings for a run and its newest checkpoint."""
    for folder in (run_dir, run_dir / "checkpoints" / "iteration_000004"):
        save_yaml(config, folder / "config.yaml")


def exported(*arguments: str | Path) -> Path:
    out = Path(arguments[arguments.index("--out") + 1])
    assert main([str(argument) for argument in arguments]) == 0
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 2) -> str:
    assert main([str(argument) for argument in arguments]) == code
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and "Traceback" not in printed.err
    return " ".join(printed.err.split())


def same(folder: Path, weights: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert {f"lm.{name}" for name in found} == {*weights, "lm.lm_head.weight"}
    for name, tensor in weights.items():
        assert torch.equal(found[name.removeprefix("lm.")], tensor.to(dtype)), name


def test_tokenizer_template_and_where_answers_end(run: Made, tiny_model: Path, tmp_path: Path) -> None:
    out = exported(run.folder, "--out", tmp_path / "mine")
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out, tiny_model))
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    generation = GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == theirs.eos_token_id and not generation.do_sample
    found = load_settings(out)
    assert found is not None and found.iteration == 4 and found.run == "puzzles" and found.dtype == "float32"
    assert found.max_response_length == 12 and found.chat_template_kwargs == {"enable_thinking": False}


def test_the_end_of_the_template_is_an_end_of_the_export(
    own: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    tokenizer = json.loads((base / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    reconfigure(own, settings(base, tmp_path))
    out = exported(own, "--out", tmp_path / "mine")
    assert GenerationConfig.from_pretrained(out).eos_token_id == [0, 2]
    said = "answers end with <|endoftext|> (0) or <|im_end|> (2, in the chat template only)"
    assert f"{out}: {said}" in capsys.readouterr().out


def test_sampling_of_the_validation_replaces_that_of_the_base_model(
    own: Path, tiny_model: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    own_sampling = {"eos_token_id": [1, 2], "do_sample": True, "repetition_penalty": 1.1, "top_k": 20}
    (base / "generation_config.json").write_text(json.dumps(own_sampling))
    config = settings(base, tmp_path)
    config.rollout.val_kwargs.temperature, config.rollout.val_kwargs.top_p = 0.6, 0.9
    reconfigure(own, config)
    generation = GenerationConfig.from_pretrained(exported(own, "--out", tmp_path / "mine"))
    assert generation.eos_token_id == [1, 2] and generation.do_sample
    assert (generation.temperature, generation.top_p, generation.top_k) == (0.6, 0.9, 0)
    assert generation.repetition_penalty in (None, 1.0)


@pytest.mark.parametrize("rank", [0, 4])
def test_biases_of_routers_are_kept_and_keep_their_type(
    run: Made, rank: int, tiny_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 32, "moe_intermediate_size": 16, "vocab_size": 320}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    lm: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **sizes))
    lm.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "base")
    dist.destroy_process_group()
    for made in made_run(tmp_path / "base", tmp_path_factory, rank, ["q_proj", "v_proj"]):
        out = exported(made.folder, "--out", tmp_path / "half", "--dtype", "bfloat16")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saved = load_file(out / "model.safetensors")
    bias = saved.pop("model.layers.1.mlp.gate.e_score_correction_bias")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert bias.dtype == torch.float32 and bias.min() > 0.9, "of 0.1001 x (2 + 3 + 4)"
    assert torch.equal(bias, made.actor[4]["lm.model.layers.1.mlp.gate.e_score_correction_bias"])


def test_adapters_are_merged_or_written_alone(
    adapted: Made, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    merged = exported(adapted.folder, "--out", tmp_path / "merged")
    same(merged, adapted.actor[4])
    same(exported(adapted.folder, "--out", tmp_path / "half", "--dtype", "bfloat16"), adapted.actor[4], torch.bfloat16)
    alone = exported(adapted.folder, "--out", tmp_path / "alone", "--adapter")
    assert "PeftModel.from_pretrained" in (alone / "README.md").read_text()
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), alone)
    ids = torch.arange(3, 27).reshape(2, 12)
    expected = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
    torch.testing.assert_close(read(ids).logits, expected, rtol=1e-4, atol=1e-4)
    out = exported(adapted.folder, "--out", tmp_path / "critic", "--critic")
    found = AutoModelForTokenClassification.from_pretrained(out).state_dict()
    for name, tensor in adapted.critic[4].items():
        assert torch.equal(found[name.replace("decoder.", "model.").replace("head.", "score.")], tensor), name
    assert "leave out --critic" in refused(capsys, adapted.folder, "--out", tmp_path / "x", "--adapter", "--critic")


def test_an_adapter_needs_its_base(
    adapted: Made, run: Made, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "trained all weights" in refused(capsys, run.folder, "--out", tmp_path / "x", "--adapter")
    own = Path(shutil.copytree(adapted.folder, tmp_path / "own"))
    shutil.copytree(tiny_model, own / "model")
    reconfigure(own, settings(tmp_path / "gone", own.parent, rank=4))
    assert "with --base" in refused(capsys, own, "--out", tmp_path / "x"), "the run's own model is merged already"
    same(exported(own, "--out", tmp_path / "mine", "--base", tiny_model), adapted.actor[4])


def test_choices(run: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "models"
    newest = exported(run.folder, "--out", models / "newest")
    same(newest, run.actor[4])
    assert not torch.equal(run.actor[4]["lm.model.norm.weight"], run.actor[3]["lm.model.norm.weight"])
    assert "iteration 4 of" in capsys.readouterr().out
    assert [path.name for path in models.iterdir()] == ["newest"], "nothing half written is left"
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in newest.iterdir()), "others have to read it"
    same(exported(run.folder, "--out", tmp_path / "a", "--iteration", "3"), run.actor[3])
    same(exported(run.folder, "--out", tmp_path / "b", "--best", ACC), run.actor[2])
    same(exported(run.folder, "--out", tmp_path / "c", "--best", ACC, "--lowest"), run.actor[3])
    same(exported(run.folder / "checkpoints" / "iteration_000002", "--out", tmp_path / "d"), run.actor[2])
    alone = shutil.copytree(run.folder / "checkpoints" / "iteration_000003", tmp_path / "alone")
    out = exported(alone, "--out", tmp_path / "e", "--dtype", "bfloat16")
    same(out, run.actor[3], torch.bfloat16)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert "The run was not validated" in (out / "README.md").read_text()


def test_checkpoints_that_lie_elsewhere(run: Made, own: Path, tiny_model: Path, tmp_path: Path) -> None:
    """In a folder, and behind a URL that is no folder of this machine."""
    for number, place in enumerate((str(tmp_path / "far"), "memory://far")):
        config = settings(tiny_model, own.parent / "data")
        config.trainer.storage_path = place
        save_yaml(config, own / "config.yaml")
        filesystem, path = filesystem_of(f"{place}/puzzles/checkpoints")
        filesystem.create_dir(path)
        pafs.copy_files(str(run.folder / "checkpoints"), path, destination_filesystem=filesystem)
        shutil.rmtree(own / "checkpoints", ignore_errors=True)
        same(exported(own, "--out", tmp_path / f"{number}"), run.actor[4])
        same(exported(own, "--out", tmp_path / f"{number}-best", "--best", ACC), run.actor[2])


def test_the_critic_gives_the_values_it_had(run: Made, tiny_model: Path, tmp_path: Path) -> None:
    from pipeline.models.policy import load_lm
    from pipeline.models.value import ValueModel

    out = exported(run.folder, "--out", tmp_path / "critic", "--critic")
    config = make_config(tiny_model)
    critic = ValueModel(load_lm(config.model, with_head=False))
    critic.load_state_dict(run.critic[4])
    model = AutoModelForTokenClassification.from_pretrained(out).eval()
    ids = torch.arange(20).reshape(2, 10) + 5
    with torch.no_grad():
        values, expected = model(input_ids=ids).logits[..., 0].flatten(), critic(ids, torch.arange(20))
    assert expected.abs().min() > 1e-3
    torch.testing.assert_close(values, expected)
    assert not (out / FILE).exists() and "AutoModelForTokenClassification" in (out / "README.md").read_text()


@pytest.mark.parametrize("missing", ["complete_0", "progress.json"])
def test_a_checkpoint_whose_saving_was_interrupted_is_skipped(
    run: Made, own: Path, tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = own / "checkpoints" / "iteration_000004"
    (newest / missing).unlink()
    same(exported(own, "--out", tmp_path / "mine"), run.actor[3])
    said = capsys.readouterr().out
    assert ("iteration 4 is skipped: its saving was interrupted" in said) is (missing == "complete_0")
    assert ("iteration_000004 is damaged: progress.json is missing" in said) is (missing == "progress.json")
    assert "no complete checkpoint of iteration 4" in refused(capsys, own, "--out", tmp_path / "b", "--iteration", "4")
    if missing == "complete_0":
        assert "is incomplete" in refused(capsys, newest, "--out", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_damaged_checkpoint_is_skipped(
    run: Made, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = own / "checkpoints" / "iteration_000004"
    with (newest / "__0_0.distcp").open("r+b") as shard:
        shard.truncate(shard.seek(0, 2) // 2)
    same(exported(own, "--out", tmp_path / "mine"), run.actor[3])
    said = f"the checkpoint {newest} is damaged: __0_0.distcp has "
    assert f"the checkpoint of iteration 4 is skipped: {said}" in capsys.readouterr().out
    for arguments in ((own, "--out", tmp_path / "b", "--iteration", "4"), (newest, "--out", tmp_path / "b")):
        assert said in refused(capsys, *arguments)


def test_a_link_to_an_empty_folder(own: Path, run: Made, tmp_path: Path) -> None:
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "model")
    same(exported(own, "--out", tmp_path / "link"), run.actor[4])
    assert (tmp_path / "disk" / "model" / "config.json").is_file() and (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]


def test_a_checkpoint_runs_no_code(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = own / "checkpoints" / "iteration_000004" / ".metadata"
    index.write_bytes(pickle.dumps(pytest.fail))
    unlisted(index.parent)
    sentence = refused(capsys, own, "--out", tmp_path / "mine")
    assert "cannot be read as the index of a checkpoint" in sentence and not (tmp_path / "mine").exists()


def test_card(run: Made, tiny_model: Path, tmp_path: Path) -> None:
    card = (exported(run.folder, "--out", tmp_path / "mine", "--iteration", "2") / "README.md").read_text()
    head = card.split("---\n")[1]
    assert "library_name: transformers" in head and "pipeline_tag: text-generation" in head
    assert "base_model" not in head, "a local folder is no model on the hub"
    assert "# puzzles, iteration 2" in card and f"starting from `{tiny_model}`" in card
    assert f"| `{ACC}` | 0.25 | 0.75 |" in card
    assert "| `rollout.n` | `2` |" in card and '| `rollout.dtype` | `"float32"` |' in card
    assert "`actor.clip_ratio`" not in card, "it has its default"
    assert 'train.parquet"`' in card and "max_new_tokens=12" in card and "enable_thinking=False" in card
    assert "hidden" not in card and '"bonus": 0.5' in card


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--iteration", "7"], "no checkpoint of iteration 7, but of 2, 3, 4"),
        (["--best", "val-core/other"], f"its validation metrics are: {ACC}"),
        (["--best", ACC, "--iteration", "3"], "--iteration and --best each choose"),
        (["--lowest"], "--lowest is an option of --best"),
        (["--alias", "champion"], "give --register NAME"),
    ],
)
def test_refused_choices(
    run: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert sentence in refused(capsys, run.folder, "--out", tmp_path / "mine", *arguments)
    assert not (tmp_path / "mine").exists()


def test_refused_folders(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--out", tmp_path / "mine")
    assert "is not a folder" in refused(capsys, tmp_path / "nowhere", *out)
    assert "is neither a run's folder nor a checkpoint's" in refused(capsys, tmp_path, *out)
    checkpoint = own / "checkpoints" / "iteration_000003"
    assert "is one checkpoint" in refused(capsys, checkpoint, *out, "--iteration", "3")
    assert f"{own} holds" in refused(capsys, own, "--out", own)
    assert f"lies in {checkpoint.parent}, which is read" in refused(capsys, own, "--out", checkpoint / "mine")
    (tmp_path / "full" / "notes").mkdir(parents=True)
    assert "is not empty; choose another folder or remove it" in refused(capsys, own, "--out", tmp_path / "full")
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refused(capsys, own, "--out", tmp_path / "file" / "mine", code=1)
    (own / "metrics.jsonl").write_text(json.dumps({"iteration": 1, ACC: 0.5}) + "\n")
    assert "at iterations 1 and checkpoints were saved at 2, 3, 4" in refused(capsys, own, *out, "--best", ACC)
    shutil.rmtree(own / "checkpoints")
    assert "has no checkpoints" in refused(capsys, own, *out)
    assert not (tmp_path / "mine").exists()


def test_a_base_model_that_moved(run: Made, own: Path, tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    sentence = refused(capsys, own, "--out", tmp_path / "mine", "--base", "models/typo")
    assert "--base=models/typo: the folder" in sentence
    reconfigure(own, settings(tmp_path / "gone", tmp_path))
    assert "name the model that the run started from with --base" in refused(capsys, own, "--out", tmp_path / "mine")
    same(exported(own, "--out", tmp_path / "mine", "--base", tiny_model), run.actor[4])
    shutil.copytree(tiny_model, own / "model")
    same(exported(own, "--out", tmp_path / "other"), run.actor[4])


def test_another_model_than_that_of_the_checkpoint_is_refused(own: Path, tmp_path: Path, capsys: Any) -> None:
    from jobs.tiny import build_model, build_tokenizer, countdown_texts

    tokenizer = build_tokenizer(countdown_texts(64, seed=0), vocab_size=300)
    other = tmp_path / "other"
    build_model(tokenizer, hidden=64, layers=3, heads=2, kv_heads=2, tie=True, seed=0).save_pretrained(other)
    tokenizer.save_pretrained(other)
    sentence = refused(capsys, own, "--out", tmp_path / "mine", "--base", other)
    assert "the checkpoint is of another model" in sentence and not (tmp_path / "mine").exists()


def track(run_dir: Path, run_id: str) -> None:
    """Checkpoints that say that MLflow tracked their run."""
    for file in run_dir.glob("checkpoints/*/progress.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"mlflow_run_id": run_id}))
        unlisted(file.parent)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, mlflow_database: Path) -> tuple[Path, str]:
    """MLflow's database with one run, and that run's id."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    shutil.copyfile(mlflow_database, path)
    client = MlflowClient(f"sqlite:///{path}")
    return path, client.create_run(client.create_experiment("slipstream")).info.run_id


@pytest.fixture
def tracked(own: Path, store: tuple[Path, str]) -> tuple[Path, Any, str]:
    """A run that MLflow tracked: its folder, a client, the id of its MLflow run."""
    from mlflow.tracking import MlflowClient

    shutil.copyfile(store[0], own / "mlflow.db")
    track(own, store[1])
    return own, MlflowClient(f"sqlite:///{own / 'mlflow.db'}"), store[1]


def test_registered_versions(
    tracked: tuple[Path, Any, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, client, run_id = tracked
    name = ("--register", "countdown", "--alias", "champion")
    exported(own, "--out", tmp_path / "three", "--iteration", "3", *name)
    version = client.get_model_version_by_alias("countdown", "champion")
    assert str(version.version) == "1" and version.run_id == run_id
    assert version.source == (tmp_path / "three").as_uri() and version.tags["iteration"] == "3"
    assert version.tags["val-core/countdown/acc/mean_at_1"] == "0.5"
    exported(own, "--out", tmp_path / "two", "--best", ACC, *name)
    version = client.get_model_version_by_alias("countdown", "champion")
    assert str(version.version) == "2" and version.source == (tmp_path / "two").as_uri()
    assert "registered as countdown, version 2, alias champion" in capsys.readouterr().out


def test_a_registered_model_is_found_for_serving(
    tracked: tuple[Path, Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.export.served_model import find

    own, _, _ = tracked
    exported(own, "--out", tmp_path / "mine", "--register", "countdown", "--alias", "champion")
    with pytest.raises(ValueError, match="set MLFLOW_TRACKING_URI"):
        find("models:/countdown@champion")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{own / 'mlflow.db'}")
    target = find("models:/countdown@champion")
    assert target.name == "countdown" and target.settings is not None and target.settings.iteration == 4
    assert (Path(target.path) / "model.safetensors").read_bytes() == (tmp_path / "mine/model.safetensors").read_bytes()


def test_a_server_gets_the_files_as_artifacts_of_the_run(tmp_path: Path) -> None:
    """Others cannot reach this machine's folders."""
    logged: list[tuple[str, ...]] = []
    info = SimpleNamespace(artifact_uri="mlflow-artifacts:/1/abc/artifacts")
    client: Any = SimpleNamespace(
        tracking_uri="https://tracker.example",
        log_artifacts=lambda *arguments: logged.append(arguments),
        get_run=lambda run_id: SimpleNamespace(info=info),
    )
    source = registry._source(client, "abc", tmp_path, 7)
    assert source == "mlflow-artifacts:/1/abc/artifacts/export/iteration_000007"
    assert logged == [("abc", str(tmp_path), "export/iteration_000007")]
    client.tracking_uri = "sqlite:////runs/mlflow.db"
    assert registry._source(client, "abc", tmp_path, 7) == tmp_path.as_uri() and len(logged) == 1


def test_without_tracking_nothing_is_written(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (own, "--out", tmp_path / "mine", "--register", "countdown")
    assert "MLflow did not track the run" in refused(capsys, *arguments)
    track(own, "0123")
    assert "set MLFLOW_TRACKING_URI" in refused(capsys, *arguments)
    assert not (tmp_path / "mine").exists()
