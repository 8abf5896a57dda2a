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
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from openai import AuthenticationError, OpenAI
from transformers import AutoModelForCausalLM, GenerationConfig

from jobs.serve import Options, main, parse, ready, stop_at_ends
from pipeline.config import Config
from pipeline.export.api_key import RequireKey
from pipeline.export.serve import engine_kwargs, llm_config, weights_alone
from pipeline.export.served_model import ServedModel, find, notes_on_files
from pipeline.export.tools import RefuseTools, with_parser
from pipeline.models.settings import FILE, ModelSettings, load_settings
from pipeline.track.trajectories import read_trajectories
from tests.folders import configured, copied
from tests.runs import TWO, Run, starter, tiny_settings

KEY = "a-key-of-this-test"
READY_S = 300

serves = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]


def kwargs(model: ServedModel, *arguments: str) -> dict[str, Any]:
    """Arguments of vLLM for `model` with these options."""
    return engine_kwargs(model, parse(["somewhere", *arguments]))


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
def of_a_run(config: Config) -> ServedModel:
    return ServedModel("/runs/puzzles/exports/iteration_000007", "puzzles", ModelSettings.of(config, 7), config)


@pytest.fixture
def plain() -> ServedModel:
    return ServedModel("/models/mine", "mine", None)


def test_a_run_is_served_as_it_was_validated(of_a_run: ServedModel) -> None:
    assert parse(["x"]).resources(of_a_run) == (2, 0.5)
    assert kwargs(of_a_run) == {
        "dtype": "float32",
        "enforce_eager": False,
        "max_model_len": 150,
        "override_generation_config": {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 50},
        "default_chat_template_kwargs": {"enable_thinking": False},
        "block_size": 32,
    }
    of_a_run.config.model.trust_remote_code = True
    assert kwargs(of_a_run)["trust_remote_code"]


def test_options_come_before_the_run(of_a_run: ServedModel) -> None:
    options = ["--max-tokens", "70", "--num-gpus", "2", "--engine", "dtype=bfloat16", "--engine", "limits={a: 1}"]
    arguments = kwargs(of_a_run, *options, "--engine", "block-size=16")
    assert arguments["dtype"] == "bfloat16" and arguments["max_model_len"] == 170
    assert arguments["override_generation_config"]["max_new_tokens"] == 70
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["block_size"] == 16 and arguments["limits"] == {"a": 1}


def test_a_model_without_a_run_keeps_its_own_defaults(plain: ServedModel) -> None:
    assert kwargs(plain, "--num-gpus", "1") == {}
    on_cpus = {"max_model_len": 9000, "max_num_batched_tokens": 9000, "enable_chunked_prefill": False}
    assert kwargs(plain, "--engine", "max_model_len=9000") == on_cpus


@pytest.mark.parametrize(("variable", "space"), [(None, "3"), ("7", "7")])
def test_the_key_and_the_cache_reach_the_replicas(
    of_a_run: ServedModel, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, space: str
) -> None:
    if variable:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", variable)
    of_a_run.config.rollout.cpu_kvcache_space_gb = 3
    model = replace(of_a_run, path=str(tiny_model))
    config = llm_config(model, parse(["x", "--num-gpus", "0", "--engine", "middleware=[a.b]"]), KEY)
    assert config.engine_kwargs["api_key"] == [KEY]
    assert config.engine_kwargs["middleware"] == [
        "a.b",
        "pipeline.export.tools.RefuseTools",
        "pipeline.export.api_key.RequireKey",
    ]
    assert config.runtime_env["env_vars"]["VLLM_CPU_KVCACHE_SPACE"] == space


@pytest.mark.parametrize("cluster", [False, True])
def test_answers_stop_where_the_template_ends_them(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: bool
) -> None:
    served = ServedModel(str(tiny_model), "tiny", None)
    options = parse(["x", "--engine", "dtype=float32"])
    assert stop_at_ends(served, options, tmp_path) == "answers end with <|im_end|> (2)"
    assert not [*tmp_path.iterdir()] and dict(options.engine) == {"dtype": "float32"}

    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    # transformers would refuse to write it.
    sampling = {"do_sample": False, "temperature": 0.9}
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 0} | sampling))
    if cluster:
        monkeypatch.setenv("RAY_ADDRESS", "auto")
    line = stop_at_ends(ServedModel(str(base), "base", None), options, tmp_path)
    named = "answers end with <|endoftext|> (0) or <|im_end|> (2)"
    if cluster:
        assert line.startswith(f'{named}; write "eos_token_id": [0, 2] into the generation_config.json of the model')
        assert "generation_config" not in dict(options.engine)
        return
    assert line == named and dict(options.engine)["generation_config"] == str(tmp_path)
    found = GenerationConfig.from_pretrained(tmp_path)
    assert found.eos_token_id == [0, 2] and found.temperature == 0.9
    # An option of the user stays.
    chosen = parse(["x", "--engine", "generation_config=vllm"])
    stop_at_ends(ServedModel(str(base), "base", None), chosen, tmp_path)
    assert dict(chosen.engine) == {"generation_config": "vllm"}
    (base / "tokenizer.json").unlink()
    (base / "tokenizer_config.json").unlink()
    assert "only the replicas know" in stop_at_ends(ServedModel(str(base), "base", None), options, tmp_path)


