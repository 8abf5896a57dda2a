"""Serve a run or a model behind the OpenAI API: `python -m jobs.serve runs/NAME`."""

import argparse
import contextlib
import json
import logging
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import yaml

from jobs.export import choice
from jobs.train import complain

if TYPE_CHECKING:
    from pipeline.export.target import Target
    from pipeline.serving import Serving

EPILOG = """\
examples:
  python -m jobs.serve runs/NAME
  python -m jobs.serve runs/NAME --best val-core/countdown/acc/mean@1 --port 8001
  python -m jobs.serve models/mine --num-gpus 1 --max-replicas 4
  python -m jobs.serve Qwen/Qwen2.5-0.5B-Instruct --num-gpus 1 --max-model-len 4096
  MLFLOW_TRACKING_URI=... python -m jobs.serve models:/countdown@champion
  SERVE_KEY=secret python -m jobs.serve runs/NAME --host 0.0.0.0 --api-key-env SERVE_KEY
  RAY_ADDRESS=auto python -m jobs.serve /shared/runs/NAME --num-gpus 1 --detach

a run's model answers as it was validated (type, chat template, greedy or not) unless a request says otherwise.
Ctrl-C stops the server.
"""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WATCH_S = 5.0


def parser() -> argparse.ArgumentParser:
    """The options of `python -m jobs.serve`."""
    own = argparse.ArgumentParser(
        prog="python -m jobs.serve",
        description="Serve a language model with Ray Serve and vLLM behind the OpenAI chat and completions API.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own.add_argument("model", metavar="RUN_OR_MODEL", help="a run's folder or one of its checkpoints, a Hugging Face "
        "folder or hub name, or models:/NAME@ALIAS of MLflow")  # fmt: skip
    choice(own.add_argument_group("which checkpoint of a run", "the newest whole one, unless one of these is given"))
    add = own.add_argument_group("server").add_argument
    add("--name", help="what clients call the model (default: the run's name, or the model's)")
    add("--host", default="127.0.0.1", help="address to listen at (default: %(default)s, this machine alone)")
    add("--port", type=int, default=8000, help="(default: %(default)s)")
    add("--api-key-env", metavar="VARIABLE", help="environment variable that holds the key that requests must carry")
    add("--detach", action="store_true", help="end when the server is ready and leave it in the cluster")
    add("--start-timeout", type=float, default=1800, metavar="S", help="seconds until it must be ready (default: 1800)")
    add = own.add_argument_group("replicas").add_argument
    add("--num-replicas", type=int, metavar="N", help="a fixed number of replicas")
    add("--min-replicas", type=int, metavar="N", help="fewest (default: 1; 0 stops all of them when idle)")
    add("--max-replicas", type=int, metavar="N", help="most (default: as --min-replicas)")
    add("--target-ongoing-requests", type=int, default=64, metavar="N", help="requests at a time per replica that "
        "autoscaling aims at (default: %(default)s)")  # fmt: skip
    add("--num-cpus", type=float, metavar="N", help="CPUs of a replica (default: as the run's engines, or 1)")
    add("--num-gpus", type=float, metavar="N", help="GPUs of a replica: a part, one, or several for tensor parallelism "
        "(default: as the run's engines, or 0)")  # fmt: skip
    add = own.add_argument_group("engine").add_argument
    add("--dtype", help="type to compute in (default: as the run's engines, or the model's)")
    add("--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer (default: the run's, or the "
        "model's)")  # fmt: skip
    add("--max-tokens", type=int, metavar="N", help="most tokens of an answer where a request does not say (default: "
        "the run's data.max_response_length)")  # fmt: skip
    add("--kvcache-gb", type=int, metavar="N", help="GiB of KV cache on CPUs (default: the run's, or 1)")
    add("--engine", action="append", default=[], metavar="KEY=VALUE", help="further arguments of vLLM, such as "
        "gpu_memory_utilization=0.8; may be repeated")  # fmt: skip
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    return own


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code (0 stopped or detached, 2 bad arguments or input, 130 interrupted before it
    was ready, 1 failed)."""
    options = parser().parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for noisy in ("transformers", "ray", "ray.serve"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        key = api_key(options.api_key_env)
        if options.detach and not os.environ.get("RAY_ADDRESS"):
            raise ValueError("--detach leaves the server in a cluster; set RAY_ADDRESS, such as RAY_ADDRESS=auto")
        if not os.environ.get("RAY_ADDRESS"):
            check_port(options.host, options.port)
        from transformers.utils.logging import disable_progress_bar

        from pipeline.export.target import find

        disable_progress_bar()
        target = find(options.model, options.iteration, options.best, options.lowest)
        for note in target.notes:
            print(note)
        if key is None and options.host not in LOOPBACK:
            print(f"everybody who reaches {options.host} can use the model; --api-key-env asks for a key")
        return run(serving(options, target), options, key)
    except (ValueError, ImportError) as error:
        complain(str(error))
        return 2
    except (OSError, RuntimeError) as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        complain("interrupted before the model was ready")
        return 130


def api_key(variable: str | None) -> str | None:
    """The key in the environment variable, or None where none is named.

    Raises:
        ValueError: the variable is unset or empty.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"--api-key-env {variable}: that environment variable is unset or empty; put the key there")
    return key


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be listened at, before a model is loaded for it.

    Raises:
        ValueError: the address is taken or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{host}:{port} cannot be listened at ({why}); choose another --port or --host") from error


