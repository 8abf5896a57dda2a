"""Scripts that are refused, each with the reason."""

from pathlib import Path

import pytest

from jobs.from_verl import main


@pytest.mark.parametrize(
    ("script", "part"),
    [
        (None, "there is no script"),
        ("echo hello\n", "no settings of verl found"),
        ("python3 -m verl data.a='x\n", "run.sh, line 1: unexpected EOF"),
        ("cd x\nset -e; false\npython3 -m verl.trainer.main_ppo", "run.sh ends before it starts verl.trainer.main_ppo"),
        ("A=1; unset A\ntrue $A\npython3 -m verl.trainer.main_ppo", "run.sh, line 2: A: unbound variable"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
        ("torchrun -m verl.trainer.fsdp_sft_trainer data.a=1", "line 1: verl.trainer.fsdp_sft_trainer is not PPO"),
        ("torchrun --nproc 8 -m verl.trainer.sft_trainer model.path=x", "there is jobs.sft"),
        ("python3 -m verl.trainer.main_generation data.path=x", "there is jobs.evaluate"),
        ("python3 -m verl.trainer.main_eval data.path=x", "there is jobs.evaluate"),
        ("python3 -m verl.model_merger merge --backend fsdp", "there is jobs.export"),
        ("python3 -m recipe.spin.main_spin data.a=1", "recipe.spin.main_spin is not PPO"),
        ("python3 examples/split_placement/main_ppo_split.py data.a=1", "main_ppo_split is not PPO"),
        (
            "if nvidia-smi; then\npython3 -m verl.trainer.main_ppo data.a=1\nfi",
            "it is not known whether verl is started: it depends on the success of `nvidia-smi`",
        ),
        ("./launch.sh data.train_files=x", "it is not known what that starts"),
        ("ray job submit -- bash inner.sh", "it starts inner.sh: give that script"),
        (
            "cat > x.sh <<< 'python3 -m verl.trainer.main_ppo'\n./x.sh",
            "verl.trainer.main_ppo: it starts ./x.sh: give that",
        ),
        ("if [ $# = 0 ]; then\nexit 1; fi\npython3 -m verl.trainer.main_ppo", "verl.trainer.main_ppo: line 2: exit 1"),
        ("if [ $RANK = 0 ]; then\npython3 -m verl.trainer.main_ppo; fi", "line 1 is not set; give RANK=VALUE"),
        (
            "docker run x bash -c 'python3 -m verl.trainer.main_ppo a=1'",
            "line 1: `docker` gets a command of verl's as text",
        ),
        ("echo data.seed=1 | xargs python3 -m verl.trainer.main_ppo", "line 1: `xargs` adds settings from its input"),
        ("python3 -m verl.trainer.main_ppo --config-name=mine", "--config-name=mine: the settings in a file"),
        ("python3 -m verl.trainer.main_ppo", "no settings of verl found"),
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
