"""verl launch scripts as experiments: what they set, that they load, and that nothing in them is ever run."""

import os
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
from jobs.verl.state import Conversion, Left
from pipeline.checks import check
from pipeline.config import Config, ConfigError, load_config
from tests.jobs.verl.launch_scripts import DAPO, GRPO, HOSTILE, PPO, RLOO


@dataclass
class Converted:
    """An experiment that was written and loaded."""

    config: Config
    text: str
    report: str

    def reason(self, key: str) -> str:
        """Why a key of verl was not converted."""
        (line,) = [line for line in self.report.splitlines() if line.startswith(f"  {key}=")]
        return line.partition(": ")[2]


Convert = Callable[..., Converted]


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Convert:
    monkeypatch.setenv("HOME", "/home/me")

    def run(script: str, *arguments: str) -> Converted:
        (tmp_path / "run.sh").write_text(script)
        out = tmp_path / "experiment" / "mine.yaml"
        assert main([str(tmp_path / "run.sh"), *arguments, "--out", str(out)]) == 0
        printed = capsys.readouterr()
        assert printed.out == ""
        return Converted(load_config(["experiment=mine"], config_dir=tmp_path), out.read_text(), printed.err)

    return run


def line_of(script: str, part: str) -> int:
    """The line in which `part` first stands."""
    return script[: script.index(part)].count("\n") + 1


def test_grpo_with_arrays_and_variables(convert: Convert) -> None:
    found = convert(GRPO)
    config = found.config
    check(config)
    assert config.algorithm.adv_estimator == "grpo"
    assert config.data.train_files == "/home/me/data/gsm8k/train.parquet"
    assert config.data.val_files == ["/home/me/data/gsm8k/test.parquet", "/data/math/test.parquet"]
    assert (config.data.max_prompt_length, config.data.max_response_length) == (512, 1024)
    assert config.model.path == "Qwen/Qwen2.5-7B-Instruct" and config.model.enable_gradient_checkpointing
    assert (config.actor.optim.lr, config.actor.ppo_mini_batch_size) == (3e-6, 128)
    assert config.actor.optim.lr_warmup_steps == 5 * 512 // 128
    assert (config.actor.clip_low, config.actor.clip_high, config.actor.kl_loss_type) == (0.2, 0.28, "k3+")
    assert config.actor.ppo_max_token_len_per_gpu == 8 * 1536
    assert config.scoring.reference.max_token_len == 16 * 1536 and config.scoring.reference.num_gpus == 1
    assert (config.rollout.n, config.rollout.gpu_memory_utilization) == (5, 0.6)
    # Half of 8 GPUs train; an engine has two, and the reference the others.
    assert (config.trainer.num_workers, config.rollout.num_engines, config.rollout.chunk_prompts) == (4, 1, 16)
    assert config.rollout.tensor_parallel_size == 2 and config.scoring.reference.num_workers == 2
    assert config.trainer.use_gpu and config.rollout.num_gpus == 1
    assert config.reward.custom_reward_function.path == "/code/reward.py"
    assert config.trainer.logger == ["console", "tensorboard"]
    assert (config.trainer.project_name, config.trainer.total_epochs, config.trainer.test_freq) == ("gsm8k", 15, 5)
    # What needs the shell is named, and verl's default for it is no answer, either.
    assert config.trainer.experiment_name == "run"
    line = f"`$(date +%s)` in line {line_of(GRPO, '$(date')} is a command"
    assert line in found.reason("trainer.experiment_name")
    assert "may give it another value" in found.report and "`$LAUNCH`" in found.report
    # The file says what the report says.
    assert "# Not converted:" in found.text and line in found.text.replace("\n#  ", "")
    assert "param_dtype: bfloat16  # verl's default" in found.text
    assert found.text.startswith("# @package _global_\n")


