"""verl's launch scripts as experiments: their settings, and that these load."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.from_verl import main, plain, render
from jobs.verl.state import Left, State
from pipeline.config import Config, load_config
from pipeline.plan.placement import Node, place
from pipeline.plan.plan import plan
from pipeline.plan.suggest import laid_over

GRPO = """#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}
NNODES=${NNODES:-1}
max_response_length=$((1024 * 2 / 2))
case "${DEVICE}" in
    gpu) gpus=8 ;;
    npu) gpus=16 ;;
    *) echo "no ${DEVICE}" >&2; exit 1 ;;
esac
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files=${TRAIN_FILE}
    data.val_files="['$HOME/data/gsm8k/test.parquet', '/data/math/test.parquet']"
    data.train_batch_size=512      # prompts
    data.max_response_length=${max_response_length}
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.actor.optim.lr=3e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.fsdp_config.param_offload=False
)
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ]; then
    uv sync --frozen
    LAUNCH=(uv run --no-sync python3)
fi
launch() {
    "${LAUNCH[@]}" -m verl.trainer.main_ppo \\
        "${DATA[@]}" \\
        actor_rollout_ref.model.path=${MODEL_PATH} \\
        "${ACTOR[@]}" \\
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \\
        actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
        +custom_reward_function.path=/code/reward.py \\
        trainer.logger='["console","tensorboard"]' trainer.experiment_name=qwen_$(date +%s) \\
        trainer.n_gpus_per_node=$gpus trainer.nnodes=${NNODES} "$@" 2>&1 | tee run.log
}
launch trainer.total_epochs=15
"""

DAPO = """
sp_size=4
ray job submit --no-wait --runtime-env="${RUNTIME_ENV:-env.yaml}" --working-dir "${PWD}" \\
    -- python3 -m recipe.dapo.main_dapo --config-name=dapo_trainer \\
    data.train_files=/data/dapo.parquet actor_rollout_ref.model.path=/models/qwen \\
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp_size} \\
    actor_rollout_ref.model.exclude_modules=o_proj \\
    actor_rollout_ref.rollout.multi_turn.enable=True \\
    actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
    reward_model.reward_manager=dapo data.seed=$SEED ${MORE} data.prompt_key='${oc.env:TOKEN}'
"""


@dataclass
class Converted:
    """What a conversion wrote and said."""

    code: int
    config: Config
    text: str
    report: str

    @property
    def cannot(self) -> str:
        """The section of what cannot be done."""
        return self.report.partition("cannot be done here")[2].partition("\nlost,")[0].partition("\ndifferent")[0]


Convert = Callable[..., Converted]


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Convert:
    monkeypatch.setenv("HOME", "/home/me")

    def run(script: str, *arguments: str) -> Converted:
        (tmp_path / "run.sh").write_text(script)
        out = tmp_path / "experiment" / "mine.yaml"
        out.unlink(missing_ok=True)
        code = main([str(tmp_path / "run.sh"), *arguments, "--out", str(out)])
        printed = capsys.readouterr()
        assert printed.out == ""
        return Converted(code, load_config(["experiment=mine"], config_dir=tmp_path), out.read_text(), printed.err)

    return run


def test_a_script_of_today(convert: Convert) -> None:
    result = convert(GRPO)
    config = result.config
    assert result.code == 0 and not result.cannot
    assert config.data.train_files == "/home/me/data/gsm8k/train.parquet"
    assert config.data.val_files == ["/home/me/data/gsm8k/test.parquet", "/data/math/test.parquet"]
    assert (config.data.max_prompt_length, config.data.max_response_length) == (512, 1024)
    assert (config.actor.optim.lr, config.actor.optim.lr_warmup_steps) == (3e-6, 5 * 512 // 128)
    assert config.actor.ppo_max_token_len_per_gpu == 8 * 1536 and config.rollout.n == 5
    assert (config.trainer.num_workers, config.rollout.num_engines, config.scoring.reference.num_workers) == (4, 1, 2)
    assert config.reward.custom_reward_function.path == "/code/reward.py"
    assert (config.trainer.total_epochs, config.trainer.logger) == (15, ["console", "tensorboard"])
    assert re.fullmatch(r"qwen_\d{10}", config.trainer.experiment_name)
    assert "param_offload=False" in result.report and "lost, but no result changes" in result.text


def test_variables_settings_and_a_name_are_given_beside_the_script(convert: Convert) -> None:
    result = convert(GRPO, "NNODES=2", "MODEL_PATH=/mine", "trainer.total_epochs=3", "--name", "second")
    assert (result.config.model.path, result.config.trainer.num_workers) == ("/mine", 8)
    assert (result.config.trainer.total_epochs, result.config.trainer.experiment_name) == (3, "second")


def test_what_cannot_be_done_stands_first_and_has_its_own_exit_code(convert: Convert) -> None:
    result = convert(DAPO)
    assert result.code == 3 and result.config.rollout.n == 16
    parallel = result.config.actor.parallel
    assert (parallel.sequence, parallel.pipeline, result.config.trainer.num_workers) == (4, 2, 8)
    for part in (
        "exclude_modules=o_proj",
        "an agent.environment or agent.program: actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
        "$SEED in line 3 is not set; give SEED=VALUE",
        "${MORE} may hold settings",
        "--config-name=dapo_trainer: the settings in a file",
        "write the value out; give data.prompt_key: data.prompt_key=${oc.env:TOKEN}",
    ):
        assert part in result.cannot
    assert "reward_manager=dapo" not in result.cannot and "reward_manager=dapo" in result.report


SEQUENCES = """
python3 -m verl.trainer.main_ppo data.train_files=/data/train.parquet actor_rollout_ref.model.path=/models/qwen \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.ref.ulysses_sequence_parallel_size=2 \\
    data.max_prompt_length=2000 data.max_response_length=30001 actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16001 actor_rollout_ref.actor.use_kl_loss=True \\
    data.train_batch_size=48 algorithm.adv_estimator=gae critic.ulysses_sequence_parallel_size=4 \\
    trainer.n_gpus_per_node=6
