"""A run behind the OpenAI API: what is asked for on the command line, and a whole server with its client.

The server is a process of its own, as a user starts it, and serves the checkpoint of a short run of this module.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AuthenticationError, BadRequestError, OpenAI
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from jobs.serve import main, parser, ready, serving
from pipeline.config import Config
from pipeline.export.settings import FILE, ModelSettings, load_settings
from pipeline.export.target import Target, find
from pipeline.serving import Serving, check_resources, engine_kwargs
from pipeline.track.trajectories import read_trajectories
from tests.runs import TWO, Run, starter, tiny_settings

KEY = "a-key-of-this-test"
READY_S = 300

serves = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]


def asked(*arguments: str, target: Target | None = None) -> Serving:
    return serving(parser().parse_args(["somewhere", *arguments]), target or Target("/models/mine", "mine", None))


@pytest.fixture
def config() -> Config:
    config = Config()
    config.data.max_prompt_length, config.data.max_response_length = 100, 50
    config.data.apply_chat_template_kwargs = {"enable_thinking": False}
    config.rollout.dtype, config.rollout.num_gpus, config.rollout.num_cpus = "float32", 0.5, 2
    config.rollout.engine_kwargs = {"block_size": 32}
    config.trainer.experiment_name = "puzzles"
    return config


@pytest.fixture
def of_a_run(config: Config) -> Target:
    return Target("/runs/puzzles/exports/iteration_000007", "puzzles", ModelSettings.of(config, 7), config)


def test_a_run_is_served_as_it_was_validated(of_a_run: Target) -> None:
    what = asked(target=of_a_run)
    assert (what.name, what.num_cpus, what.num_gpus) == ("puzzles", 2, 0.5)
    assert engine_kwargs(what) == {
        "dtype": "float32",
        "enforce_eager": False,
        "max_model_len": 150,
        "override_generation_config": {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 50},
        "default_chat_template_kwargs": {"enable_thinking": False},
        "block_size": 32,
    }


def test_options_come_before_the_run(of_a_run: Target) -> None:
    options = ["--name", "other", "--dtype", "bfloat16", "--max-tokens", "70", "--num-gpus", "2", "--num-cpus", "3"]
    what = asked(*options, "--engine", "block-size=16", "--engine", "limits={a: 1}", target=of_a_run)
    arguments = engine_kwargs(what)
    assert (what.name, what.num_cpus, what.num_gpus) == ("other", 3, 2)
    assert arguments["dtype"] == "bfloat16" and arguments["max_model_len"] == 170
    assert arguments["override_generation_config"]["max_new_tokens"] == 70
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["block_size"] == 16 and arguments["limits"] == {"a": 1}
    assert engine_kwargs(asked("--max-model-len", "99", target=of_a_run))["max_model_len"] == 99


def test_a_model_without_a_run_keeps_its_own_defaults() -> None:
    assert engine_kwargs(asked("--num-gpus", "1")) == {}
    on_cpus = engine_kwargs(asked("--max-model-len", "9000"))
    assert on_cpus == {"max_model_len": 9000, "max_num_batched_tokens": 9000, "enable_chunked_prefill": False}
    assert not asked().trust_remote_code and asked("--trust-remote-code").trust_remote_code


@pytest.mark.parametrize(
    ("options", "replicas"),
    [
        ([], (1, 1)),
        (["--num-replicas", "3"], (3, 3)),
        (["--min-replicas", "2"], (2, 2)),
        (["--max-replicas", "4"], (1, 4)),
        (["--min-replicas", "0", "--max-replicas", "2"], (0, 2)),
        (["--min-replicas", "0"], (0, 1)),
    ],
)
def test_replicas(options: list[str], replicas: tuple[int, int]) -> None:
    what = asked(*options)
    assert (what.min_replicas, what.max_replicas) == replicas


def test_what_can_never_be_placed_is_refused() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}]
    check_resources(Serving("m", "m", num_gpus=1), nodes)
    with pytest.raises(ValueError, match="2 replicas need 2 GPUs, but Ray has 1"):
        check_resources(Serving("m", "m", num_gpus=1, min_replicas=2, max_replicas=2), nodes)
    with pytest.raises(ValueError, match="1 replicas need 9 CPUs, but Ray has 8"):
        check_resources(Serving("m", "m", num_cpus=9), nodes)


def test_settings_of_an_exported_model(config: Config, tmp_path: Path) -> None:
    settings = ModelSettings.of(config, 7)
    settings.save(tmp_path)
    assert load_settings(tmp_path) == settings
    (tmp_path / "config.json").write_text("{}")
    assert find(str(tmp_path)) == Target(str(tmp_path), tmp_path.name, settings)
    whole = json.loads((tmp_path / FILE).read_text())
    for damaged in ({"dtype": 1}, {"iteration": True}, {"trust_remote_code": True}, {"chat_template_kwargs": []}):
        (tmp_path / FILE).write_text(json.dumps(whole | damaged))
        with pytest.raises(ValueError, match=f"{FILE}.*export the model again"):
            load_settings(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere/to/be"], "nowhere/to/be is not a folder"),
        (["."], "is neither a run's folder (it holds no config.yaml) nor a model's"),
        (["some/model", "--iteration", "3"], "some/model is no run's folder"),
        (["some/model", "--api-key-env", "NO_SUCH_KEY"], "--api-key-env NO_SUCH_KEY: that environment variable is"),
        (["some/model", "--detach"], "--detach leaves the server in a cluster; set RAY_ADDRESS"),
        (["some/model", "--engine", "block_size"], "--engine 'block_size' is not KEY=VALUE"),
        (["some/model", "--engine", "a=[1"], "cannot be read as YAML"),
        (["some/model", "--num-replicas", "2", "--max-replicas", "3"], "--num-replicas is a fixed number"),
        (["some/model", "--host", "203.0.113.7"], "203.0.113.7:8000 cannot be listened at"),
    ],
)
def test_refusals(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--host" not in arguments:
        arguments = [*arguments, "--port", str(free_port())]
    assert main(arguments) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.startswith("error: ") and sentence in printed


def test_a_port_that_is_taken_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["nowhere", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} cannot be listened at (Address already in use)" in capsys.readouterr().err


def test_the_ready_lines_name_no_key() -> None:
    options = parser().parse_args(["x", "--api-key-env", "SERVE_KEY", "--host", "::1", "--port", "81"])
    nodes = [{"NodeManagerAddress": "192.0.2.1", "MetricsExportPort": 9}]
    lines = ready(Serving("m", "mine"), options, nodes)
    assert "http://[::1]:81/v1/chat/completions" in lines and '"$SERVE_KEY"' in lines
    assert "http://[::1]:81/metrics (vLLM), http://192.0.2.1:9/metrics (Ray)" in lines
    assert "/metrics (vLLM)" not in ready(Serving("m", "mine", max_replicas=2), options, nodes)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def talkative_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with larger weights: every prompt has an answer of its own, of many different tokens."""
    folder = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("talkative") / "model"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and parameter.dim() == 2:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, talkative_model: Path, prompt_files: Any, ray_session: None) -> Run:
    settings = tiny_settings(tmp_path_factory.mktemp("serve"), talkative_model, prompt_files)
    return starter(settings)("served", *TWO, "trainer.total_training_steps=2", "actor.optim.lr=1e-3")


