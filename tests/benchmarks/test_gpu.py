"""The GPU battery on CPUs: what it measures there, and that it goes on after whatever happens to a case."""

import json
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.gpu import carry, engine, loop, trainer
from benchmarks.gpu.battery import Options, machine, measured, run_stage, table
from benchmarks.gpu.shapes import SHAPES

CPU = "cpu"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return Options(CPU, "tiny", tmp_path_factory.mktemp("gpu"), repeats=2)


@pytest.fixture
def alone() -> Iterator[None]:
    """A case begins a process group, which ends with its process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_case_that_raises_hangs_or_dies_is_written_down_and_the_others_are_measured() -> None:
    fine = measured(python("import sys; open(sys.argv[2], 'w').write('{\"x\": 1.5}')"), 60)
    raising = measured(python("raise ValueError('no such kernel')"), 60)
    killed = measured(python("import os; os.kill(os.getpid(), 11)"), 60)
    late = measured(python("import time; time.sleep(600)"), 6)
    assert fine == {"figures": {"x": 1.5}}
    assert "Traceback" in raising["error"] and raising["error"].endswith("ValueError: no such kernel")
    assert killed["error"] == "exit code -11" and late["error"] == "it took longer than the 6 s that were left"
    assert "--minutes" in measured(python("raise SystemExit(1)"), 0)["figures"]["left_out"]
    cases = [{"case": "a", "shape": "tiny", "seconds": 1.0, **found} for found in (fine, raising)]
    rows = table({"command": "python -m x", "machine": {"cores": 2}, "cases": cases}).splitlines()
    assert rows[-2:] == ["| a | tiny | 1 | x 1.5 |", "| a | tiny | 1 | FAILED: ValueError: no such kernel |"]


def test_the_report_names_versions_and_no_host() -> None:
    import platform

    found = machine(CPU)
    assert found["torch"] and found["cores"] and platform.node() not in map(str, found.values())


def test_a_plain_loop_has_the_same_loss_as_the_update(options: Options, alone: None) -> None:
    ours, theirs = trainer.CASES["update:default"](options), trainer.CASES["plain"](options)
    assert ours["pg_loss"] == pytest.approx(theirs["pg_loss"], rel=1e-5) and abs(ours["pg_loss"]) > 0.01
    assert ours["tokens"] == theirs["tokens"] and ours["tokens_per_s"] > 0 and ours["peak_gib"] > 0


def test_the_same_numbers_are_asked_for_and_another_rounding_is_seen(options: Options, alone: None) -> None:
    found = trainer.CASES["same_numbers"](options)
    assert found["float32_difference"] < 1e-6 < found["bfloat16_log_probs_difference"] < 0.1


def test_published_weights_are_compared(options: Options, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trainer.CASES["publish"](options)
    assert found["gib"] > 0 and found["pack_s"] > 0
    dist.destroy_process_group()
    from pipeline.weights import load

    joined = load.parameters
    monkeypatch.setattr(load, "parameters", lambda *args: ((name, t + 1) for name, t in joined(*args)))
    with pytest.raises(AssertionError, match="arrived with other numbers"):
        trainer.CASES["publish"](options)


def test_attention_is_measured_kernel_by_kernel(options: Options) -> None:
    found = trainer.CASES["attention"](options)
    assert found["padded_causal"]["ms"] > 0 and found["packed_with_a_mask"]["ms"] > 0
    assert "left_out" in found["packed_flex"]


def test_shapes_have_the_parameters_that_their_names_say() -> None:
    for name, billions in {"0.5b": 0.49, "1.5b": 1.54, "7b": 7.6}.items():
        shape = SHAPES[name]
        heads = shape.hidden * (shape.hidden + 2 * shape.kv_heads * (shape.hidden // shape.heads) + shape.hidden)
        size = shape.layers * (heads + 3 * shape.hidden * shape.intermediate)
        size += shape.hidden * shape.vocabulary * (1 if shape.tied else 2)
        assert size / 1e9 == pytest.approx(billions, rel=0.02)
        # Two operations for each parameter that a token passes, and the attention.
        assert shape.flops([1000], 1000) > 2 * 1000 * (size - shape.hidden * shape.vocabulary * (not shape.tied))


def test_every_stage_has_its_packages() -> None:
    assert list(tomllib.loads(carry.PACKAGES.read_text())["stages"]) == ["trainer", "loop", "engine"]
    assert trainer.CASES and loop.CASES and engine.CASES


def wheel(folder: Path, name: str, text: str) -> Path:
    """A wheel of one module."""
    file, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


def parts(tmp_path: Path) -> list[Path]:
    import tarfile

    with tarfile.open(tmp_path / "whole.tar", "w") as archive:
        archive.add(wheel(tmp_path, "carried_module", "X = 7\n"), "carried_module-1.0-py3-none-any.whl")
    wheels = ["carried_module-1.0-py3-none-any.whl"]
    return carry.split(tmp_path / "whole.tar", "loop", tmp_path / "parts", 4096, wheels)


def test_parts_arrive_in_any_order_and_the_last_one_installs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = parts(tmp_path)
    assert len(made) == 3 and all((folder / folder.name).stat().st_size <= 4096 for folder in made)
    arguments = ["--keep", str(tmp_path / "keep"), "--target", str(tmp_path / "site")]
    for folder in (made[2], made[0]):
        assert carry.main(["install", str(folder), *arguments]) == 0
    assert "still to come: loop-2of3" in capsys.readouterr().out
    assert carry.main(["install", str(made[1]), *arguments]) == 0
    assert (tmp_path / "site" / "carried_module.py").read_text() == "X = 7\n"


def test_a_damaged_part_is_asked_for_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = parts(tmp_path)
    (made[0] / made[0].name).write_bytes(b"cut")
    for folder in made:
        carry.main(["install", str(folder), "--keep", str(tmp_path / "keep"), "--target", str(tmp_path / "site")])
    assert capsys.readouterr().out.splitlines()[-1] == "loop: kept loop-3of3; still to come: loop-1of3"


def test_what_the_machine_has_stands_in_for_itself(tmp_path: Path) -> None:
    there = carry.frozen("torch==2.11.0+cu130\nHydra_Core==1.3.2\n# a line\nlocal @ file:///x\n")
    assert there == {"torch": "2.11.0", "hydra-core": "1.3.2"}
    pins = carry.stand_ins(there, tmp_path)
    assert pins == ["torch==2.11.0+there", "hydra-core==1.3.2+there"]
    assert carry.carried("pyarrow-26.0-cp312-cp312-manylinux_2_28_x86_64.whl", {"pyarrow": "26.0"})
    assert not carry.carried("torch-2.11.0+there-py3-none-any.whl", {"pyarrow": "26.0"})


@pytest.mark.slow
def test_a_stage_writes_figures_and_table(tmp_path: Path) -> None:
    arguments = ["--device", CPU, "--cases", "imports", "matmul", "--out", str(tmp_path), "--work", str(tmp_path)]
    assert run_stage("trainer", trainer.CASES, arguments, trainer.ONCE) == 0
    report = json.loads((tmp_path / "trainer-cpu.json").read_text())
    assert [entry["case"] for entry in report["cases"]] == ["imports", "matmul"]
    assert report["cases"][0]["figures"]["without"] == "ray vllm mlflow"
    assert "| matmul | tiny |" in (tmp_path / "trainer-cpu.md").read_text()
