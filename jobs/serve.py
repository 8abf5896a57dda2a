"""Serve a run or a model with the OpenAI API: `python -m jobs.serve runs/NAME`."""

import argparse
import contextlib
import json
import logging
import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from jobs.command import exit_code, new_parser
from jobs.entry import command
from jobs.export import add_choice
from pipeline.export.serve import ServeOptions
from pipeline.run.submitted import joined

if TYPE_CHECKING:
    from pipeline.export.served_model import ServedModel

EPILOG = """\
examples:
  python -m jobs.serve runs/NAME
  python -m jobs.serve runs/NAME --best val-core/countdown/acc/mean@1 --port 8001
  python -m jobs.serve models/mine --num-gpus 1 --max-replicas 4
  python -m jobs.serve Qwen/Qwen2.5-0.5B-Instruct --num-gpus 1 --engine max_model_len=4096
  python -m jobs.serve models/mine --tool-parser auto            requests may have tools
  MLFLOW_TRACKING_URI=... python -m jobs.serve models:/countdown@champion
  SERVE_KEY=secret python -m jobs.serve runs/NAME --host 0.0.0.0 --api-key-env SERVE_KEY
  RAY_ADDRESS=auto python -m jobs.serve /shared/runs/NAME --num-gpus 1 --detach

a run's model answers as it was validated (type, chat template, greedy or not) unless a request says otherwise.
Ctrl-C stops the server.
"""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WATCH_S = 5.0


@dataclass
class Options(ServeOptions):
    """All options of the command: for the deployment, for the choice of a checkpoint, and for the server."""

    model: str = ""
    iteration: int | None = None
    best: str | None = None
    lowest: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_env: str | None = None
    detach: bool = False
    start_timeout: float = 1800


def parse(arguments: list[str] | None = None) -> Options:
    """Parse the command line; defaults are in `Options`."""
    about = "Serve a language model with Ray Serve and vLLM through the OpenAI chat and completions API."
    parser = new_parser("serve", about, EPILOG)
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="a run's folder or one of its checkpoints, a Hugging "
        "Face folder or Hub name, or models:/NAME@ALIAS of MLflow")  # fmt: skip
    add_choice(parser)
    add = parser.add_argument_group("server").add_argument
    add("--name", help="name of the model for clients (default: the run's, or the model's)")
    add("--host", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, help="(default: 8000)")
    add("--api-key-env", metavar="VARIABLE", help="environment variable with the key that requests must carry")
    add("--detach", action="store_true", help="end when the server is ready and leave it in the cluster")
    add("--start-timeout", type=float, metavar="S", help="seconds until it must be ready (default: 1800)")
    add = parser.add_argument_group("replicas").add_argument
    add("--min-replicas", type=int, metavar="N", help="fewest (default: 1; 0 stops all of them when idle)")
    add("--max-replicas", type=int, metavar="N", help="most (default: as --min-replicas, a fixed number)")
    add("--target-ongoing-requests", type=int, metavar="N", help="concurrent requests per replica (default: 64)")
    add("--num-cpus", type=float, metavar="N", help="CPUs of a replica (default: as the run's engines, or 1)")
    add("--num-gpus", type=float, metavar="N", help="GPUs of a replica: a fraction, one, or several for tensor "
        "parallelism (default: as the run's engines, or 0)")  # fmt: skip
    add = parser.add_argument_group("engine").add_argument
    add("--max-tokens", type=int, metavar="N", help="most tokens of an answer if a request sets no limit (default: "
                                                    "the run's data.max_response_length)")  # fmt: skip
    add("--tool-parser", metavar="NAME", help="what reads calls of tools: auto finds it by the model's chat template, "
        "NAME is a parser of vLLM's, and with none requests with tools are refused (default: the run's agent.parser; "
        "without episodes none)")  # fmt: skip
    add("--engine", type=engine_argument, action="append", metavar="KEY=VALUE", help="an argument of vLLM, such as "
        "max_model_len=4096, dtype=bfloat16 or gpu_memory_utilization=0.8; may be repeated")  # fmt: skip
    return parser.parse_args(arguments, namespace=Options())