def test_impossible_replicas_are_refused(plain: ServedModel) -> None:
    with pytest.raises(ValueError, match="3 to 2 replicas are impossible"):
        llm_config(plain, parse(["x", "--min-replicas", "3", "--max-replicas", "2"]))
    with pytest.raises(ValueError, match=r"1\.5 GPUs per replica are impossible"):
        llm_config(plain, parse(["x", "--num-gpus", "1.5"]))


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/health", {}, 200),
        ("GET", "/v1/models", {"Authorization": f"Bearer {KEY}"}, 200),
        ("GET", "/v1/models", {}, 401),
        ("POST", "/tokenize", {}, 401),
        ("POST", "/invocations", {"Authorization": f"Bearer {KEY}x"}, 401),
        ("POST", "/invocations", {"Authorization": KEY}, 401),
        ("GET", "/metrics", {}, 401),
        ("GET", "/health/../tokenize", {}, 401),
        ("GET", "//health", {}, 401),
    ],
)
def test_every_route_but_health_asks_for_the_key(method: str, path: str, headers: dict[str, str], status: int) -> None:
    app = FastAPI()
    app.state.args = SimpleNamespace(api_key=[KEY])
    app.add_middleware(RequireKey)
    app.add_api_route("/{path:path}", lambda path: path, methods=["GET", "POST"])
    assert TestClient(app).request(method, path, headers=headers).status_code == status
    app.state.args.api_key = None
    assert path == "/health" or TestClient(app).request(method, path, headers=headers).status_code == 401


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"messages": [], "tools": [TOOL]}, 400),
        ({"messages": [], "tools": [TOOL], "tool_choice": "required", "stream": True}, 400),
        ({"messages": [], "tools": [TOOL], "tool_choice": "none"}, 200),
        ({"messages": [], "tools": []}, 200),
        ({"messages": [{"role": "user", "content": "tools"}]}, 200),
        (b'{"tools": [', 200),
        (b'"tools"' + b"[" * 100_000, 200),
        (b"", 200),
    ],
)
def test_without_a_parser_requests_with_tools_are_refused_in_words(body: Any, status: int) -> None:
    app = FastAPI()
    app.add_middleware(RefuseTools)

    @app.post("/{path:path}")
    async def read(request: Request) -> int:
        return len(await request.body())

    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        answer = TestClient(app).post(path, content=content)
        assert answer.status_code == status
        if status == 200:
            assert answer.json() == len(content), "the server gets the whole request"
        else:
            words = answer.json()["error"]["message"]
            assert "--tool-parser auto" in words and "enable-auto-tool-choice" not in words


def test_a_policy_that_was_trained_with_tools_names_its_parser(config: Config) -> None:
    assert ModelSettings.of(config, 7).tool_parser == "none"
    config.agent.tools = ["tools.py"]
    config.agent.parser, config.agent.reasoning_parser = "hermes", "qwen3"
    settings = ModelSettings.of(config, 7)
    assert (settings.tool_parser, settings.reasoning_parser) == ("hermes", "qwen3")
    config.agent.tools, config.agent.named = [], {"calc": {"command": ["x"], "parser": "auto"}}
    assert ModelSettings.of(config, 7).tool_parser == "auto"