def test_ppo_with_a_critic_on_two_nodes(convert: Convert) -> None:
    found = convert(PPO, "trainer.experiment_name=ppo", "--name", "second")
    config = found.config
    check(config)
    assert (config.algorithm.adv_estimator, config.algorithm.lam, config.rollout.n) == ("gae", 0.95, 1)
    assert (config.algorithm.kl_ctrl.type, config.algorithm.kl_ctrl.target_kl) == ("adaptive", 0.05)
    assert config.algorithm.use_kl_in_reward and config.data.truncation == "left"
    assert (config.critic.optim.lr, config.critic.optim.lr_warmup_steps_ratio) == (9e-6, 0.05)
    assert (config.critic.path, config.critic.cliprange_value) == ("deepseek-ai/deepseek-llm-7b-chat", 0.2)
    assert (config.critic.warmup, config.critic.fsdp.param_dtype) == (19, "bfloat16")
    assert (config.actor.ppo_max_token_len_per_gpu, config.critic.ppo_max_token_len_per_gpu) == (24000, 98304)
    assert (config.scoring.reference.max_token_len, config.scoring.value.max_token_len) == (24000, 98304)
    # 16 GPUs: 8 train, and two shared by the pools leave 6 engines.
    assert (config.trainer.num_workers, config.rollout.num_engines) == (8, 6)
    for pool in (config.scoring.reference, config.scoring.value):
        assert (pool.num_workers, pool.num_gpus) == (2, 0.5)
    assert (config.actor.optim.lr, config.actor.ppo_mini_batch_size) == (1e-6, 256)
    assert config.trainer.total_training_steps == 300
    # The name is the option's, the folder is found by the script's.
    assert (config.trainer.default_local_dir, config.trainer.experiment_name) == ("/runs", "second")
    assert "stay on the GPU" in found.reason("critic.fsdp.param_offload")


def test_rloo_with_kl_in_the_reward(convert: Convert) -> None:
    found = convert(RLOO)
    config = found.config
    check(config)
    assert (config.algorithm.adv_estimator, config.rollout.n) == ("rloo", 8)
    assert (config.algorithm.use_kl_in_reward, config.algorithm.kl_penalty) == (True, "low_var_kl")
    assert config.algorithm.kl_ctrl.kl_coef == 0.01
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("sequence", "3")
    assert (correction.rollout_rs, correction.rollout_rs_threshold) == ("seq_mean_k1", "0.625_1.25")
    assert config.actor.old_log_probs == "recompute"
    assert (config.actor.loss_agg_mode, config.actor.loss_scale_factor) == ("seq-mean-token-sum-norm", 1024)
    assert (config.rollout.val_kwargs.n, config.rollout.val_kwargs.temperature) == (4, 0.6)
    # 45 does not divide 60, 30 does; two GPUs are one worker and one engine, and the reference takes a third.
    assert (config.actor.ppo_mini_batch_size, config.trainer.num_workers, config.rollout.num_engines) == (30, 1, 1)
    assert config.scoring.reference.num_gpus == 1 and "3 GPUs, 1 more than there" in found.report
    assert config.trainer.resume == "never" and "only vLLM" in found.reason("actor_rollout_ref.rollout.name")


