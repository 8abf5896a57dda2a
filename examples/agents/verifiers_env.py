"""Plays one episode of an environment written for verifiers, with its own code, in a venv of its own.

    python3.11 -m venv /venvs/games && /venvs/games/bin/pip install 'verifiers<0.4'
    /venvs/games/bin/python examples/agents/verifiers_env.py my_env.py --rows train.parquet
    slipstream train agent.command='[/venvs/games/bin/python, examples/agents/verifiers_env.py, my_env.py]' \
        data.train_files=train.parquet agent.max_turns=6 ...

`my_env.py`, or a module that is installed there, has `load_environment(**kwargs)`. `--rows` writes the rows of its
dataset as a file of the run. Rows of other files do, too: `ground_truth` is the answer, and `extra_info` the info.

Every answer is sampled as the run says; sampling arguments of an environment are not used. What verifiers calls an
error ends the command with a sentence, also an exception of a reward function, which verifiers would log and score 0.
Two such errors are the policy's, and scored: an empty answer, and one that the limits of the run leave no room for.
"""

import argparse
import asyncio
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

POLICY_ERRORS = ("EmptyModelResponseError", "the episode is over")
"""In errors of verifiers: its name of an empty answer, and what the run says where it allows no further one."""

try:
    import verifiers as vf
    from verifiers.types import ClientConfig
except ImportError as error:
    sys.exit(f"{sys.executable} has no verifiers that knows load_environment ({error}); pip install 'verifiers<0.4'")


class Swallowed(logging.Handler):
    """Keeps the first exception of a reward function, which a rubric logs and counts as 0."""

    first: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message if it is about a reward function."""
        if record.levelno >= logging.ERROR and "reward function" in record.getMessage():
            self.first = self.first or record.getMessage()


def load(name: str, kwargs: dict[str, Any]) -> vf.Environment:
    """The environment of a file or of a module."""
    if not name.endswith(".py"):
        return vf.load_environment(name, **kwargs)
    sys.path.insert(0, str(Path(name).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.load_environment(**kwargs)


def write_rows(environment: vf.Environment, path: str) -> None:
    """Write the environment's dataset as rows of a run, each with what verifiers takes for an episode of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = environment.get_dataset().to_list()
    columns = {
        "prompt": [row["prompt"] for row in rows],
        "data_source": ["verifiers"] * len(rows),
        "reward_model": [{"style": "rule", "ground_truth": as_text(row.get("answer", ""))} for row in rows],
        "extra_info": [{"verifiers": json.dumps(row)} for row in rows],
    }
    pq.write_table(pa.table(columns), path)


def as_text(value: Any) -> str:
    """A text, or the JSON of what is none."""
    return value if isinstance(value, str) else json.dumps(value)


def play(environment: vf.Environment, row: dict[str, Any]) -> dict[str, Any]:
    """One episode: its reward, and the metrics of the rubric."""
    if environment.rubric.has_group_rewards:
        sys.exit(f"the rubric {type(environment.rubric).__name__} rewards groups; an episode is scored alone here")
    extra = row["extra_info"] or {}
    given = {"example_id": 0, "prompt": row["prompt"], "answer": as_text(row["ground_truth"]), "info": extra}
    if "verifiers" in extra:
        given = json.loads(extra["verifiers"])
    client = ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    logging.getLogger("verifiers").addHandler(swallowed := Swallowed())
    result = asyncio.run(environment.run_rollout(given, client, "policy", sampling_args={}))
    failed = result["error"]["error_chain_repr"] if result.get("error") else ""
    if failed and not any(words in failed for words in POLICY_ERRORS):
        sys.exit(f"verifiers ended the episode with an error: {' '.join(failed.split())}")
    if swallowed.first:
        sys.exit(swallowed.first)
    return {**result["metrics"], "reward": result["reward"]}


def main() -> None:
    """Write rows, or play the episode of SLIPSTREAM_ROW and print its reward."""
    parser = argparse.ArgumentParser()
    parser.add_argument("environment", help="a .py file, or a module of this interpreter")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="JSON: arguments of load_environment")
    parser.add_argument("--rows", help="a .parquet file to write instead")
    args = parser.parse_args()
    # What an environment prints must not follow the reward.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    environment = load(args.environment, args.kwargs)
    if args.rows:
        return write_rows(environment, args.rows)
    with open(os.environ["SLIPSTREAM_ROW"]) as file:
        row = json.load(file)
    print(json.dumps(play(environment, row)), file=out, flush=True)


if __name__ == "__main__":
    main()