"""


def test_rows_that_are_split_over_gpus(convert: Convert) -> None:
    """A GPU of the learners holds half of a row, and one of a scoring pool all of it."""
    result = convert(SEQUENCES)
    actor, scoring = result.config.actor, result.config.scoring
    assert result.code == 0 and not result.cannot
    assert (actor.parallel.sequence, result.config.trainer.num_workers) == (2, 2)
    assert (actor.ppo_max_token_len_per_gpu, scoring.reference.max_token_len) == (16001, 32001)
    assert "divided as the actor is, actor.parallel.sequence=2: critic.ulysses" in result.report


def test_a_row_over_all_gpus_leaves_none_to_the_engines(convert: Convert) -> None:
    """The report says so, and how engines and train workers share them."""
    whole = "python3 -m verl.trainer.main_ppo data.train_files=/data/train.parquet "
    whole += "actor_rollout_ref.model.path=Qwen/Qwen3-8B algorithm.adv_estimator=grpo trainer.logger=[console] "
    whole += "actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.ulysses_sequence_parallel_size=8"
    result = convert(whole)
    assert "1 engines of 1 generate: 9 GPUs" in result.report
    remedy = result.report.partition("that is more than verl's 8 GPUs; ")[2].partition(" puts engines")[0]
    shared = dict(pair.split("=") for pair in remedy.split())
    config = laid_over(result.config, {key: yaml.safe_load(value) for key, value in shared.items()})
    assert place(plan(config).stages, [Node({"CPU": 96, "GPU": 8})])
    assert not place(plan(result.config).stages, [Node({"CPU": 96, "GPU": 8})])
    split = convert(f"{whole} actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    assert "a smaller rollout.tensor_parallel_size or smaller sizes of actor.parallel take fewer" in split.report
    assert "more than verl's" not in convert(GRPO).report


ADAPTERS = """
python3 -m verl.trainer.main_ppo data.train_files=/data/train.parquet actor_rollout_ref.model.path=/models/qwen \\
    actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.model.target_modules='[q_proj,v_proj]' actor_rollout_ref.rollout.load_format=safetensors \\
    actor_rollout_ref.rollout.layered_summon=True algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True