def engine_argument(text: str) -> tuple[str, Any]:
    """Parse `KEY=VALUE` to (key with underscores, value read as YAML)."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return name.strip().replace("-", "_"), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"the value in {text!r} cannot be read as YAML; put it in quotes") from error


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 stopped or detached, 2 bad arguments or input, 130 interrupted before
    the model was ready, 1 failed."""
    options = parse(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in ("transformers", "ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def start() -> int:
        key = api_key(options.api_key_env)
        if not joined():
            if options.detach:
                raise ValueError("--detach leaves the server in a cluster; set RAY_ADDRESS, such as RAY_ADDRESS=auto")
            check_port(options.host, options.port)
        from pipeline.export.served_model import find, notes_on_files
        from pipeline.export.tools import with_parser

        model = with_parser(find(options.model, options.iteration, options.best, options.lowest), options.tool_parser)
        for note in (*model.notes, *notes_on_files(model)):
            print(note)
        if key is None and options.host not in LOOPBACK:
            print(f"everybody who can reach {options.host} can use the model; set --api-key-env to require a key")
        return run(model, options, key)

    return exit_code(start, failed=(OSError, RuntimeError), interrupted="interrupted before the model was ready")


def api_key(variable: str | None) -> str | None:
    """Return the API key in the environment variable `variable`; None if `variable` is None.

    Raises ValueError if the variable is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"--api-key-env {variable}: that environment variable is unset or empty; put the key there")
    return key


def check_port(host: str, port: int) -> None:
    """Raise ValueError, before a model is loaded, if the address is in use or does not belong to this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host}:{port} ({why}); choose another --port or --host") from error


def stop_at_ends(model: "ServedModel", options: Options, folder: Path) -> str:
    """Return a line of text on the tokens that end a response.

    If the model's own files do not name all of these tokens, a generation config with them is written to `folder` and
    set in `options` for the engine.
    """
    from pipeline.export.serve import find_model_ends, write_generation_config

    try:
        ends = find_model_ends(model, options)
    except ValueError as error:
        return f"only the replicas know the ends of answers: {error}"
    if not ends.missing or "generation_config" in dict(options.engine):
        return ends.line
    if os.environ.get("RAY_ADDRESS"):
        # A replica may start on a machine without this folder.
        return (
            f'{ends.line}; write "eos_token_id": {list(ends.ids)} into the generation_config.json of the model, which '
            "lacks some of them, so that answers stop there"
        )
    write_generation_config(model, ends, folder)
    options.engine = [*options.engine, ("generation_config", str(folder))]
    return ends.line


def run(model: "ServedModel", options: Options, key: str | None) -> int:
    """Start the server, print its addresses when it is ready, and serve until Ctrl-C. Returns the exit code.

    Args:
        model: the model to serve.
        options: options of the command.
        key: key that requests must carry; None for no key.
    """
    from pipeline.export.serve import weights_alone

    with tempfile.TemporaryDirectory(prefix="slipstream-serve-") as folder, weights_alone(model) as model:
        print(f"{options.name or model.name}: {stop_at_ends(model, options, Path(folder))}", flush=True)
        return serve_until_stopped(model, options, key)


def serve_until_stopped(model: "ServedModel", options: Options, key: str | None) -> int:
    """Start Ray if necessary, deploy the model, and wait until Ctrl-C (or return at once with `--detach`); see
    `run`."""
    import ray
    from ray import serve

    from pipeline.export.serve import application, engine_kwargs, llm_config, wait_until_running
    from pipeline.run import cluster

    config = llm_config(model, options, key)
    # Serve sets up its log as it is imported.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    name = options.name or model.name
    cpus, gpus = options.resources(model)
    needed = cpus * max(int(gpus), 1) * options.replicas()[1]
    started = cluster.start(max(os.cpu_count() or 1, round(needed + 0.5)), None, {})
    deployed = False
    try:
        serve.start(http_options={"host": options.host, "port": options.port})
        deployed = True
        target = serve.RunTarget(application(config), name=name, route_prefix="/")
        print(f"{name}: starting {model.path}", flush=True)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        wait_until_running(name, options.start_timeout)
        print(ready(name, options, ray.nodes(), engine_kwargs(model, options).get("max_model_len")), flush=True)
        if options.detach:
            deployed = False
            return 0
        with contextlib.suppress(KeyboardInterrupt):
            while name in serve.status().applications:
                time.sleep(WATCH_S)
            raise RuntimeError(f"{name} is not served any more: the application was deleted")
        print(f"{name}: stopping", flush=True)
        return 0
    finally:
        # `serve.shutdown` calls an actor that ends before it answers, and Ray prints that the call failed.
        if deployed:
            serve.delete(name)
        if started:
            ray.shutdown()


def ready(name: str, options: Options, nodes: list[dict[str, Any]], context: int | None = None) -> str:
    """Return the lines that are printed when the model is ready: its addresses, and a `curl` command to try it.

    Args:
        name: the model's name for clients.
        options: options of the command.
        nodes: nodes of the Ray cluster, as `ray.nodes` lists them.
        context: maximum number of tokens of prompt and answer, if it is set; None for the model's own.
    """
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{options.port}"
    bearer = f" -H 'Authorization: Bearer '\"${options.api_key_env}\"" if options.api_key_env else ""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    # A Ray without a dashboard exports no metrics; its port is -1.
    ports = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in nodes if node["MetricsExportPort"] > 0]
    metrics = [f"http://{address}:{port}/metrics (Ray)" for address, port in ports[:3]]
    if options.replicas()[1] == 1:
        metrics.insert(0, f"{url}/metrics (vLLM)")
    return "\n".join(
        [
            f"{name}: ready",
            f"  API      {url}/v1",
            f"  health   {url}/health",
            *([f"  metrics  {', '.join(metrics)}"] if metrics else []),
            *([f"  context  {context:,} tokens, unless --engine max_model_len=N sets more"] if context else []),
            f"  try      curl {url}/v1/chat/completions -H 'Content-Type: application/json'{bearer} -d '{body}'",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