def test_dapo(convert: Convert) -> None:
    found = convert(DAPO)
    config = found.config
    assert config.data.train_files == "/home/me/verl/data/dapo-math-17k.parquet"
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 20480)
    assert (config.actor.clip_low, config.actor.clip_high, config.actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert (config.actor.optim.weight_decay, config.actor.grad_clip) == (0.1, 0.5)
    assert config.actor.optim.lr_warmup_steps == 10 * 16
    # A sequence that verl splits over 8 GPUs must fit one here.
    assert config.actor.ppo_max_token_len_per_gpu == 22528
    # 64 of the 128 GPUs would train, and of a mini-batch of 32 prompts only 32 can have a share.
    assert (config.trainer.num_workers, config.rollout.num_engines, config.rollout.chunk_prompts) == (32, 96, 1)
    assert config.trainer.default_local_dir == "/home/me/verl/ckpts/DAPO"
    assert config.trainer.experiment_name == "DAPO-32B"
    assert (config.reward.overlong_buffer.enable, config.reward.overlong_buffer.len) == (True, 4096)
    groups = config.algorithm.filter_groups
    assert (groups.enable, groups.metric, groups.max_num_gen_batches) == (True, "acc", 10)
    for key, part in {
        "reward_model.reward_manager": "no reward managers",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "never split",
        "actor_rollout_ref.model.override_config.attention_dropout": "loaded as they are",
        "data.gen_batch_size": "chunks",
    }.items():
        assert part in found.reason(key)
    assert f"--config-name=dapo_trainer in line {line_of(DAPO, '--config-name')}" in found.report
    # What cannot be settled here is said, and does not stop the conversion.
    assert "to be settled: model.path=/home/me/verl/models/Qwen2.5-32B: there is no such folder" in found.report
    with pytest.raises(ConfigError, match="no such folder"):
        check(config)


def test_nothing_in_a_script_is_run(tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "marks"
    place.mkdir()
    (place / "sourced.py").write_text(f"open({str(place / 'imported')!r}, 'w')\ndef run(*_): ...\n")
    monkeypatch.syspath_prepend(str(place))

    def started(*arguments: object, **options: object) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    for name in ("system", "popen", "posix_spawn", "execv", "fork"):
        monkeypatch.setattr(os, name, started)
    monkeypatch.setattr(subprocess, "Popen", started)
    found = convert(HOSTILE.replace("MARK", str(place)))
    assert sorted(path.name for path in place.iterdir()) == ["sourced.py"]
    assert found.config.algorithm.gamma == 0.9 and found.config.trainer.experiment_name == "a: {b"
    for key in ("data.prompt_key", "data.train_batch_size", "data.val_files", "trainer.project_name"):
        assert "needs the shell" in found.reason(key)
    for key in ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"):
        assert "by name" in found.reason(key)
    assert "refers to another key" in found.reason("data.tokenizer")


def test_a_loop_is_one_run_whose_variable_is_unknown(convert: Convert) -> None:
    found = convert(
        """for lr in 1e-6 5e-6; do
  for n in 4 8; do
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.optim.lr=$lr \\
      actor_rollout_ref.rollout.n=$n trainer.total_epochs=3 trainer.experiment_name=lr${lr}
  done
done
python3 -m verl.trainer.main_ppo trainer.total_epochs=9
"""
    )
    assert found.config.trainer.total_epochs == 3
    assert "`$lr` is set by the loop in line 1" in found.reason("actor_rollout_ref.actor.optim.lr")
    assert "`$n` is set by the loop in line 2; give rollout.n" in found.reason("actor_rollout_ref.rollout.n")
    assert "starts verl more than once; the command of line 3 is converted, not that of line 7" in found.report


def test_overrides_alone_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["foo=bar"]) == 2  # nothing of it is a key of verl
    capsys.readouterr()
    assert main(["algorithm.adv_estimator=grpo", "+actor_rollout_ref.rollout.n=4", "trainer.nothing=1"]) == 0
    printed = capsys.readouterr()
    body = yaml.safe_load(printed.out)
    assert (body["algorithm"]["adv_estimator"], body["rollout"]["n"]) == ("grpo", 4)
    assert "trainer.nothing=1: not a key of verl that is known here" in printed.err
    assert "converted 2 keys of verl" in printed.err
    assert "data.train_files is not set" in printed.err and "model.path is not set" in printed.err


def test_later_scripts_and_arguments_win(convert: Convert, tmp_path: Path) -> None:
    base = tmp_path / "base.sh"
    base.write_text("N=6\npython3 -m verl trainer.total_epochs=2 trainer.test_freq=3 algorithm.adv_estimator=grpo\n")
    script = "python3 -m verl trainer.total_epochs=4 actor_rollout_ref.rollout.n=$N\n"
    (tmp_path / "run.sh").write_text(script)
    found = convert(script, "trainer.total_epochs=7")
    assert (found.config.trainer.total_epochs, found.config.rollout.n) == (7, 8)
    assert "not assigned in run.sh" in found.reason("actor_rollout_ref.rollout.n")
    out = tmp_path / "experiment" / "two.yaml"
    assert main([str(base), str(tmp_path / "run.sh"), "--out", str(out)]) == 0
    config = load_config(["experiment=two"], config_dir=tmp_path)
    assert (config.trainer.total_epochs, config.trainer.test_freq, config.rollout.n) == (4, 3, 6)


@pytest.mark.parametrize(
    ("script", "part"),
    [
        (None, "there is no script"),
        ("echo hello\n", "no settings of verl found"),
        ("python3 -m verl data.a='x\n", "run.sh, line 1: the single quote that opens here is never closed"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
    ],
)
def test_refusals(script: str | bytes | None, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    if script is not None:
        path.write_bytes(script if isinstance(script, bytes) else script.encode())
    assert main([str(path), "--out", str(tmp_path / "out.yaml")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and part in printed.err and len(printed.err.splitlines()) == 1
    assert not (tmp_path / "out.yaml").exists()


def test_a_file_outside_a_folder_of_experiments_is_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer.total_epochs=2", "--out", str(tmp_path / "deep" / "mine.yaml")]) == 0
    assert "move it into a folder DIR/experiment" in capsys.readouterr().err


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=20))
def test_no_text_breaks_out_of_its_line(text: str) -> None:
    """Whatever stands in a script, it stays a value or a comment."""
    conversion = Conversion(
        {"model.path": text, "rollout.engine_kwargs": {"a": [text]}, "trainer.experiment_name": text},
        left=[Left("data.x", text, text)],
        notes=[text],
    )
    body = yaml.safe_load(render(conversion, text))
    assert body == {
        "model": {"path": text},
        "rollout": {"engine_kwargs": {"a": [text]}},
        "trainer": {"experiment_name": text},
    }
    assert plain(text).isprintable()


def test_help_needs_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from jobs.from_verl import main\n"
        "main(['algorithm.adv_estimator=grpo'])\n"
        "print('loaded:', [name for name in ('ray', 'torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "loaded: []" in done.stdout