"""


def test_adapters(convert: Convert) -> None:
    """Engines get the adapter alone, as in verl, and no replica holds the reference."""
    result = convert(ADAPTERS)
    lora, trainer = result.config.model.lora, result.config.trainer
    assert result.code == 0 and not result.cannot
    assert (lora.rank, lora.alpha, list(lora.target_modules)) == (64, 32.0, ["q_proj", "v_proj"])
    assert lora.weight_sync == "adapter" and "scoring" not in result.text
    assert trainer.num_workers + result.config.rollout.num_engines == 8
    merged = convert(f"{ADAPTERS.rstrip()} actor_rollout_ref.model.lora.merge=True").config.model.lora
    assert merged.weight_sync == "merged"
    critic = f"{ADAPTERS.rstrip().replace('=grpo', '=gae')} critic.model.lora_rank="
    assert "critic.model.lora_rank=8" in convert(critic + "8").cannot and not convert(critic + "64").cannot
    start = ADAPTERS.replace("lora_rank=64", "lora_adapter_path=/adapters/one")
    assert "give actor_rollout_ref.model.lora_rank" in convert(start).cannot


@pytest.mark.parametrize("script", [GRPO, DAPO])
def test_no_setting_of_a_script_is_lost_silently(convert: Convert, script: str) -> None:
    result = convert(script)
    keys = set(
        re.findall(r"(?m)(?:^|[ +])((?:data|algorithm|actor_rollout_ref|trainer|\w*reward\w*)\.[\w.]+)=", script)
    )
    silent = {key for key in keys if f"{key}=" not in result.report}
    count = int(result.report.split("converted: ")[1].split()[0])
    assert len(keys) > 8 and len(silent) == count


def test_values_of_a_script_stay_values(tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a script names is imported or made here."""
    (tmp_path / "named.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef run(*_): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yaml_object = f"trainer.default_local_dir='\"!!python/object/apply:os.system [touch {tmp_path}/yaml]\"'"
    result = convert(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=named:run algorithm.gamma=0.9 "
        "data.prompt_key=$(rm x) "
        f"actor_rollout_ref.actor.policy_loss.loss_mode=named:run trainer.experiment_name=\"'a: {{b'\" {yaml_object}"
    )
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".py", ".sh"]
    assert result.config.algorithm.gamma == 0.9 and result.config.trainer.experiment_name == "a: {b"
    assert "data.prompt_key=" in result.cannot and "algorithm.adv_estimator=" in result.cannot


def test_scripts_and_settings_take_effect_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = "python3 -m verl.trainer.main_ppo data.train_files=$DATA "
    (tmp_path / "env.sh").write_text("DATA=/data/a.parquet\n")
    (tmp_path / "one.sh").write_text(f"{start} trainer.total_epochs=1 trainer.save_freq=1\n")
    assert (
        main([str(tmp_path / "env.sh"), "trainer.save_freq=2", str(tmp_path / "one.sh"), "trainer.total_epochs=3"]) == 0
    )
    body = yaml.safe_load(capsys.readouterr().out)
    assert (body["trainer"]["save_freq"], body["trainer"]["total_epochs"]) == (1, 3)
    assert body["data"]["train_files"] == "/data/a.parquet"


def test_a_variable_of_small_letters_stands_in_front_of_its_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo trainer.total_epochs=$epochs data.seed=$SEED\n")
    assert main(["epochs=4", str(tmp_path / "run.sh"), "SEED=5"]) == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert (trainer["total_epochs"], trainer["seed"]) == (4, 5)
    assert main([str(tmp_path / "run.sh"), "epochs=4", "SEED=5"]) == 3
    assert "not a key of verl that is known here: epochs=4" in capsys.readouterr().err


def test_a_long_setting_is_cut_in_the_report(convert: Convert) -> None:
    result = convert(f"python3 -m verl.trainer.main_ppo trainer.no={'x' * 9999} data.seed=1")
    assert 100 < len(result.cannot) < 999


def test_a_training_that_is_started_as_text_is_named(convert: Convert) -> None:
    start = "python3 -m verl.trainer.main_ppo data.seed=1"
    result = convert(f"tmux new -d '{start}'\n{start}")
    assert result.code == 3 and "run.sh, line 1: `tmux` gets a command of verl's as text" in result.cannot


def test_options_of_a_program_are_not_its_module(convert: Convert) -> None:
    assert convert("docker run -m 64g x python3 -m verl.trainer.main_ppo data.seed=1").config.trainer.seed == 1