class Server:
    """The command `jobs.serve`, running."""

    def __init__(self, run: Path, folder: Path) -> None:
        self.port, self.log = free_port(), folder / "serve.log"
        command = [sys.executable, "-m", "jobs.serve", str(run), "--port", str(self.port)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--api-key-env", "SERVE_KEY", "--start-timeout", str(READY_S)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"SERVE_KEY": KEY},
            )
        self.url = f"http://127.0.0.1:{self.port}"

    def until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while ": ready\n" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.5)

    def client(self, key: str = KEY) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(run.folder, tmp_path_factory.mktemp("log"))
    try:
        started.until_ready()
        yield started
    finally:
        if started.process.poll() is None:
            os.killpg(started.process.pid, signal.SIGKILL)
            started.process.wait()


class TestServer:
    """In this order: the last test ends the server."""

    pytestmark = serves

    def test_exported_shards_are_the_model_that_the_run_left(self, run: Run, server: Server) -> None:
        ours, theirs = (
            load_file(folder / "model.safetensors")
            for folder in (run.folder / "exports" / "iteration_000002", run.folder / "model")
        )
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in ours)

    def test_greedy_answers_are_those_of_the_validation(self, run: Run, server: Server) -> None:
        """A request that says nothing of sampling is answered as the last version was validated."""
        rows = read_trajectories(str(run.folder), 2, "val").to_pylist()
        assert len(rows) == 7 and {row["policy_version"] for row in rows} == {2}
        assert len({tuple(row["response_ids"]) for row in rows}) > 3, "all alike would prove little"
        client = server.client()
        for row in rows:
            answer = client.chat.completions.create(
                model="served", messages=json.loads(row["prompt"]), extra_body={"return_token_ids": True}
            )
            assert answer.model_extra is not None and answer.choices[0].model_extra is not None
            assert answer.model_extra["prompt_token_ids"] == row["prompt_ids"]
            assert answer.choices[0].model_extra["token_ids"] == row["response_ids"]
            assert answer.choices[0].finish_reason == row["finish_reason"]
            assert answer.usage is not None and answer.usage.completion_tokens == len(row["response_ids"])
            if "\ufffd" not in row["response"]:
                assert answer.choices[0].message.content == row["response"]

    def test_streaming_gives_the_same_answer_in_parts(self, server: Server) -> None:
        client = server.client()
        question: Any = {"model": "served", "messages": [{"role": "user", "content": "Numbers: 3, 4. Target: 7."}]}
        whole = client.chat.completions.create(**question).choices[0].message.content
        parts = [
            part.choices[0].delta.content or "" for part in client.chat.completions.create(**question, stream=True)
        ]
        assert whole and "".join(parts) == whole and len([part for part in parts if part]) > 1

    def test_completions_take_tokens_and_say_how_to_sample(self, run: Run, server: Server) -> None:
        row = read_trajectories(str(run.folder), 2, "val").to_pylist()[0]
        client = server.client()

        def complete(**options: Any) -> Any:
            extra = {"return_token_ids": True}
            return client.completions.create(model="served", prompt=row["prompt_ids"], extra_body=extra, **options)

        greedy = complete().choices[0]
        assert greedy.model_extra["token_ids"] == row["response_ids"]
        short = complete(max_tokens=2).choices[0]
        assert short.model_extra["token_ids"] == row["response_ids"][:2] and short.finish_reason == "length"
        drawn = complete(temperature=1.0, n=8, seed=1).choices
        assert len(drawn) == 8 and len({tuple(choice.model_extra["token_ids"]) for choice in drawn}) > 1
        with pytest.raises(BadRequestError):
            complete(max_tokens=10_000)

    def test_other_keys_are_refused(self, server: Server) -> None:
        assert [model.id for model in server.client().models.list()] == ["served"]
        with pytest.raises(AuthenticationError):
            server.client("another").models.list()
        with pytest.raises(AuthenticationError):
            server.client("another").chat.completions.create(
                model="served", messages=[{"role": "user", "content": "a"}]
            )
        assert httpx.post(f"{server.url}/v1/completions", json={"model": "served", "prompt": "a"}).status_code == 401
        assert KEY not in server.log.read_text()

    def test_health_and_metrics(self, server: Server) -> None:
        assert httpx.get(f"{server.url}/health").status_code == 200
        own = httpx.get(f"{server.url}/metrics").text
        counted = [line for line in own.splitlines() if line.startswith("vllm:generation_tokens_total{")]
        assert counted and float(counted[0].split()[-1]) > 20 and 'model_name="served"' in counted[0]
        address = server.log.read_text().split("(vLLM), ")[1].split()[0]
        deadline = time.monotonic() + 60
        # Processes hand their numbers to Ray's agent every few seconds.
        while "ray_serve_num_http_requests" not in httpx.get(address).text:
            assert time.monotonic() < deadline, "Ray exports no metrics of Serve"
            time.sleep(1)

    def test_ctrl_c_ends_the_server_and_all_it_started(self, server: Server) -> None:
        import psutil

        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        # A terminal sends the signal to all processes of the command.
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(timeout=120) == 0
        printed = server.log.read_text()
        assert "served: stopping" in printed and "Traceback" not in printed, printed
        gone, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