def engine_arguments(pairs: list[str]) -> dict[str, Any]:
    """`KEY=VALUE` pairs, the values read as YAML.

    Raises:
        ValueError: a pair has no `=`, or its value is no YAML.
    """
    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise ValueError(f"--engine {pair!r} is not KEY=VALUE")
        try:
            found[name.strip().replace("-", "_")] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"--engine {pair!r}: the value cannot be read as YAML; put it in quotes") from error
    return found


def serving(options: argparse.Namespace, target: "Target") -> "Serving":
    """What is to be served: options first, then the run's settings, then defaults.

    Raises:
        ValueError: options contradict each other.
    """
    from pipeline.serving import Serving

    if options.num_replicas is not None and (options.min_replicas, options.max_replicas) != (None, None):
        raise ValueError("--num-replicas is a fixed number; leave out --min-replicas and --max-replicas")
    low = options.num_replicas if options.num_replicas is not None else options.min_replicas
    low = 1 if low is None else low
    trusted = target.config is not None and target.config.model.trust_remote_code
    return Serving(
        model=target.path,
        name=options.name or target.name,
        settings=target.settings,
        min_replicas=low,
        max_replicas=max(low, 1) if options.max_replicas is None else options.max_replicas,
        target_ongoing_requests=options.target_ongoing_requests,
        num_cpus=target.engine("num_cpus", 1.0) if options.num_cpus is None else options.num_cpus,
        num_gpus=target.engine("num_gpus", 0.0) if options.num_gpus is None else options.num_gpus,
        kvcache_space_gb=options.kvcache_gb or target.engine("cpu_kvcache_space_gb", 1),
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_tokens=options.max_tokens,
        trust_remote_code=options.trust_remote_code or trusted,
        engine_kwargs=target.engine("engine_kwargs", {}) | engine_arguments(options.engine),
    )


def run(what: "Serving", options: argparse.Namespace, key: str | None) -> int:
    """Start, say when it is ready, and serve until Ctrl-C."""
    import ray
    from ray import serve

    from pipeline import cluster
    from pipeline.serving import application, check_resources, llm_config, resources, wait
    from pipeline.signals import sigterm_as_ctrl_c

    config = llm_config(what, key)
    # Serve sets up its own log as it is imported.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    needed = resources(what)["CPU"] * what.max_replicas
    started = cluster.start(max(os.cpu_count() or 1, round(needed + 0.5)), None, {})
    deployed = False
    try:
        with sigterm_as_ctrl_c():
            check_resources(what, [node["Resources"] for node in ray.nodes() if node["Alive"]])
            serve.start(http_options={"host": options.host, "port": options.port})
            deployed = True
            target = serve.RunTarget(application(config), name=what.name, route_prefix="/")
            print(f"{what.name}: starting {what.model}", flush=True)
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
            wait(what.name, options.start_timeout, lambda text: print(f"{what.name}: Serve says: {text}", flush=True))
            print(ready(what, options, ray.nodes()), flush=True)
            if options.detach:
                deployed = False
                return 0
            with contextlib.suppress(KeyboardInterrupt):
                watch(what.name)
            print(f"{what.name}: stopping", flush=True)
        return 0
    finally:
        if started:
            serve.shutdown()
            ray.shutdown()
        elif deployed:
            serve.delete(what.name)


def watch(name: str) -> None:
    """Print when the state of the application changes; never returns.

    Raises:
        RuntimeError: the application is gone.
    """
    from ray import serve

    state = "RUNNING"
    while True:
        time.sleep(WATCH_S)
        found = serve.status().applications.get(name)
        if found is None:
            raise RuntimeError(f"{name} is not served any more; somebody deleted it")
        if found.status.value != state:
            state = found.status.value
            print(f"{name}: {state.lower()} {found.message}".rstrip(), flush=True)


def ready(what: "Serving", options: argparse.Namespace, nodes: list[dict[str, Any]]) -> str:
    """The lines that say that, where and how the model can be asked."""
    shown = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{shown}:{options.port}"
    bearer = f" -H 'Authorization: Bearer '\"${options.api_key_env}\"" if options.api_key_env else ""
    body = json.dumps({"model": what.name, "messages": [{"role": "user", "content": "Hello"}]})
    ray_metrics = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes]
    own = f"{url}/metrics (vLLM), " if what.max_replicas == 1 else ""
    return "\n".join(
        [
            f"{what.name}: ready",
            f"  API      {url}/v1",
            f"  health   {url}/health",
            f"  metrics  {own}{', '.join(ray_metrics[:3])} (Ray{'' if own else ' and vLLM'})",
            f"  try      curl {url}/v1/chat/completions -H 'Content-Type: application/json'{bearer} -d '{body}'",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