def test_a_file_that_is_not_given_may_hold_settings(convert: Convert) -> None:
    result = convert(
        "source env.sh\nif [ -f x ]; then A=trainer.save_freq=3; fi\npython3 -m verl.trainer.main_ppo data.seed=1 $A"
    )
    assert result.code == 3 and "run.sh, line 1: the file of `source env.sh` is not read" in result.cannot
    assert "may follow: $A in line 3 is not set" in result.cannot or "${A} may hold settings" in result.cannot


def test_a_second_program_is_named(convert: Convert) -> None:
    result = convert("for_n() { python3 -m verl.trainer.main_ppo trainer.total_epochs=$1; }\nfor_n 4\nfor_n 8\n")
    assert result.config.trainer.total_epochs == 4
    assert result.code == 3 and "run.sh starts verl.trainer.main_ppo again, line 1" in result.cannot


def test_settings_behind_a_comment_are_no_part_of_the_command(convert: Convert) -> None:
    start = "python3 -m verl.trainer.main_ppo trainer.total_epochs=3 \\\n"
    result = convert(f"{start}  # trainer.test_freq=2 \\\n  trainer.save_freq=4 data.seed=1 \\\n  data.shuffle=True\n")
    assert (result.code, result.config.trainer.total_epochs, result.config.trainer.save_freq) == (0, 3, -1)
    assert "verl does not see trainer.save_freq=4 data.seed=1 data.shuffle=True in run.sh, line 3" in result.report


def test_overrides_alone_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["algorithm.adv_estimator=grpo", "+actor_rollout_ref.rollout.n=4", "trainer.nothing=1"]) == 3
    printed = capsys.readouterr()
    body = yaml.safe_load(printed.out)
    assert (body["algorithm"]["adv_estimator"], body["rollout"]["n"]) == ("grpo", 4)
    assert "not a key of verl that is known here: trainer.nothing=1" in printed.err
    assert "data.train_files is not set" in printed.err and "model.path is not set" in printed.err
    command = ["trainer.total_epochs=2", "--out", str(tmp_path / "deep" / "mine.yaml")]
    assert main(command) == 0
    (tmp_path / "deep" / "mine.yaml").write_text("edited")
    assert main(command) == 2 and (tmp_path / "deep" / "mine.yaml").read_text() == "edited"
    assert "move it into a folder DIR/experiment" in capsys.readouterr().err


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    start = "import os, sys; os.rmdir(os.getcwd()); sys.path.insert(0, sys.argv[1])"
    code = f"{start}; from jobs.from_verl import main; sys.exit(main(['trainer.total_epochs=2']))"
    root = str(Path(__file__).parents[2])
    ran = subprocess.run([sys.executable, "-c", code, root], cwd=gone, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.startswith("error: ") and len(ran.stderr.splitlines()) == 1


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=20))
def test_no_text_breaks_out_of_its_line(text: str) -> None:
    """Whatever stands in a script, it stays a value or a comment."""
    body = {"model": {"path": text}, "rollout": {"engine_kwargs": {"a": [text]}}, "trainer": {"experiment_name": text}}
    conversion = State({})
    conversion.values = {
        "model.path": text,
        "rollout.engine_kwargs": {"a": [text]},
        "trainer.experiment_name": text,
    }
    conversion.left, conversion.cannot, conversion.notes = [Left("data.x", text, text)], [text], [text]
    assert yaml.safe_load(render(conversion, text)) == body
    assert plain(text).isprintable()


def test_a_conversion_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from jobs.from_verl import main\n"
        "main(['algorithm.adv_estimator=grpo'])\n"
        "print('loaded:', [name for name in ('ray', 'torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "loaded: []" in done.stdout


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[" * 3000 + "]" * 3000, "more than 32 levels of brackets"),
        ("{a:" * 3000 + "1" + "}" * 3000, "more than 32 levels of brackets"),
        ("9" * 5000, "its value cannot be read"),
        ("(" * 3000 + ")" * 3000, ""),
        ("[" * 3000, ""),
        ("${" * 3000 + "a" + "}" * 3000, ""),
    ],
)
def test_values_of_thousands_of_brackets_are_left_out_in_words(
    value: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files='{value}'")
    assert main([str(script)]) == 3
    assert words in capsys.readouterr().err