@pytest.mark.slow
def test_the_parser_is_that_of_the_chat_template(tiny_model: Path, config: Config, tmp_path: Path) -> None:
    config.agent.tools = ["tools.py"]
    settings = ModelSettings.of(config, 7)
    made = with_parser(ServedModel(str(tiny_model), "tiny", settings, config), None)
    assert made.calls == {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    assert "tool parser hermes" in made.notes[-1]
    assert kwargs(made)["tool_call_parser"] == "hermes"
    arguments = llm_config(made, parse(["x", "--num-gpus", "0"])).engine_kwargs
    assert arguments["enable_auto_tool_choice"] is True and "middleware" not in arguments
    # The option goes before the run.
    assert with_parser(ServedModel(str(tiny_model), "tiny", settings, config), "none").calls == {}
    with pytest.raises(ValueError, match="--tool-parser qwen3_coder: .* Set --tool-parser to one that does"):
        with_parser(ServedModel(str(tiny_model), "tiny", None), "qwen3_coder")
    plain = tmp_path / "plain"
    shutil.copytree(tiny_model, plain)
    (plain / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(ValueError, match="--tool-parser auto: .*leaves out the tool calls"):
        with_parser(ServedModel(str(plain), "plain", None), "auto")
    made = with_parser(ServedModel(str(plain), "plain", settings, config), None)
    assert made.calls == {} and "requests with tools are refused, because" in made.notes[-1]


def test_engines_do_not_read_a_second_set_of_weights(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = copied(tiny_model, tmp_path / "two")
    model = ServedModel(str(folder), "two", None)
    with weights_alone(model) as served:
        assert served is model and notes_on_files(model) == []
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    with weights_alone(model) as served:
        assert served.name == "two" and not (Path(served.path) / "consolidated.safetensors").exists()
        assert (Path(served.path) / "model.safetensors").exists()
    assert "consolidated.safetensors, not read" in notes_on_files(model)[0]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ValueError, match="consolidated.safetensors.*move them out of the folder"), weights_alone(model):
        pass
    with pytest.raises(ValueError, match="has 100 rows"):
        notes_on_files(ServedModel(str(configured(folder, vocab_size=100)), "two", None))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="model.safetensors is empty"):
        notes_on_files(model)


def test_yarn_is_served_at_its_length(tiny_model: Path, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 2048}
    folder = configured(copied(tiny_model, tmp_path / "yarn"), rope_parameters=yarn)
    assert kwargs(ServedModel(str(folder), "yarn", None))["hf_overrides"] == {"max_position_embeddings": 8192}
    assert "hf_overrides" not in kwargs(ServedModel(str(tiny_model), "tiny", None))


def test_settings_of_an_exported_model(config: Config, tmp_path: Path) -> None:
    settings = ModelSettings.of(config, 7)
    settings.save(tmp_path)
    assert load_settings(tmp_path) == settings
    (tmp_path / "config.json").write_text("{}")
    assert find(str(tmp_path)) == ServedModel(str(tmp_path), tmp_path.name, settings)
    whole = json.loads((tmp_path / FILE).read_text())
    for damaged in ({"dtype": 1}, {"iteration": True}, {"trust_remote_code": True}, {"chat_template_kwargs": []}):
        (tmp_path / FILE).write_text(json.dumps(whole | damaged))
        with pytest.raises(ValueError, match=f"{FILE}.*export the model again"):
            load_settings(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["runs/TYPO"], "runs/TYPO: the folder"),
        (["."], "has no config.json"),
        (["some/model", "--iteration", "3"], "some/model is not the folder of a run"),
        (["some/model", "--api-key-env", "NO_SUCH_KEY"], "--api-key-env NO_SUCH_KEY: that environment variable is"),
        (["some/model", "--detach"], "--detach leaves the server in a cluster; set RAY_ADDRESS"),
        (["some/model", "--host", "203.0.113.7"], "cannot listen on 203.0.113.7:8000"),
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


def test_what_is_printed_when_the_model_is_ready() -> None:
    node = {"NodeManagerAddress": "10.0.0.1", "MetricsExportPort": 8080}
    without = node | {"MetricsExportPort": -1}
    options = Options()
    lines = ready("m", options, [node, without], 80).splitlines()
    assert lines[:3] == ["m: ready", "  API      http://127.0.0.1:8000/v1", "  health   http://127.0.0.1:8000/health"]
    assert lines[3] == "  metrics  http://127.0.0.1:8000/metrics (vLLM), http://10.0.0.1:8080/metrics (Ray)"
    assert lines[4] == "  context  80 tokens, unless --engine max_model_len=N sets more"
    options.min_replicas = 2
    assert [line.split()[0] for line in ready("m", options, [without]).splitlines()] == ["m:", "API", "health", "try"]


@pytest.mark.parametrize("text", ["block_size", "a=[1"])
def test_malformed_engine_arguments_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["x", "--engine", text])
    assert text in capsys.readouterr().err


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
    # As in a base model, in whose files the template's end of turn is none.
    model.generation_config.eos_token_id = 0
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

    def test_the_run_and_its_model_stop_where_the_template_ends_answers(self, run: Run, server: Server) -> None:
        line = "answers end with <|endoftext|> (0) or <|im_end|> (2)"
        assert line in run.printed and line in server.log.read_text()
        assert GenerationConfig.from_pretrained(run.folder / "model").eos_token_id == [0, 2]

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

    def test_other_keys_are_refused(self, server: Server) -> None:
        assert [model.id for model in server.client().models.list()] == ["served"]
        with pytest.raises(AuthenticationError):
            server.client("another").models.list()
        for path in ("/v1/completions", "/invocations", "/tokenize", "/metrics", "/docs"):
            assert httpx.post(f"{server.url}{path}", json={"model": "served", "prompt": "a"}).status_code == 401, path
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert KEY not in server.log.read_text()

    def test_ctrl_c_ends_the_server_and_all_it_started(self, server: Server) -> None:
        import psutil

        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        # A terminal sends the signal to all processes of the command.
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(timeout=120) == 0
        printed = server.log.read_text()
        assert "served: stopping" in printed, printed
        assert not any(word in printed for word in ("Traceback", "graceful_shutdown")), printed
        gone, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
