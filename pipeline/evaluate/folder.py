"""The folder of an evaluation.

    OUT/evaluation.json                 what is evaluated: settings, and size and date of every local file that counts
    OUT/responses/part-NNNNNN.parquet   all responses to the prompts of one chunk
    OUT/metrics.json, OUT/table.csv     the result

A part is named after its chunk and is complete as soon as it has that name, so an interrupted evaluation is continued
with the chunks that are missing. Other settings, another model under the same path and changed prompt files are
refused.
"""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import Config, ConfigError
from pipeline.evaluate.settings import result_settings
from pipeline.evaluate.summary import COLUMNS, OF_EPISODES, Summary

DESCRIPTION = "evaluation.json"
MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.bin")

LEFT_OUT = (
    *("split", "chunk", "iteration", "epoch", "prompt_index"),
    *("response_mask", "policy_version", "version_runs", "load_s", "kl_coef"),
)
"""Columns of a row that say nothing outside a run."""


def described(config: Config, files: Iterable[str]) -> dict[str, Any]:
    """What is evaluated, in JSON's types: settings and prompt files."""
    prompt_files = list(files)
    functions = [config.reward.custom_reward_function.path]
    functions += [settings.get("path") for settings in config.reward.functions.values()]
    names = [*prompt_files, *(path for path in functions if path)]
    for agent in config.agent.declared().values():
        for name in (agent.environment, agent.program, *agent.tools, *agent.command):
            names += [name, name.rpartition(":")[0], *name.split()] if name else []
    for folder in (config.model.path, config.model.tokenizer_path, config.reward.model.path):
        if folder and Path(folder).is_dir():
            names += [str(path) for pattern in MODEL_FILES for path in sorted(Path(folder).glob(pattern))]
    description = {
        "prompt_files": prompt_files,
        "settings": result_settings(config),
        "files": {name: _stamp(name) for name in names if os.path.isfile(name)},
    }
    return json.loads(json.dumps(description, default=str))


def digest(description: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits that identify a description."""
    return hashlib.blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=4).hexdigest()


class Folder:
    """The folder at `path`; it need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.responses = path / "responses"

    def check(self, description: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the folder cannot be written, or holds something else or another evaluation."""
        nearest = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            reason = "is not writable" if nearest.is_dir() else "is a file"
            raise ConfigError(f"the evaluation cannot be kept in {self.path}: {nearest} {reason}; choose another --out")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if not (self.path / DESCRIPTION).is_file():
            raise ConfigError(f"{self.path} is not empty and holds no {DESCRIPTION}; choose another --out")
        known = json.loads((self.path / DESCRIPTION).read_text(encoding="utf-8"))
        if differences := list(_differences(known, description)):
            raise ConfigError(
                f"{self.path} already holds another evaluation: {', '.join(differences)}; choose another --out or "
                "delete it"
            )

    def begin(self, description: Mapping[str, Any]) -> None:
        """Make the folder."""
        self.responses.mkdir(parents=True, exist_ok=True)
        self._write(DESCRIPTION, json.dumps(description, indent=2) + "\n")

    def parts(self) -> dict[int, Path]:
        """Files of the chunks that are done, by the chunk's number, in order."""
        paths = sorted(self.responses.glob("part-*.parquet"))
        return {int(path.stem.removeprefix("part-")): path for path in paths}

    def read(self, summary: Summary) -> frozenset[int]:
        """Add the responses that are there to `summary`; returns the numbers of their chunks."""
        parts = self.parts()
        for path in parts.values():
            there = [name for name in OF_EPISODES if name in pq.read_schema(path).names]
            summary.add(pq.read_table(path, columns=[*COLUMNS, *there], partitioning=None))
        return frozenset(parts)

    def result(self) -> dict[str, Any]:
        """The content of `metrics.json`; empty if there is none, or if parts have come or gone since."""
        path = self.path / "metrics.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return known if known.get("parts") == len(self.parts()) else {}

    def add(self, chunk: int, rows: pa.Table) -> None:
        """Keep the responses of a chunk."""
        path = self.responses / f"part-{chunk:06d}.parquet"
        unfinished = path.with_name(f".{path.name}.tmp")
        kept = rows.drop_columns([name for name in LEFT_OUT if name in rows.column_names])
        pq.write_table(kept, unfinished, compression="zstd")
        unfinished.replace(path)

    def report(self, metrics: Mapping[str, Any], table: Iterable[Mapping[str, Any]]) -> list[Path]:
        """Write the result; returns its files."""
        rows = list(table)
        names = list(dict.fromkeys(name for row in rows for name in row))
        self._write("metrics.json", json.dumps(metrics, indent=2) + "\n")
        lines = io.StringIO(newline="")
        writer = csv.DictWriter(lines, names)
        writer.writeheader()
        writer.writerows(rows)
        self._write("table.csv", lines.getvalue())
        return [self.path / "metrics.json", self.path / "table.csv"]

    def _write(self, name: str, text: str) -> None:
        unfinished = self.path / f".{name}.tmp"
        unfinished.write_text(text, encoding="utf-8", newline="")
        unfinished.replace(self.path / name)


def _stamp(path: str) -> str:
    status = os.stat(path)
    return f"{status.st_size} bytes of {status.st_mtime_ns}"


def _differences(known: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    if known["prompt_files"] != now["prompt_files"]:
        yield f"{len(now['prompt_files'])} other prompt files"
    for key in now["settings"]:
        if (old := known["settings"].get(key)) != (new := now["settings"][key]):
            yield f"{key} ({old} there, {new} now)"
    for name in sorted({*known["files"], *now["files"]}):
        if known["files"].get(name) != now["files"].get(name):
            yield f"the file {name} has changed"
