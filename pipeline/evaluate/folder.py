"""The folder of an evaluation.

    OUT/evaluation.json                 the description: settings, and fingerprints of all files that count
    OUT/responses/part-NNNNNN.parquet   all responses to the prompts of one chunk
    OUT/metrics.json, OUT/table.csv     the result

A part is named after its chunk and is complete as soon as it has that name, so an interrupted evaluation continues with
the missing chunks. Other settings, another model under the same path, changed prompt files and changed code are
refused; files may have moved.
"""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import Config, ConfigError
from pipeline.config.schema import keys
from pipeline.config.trainer import FILES
from pipeline.errors import short_reason
from pipeline.evaluate.settings import result_settings
from pipeline.evaluate.summary import COLUMNS, OF_EPISODES, Summary
from pipeline.rows import images_once
from pipeline.run.inputs import fingerprints
from pipeline.storage.fingerprints import Fingerprints
from pipeline.storage.moved import names
from pipeline.storage.resume import same_files

DESCRIPTION = "evaluation.json"

LEFT_OUT = (
    *("split", "chunk", "iteration", "epoch", "prompt_index"),
    *("response_mask", "policy_version", "version_runs", "load_s", "kl_coef"),
)
"""Columns of a row that mean nothing outside a run, and are not stored."""


def described(config: Config, files: Iterable[str]) -> dict[str, Any]:
    """Describe an evaluation as JSON data: the settings, and fingerprints of the files that they name."""
    made = fingerprints(config)
    description = {
        "prompt_files": list(files),
        "settings": result_settings(config),
        "files": {kind: made.of(kind) for kind in FILES},
    }
    return json.loads(json.dumps(description, default=str))


def digest(description: Mapping[str, Any]) -> str:
    """Hash a description to eight hexadecimal digits, independent of where its files are."""
    known = _known(description)
    settings = {key: names(value) for key, value in description["settings"].items() if not known.compares(key)}
    # Rows come in the order of their files.
    files = {kind: list(known.of(kind).items()) for kind in FILES}
    return hashlib.blake2b(json.dumps([settings, files]).encode(), digest_size=4).hexdigest()


class Folder:
    """The folder of an evaluation at `path`; it need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.responses = path / "responses"

    def check(self, description: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the folder cannot be written, or holds other files or another evaluation."""
        nearest = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            reason = "is not writable" if nearest.is_dir() else "is a file"
            raise ConfigError(f"the evaluation cannot be kept in {self.path}: {nearest} {reason}; choose another --out")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if not (self.path / DESCRIPTION).is_file():
            raise ConfigError(f"{self.path} is not empty and holds no {DESCRIPTION}; choose another --out")
        try:
            known = json.loads((self.path / DESCRIPTION).read_text(encoding="utf-8"))
            kinds, _ = set(known["files"]), known["settings"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.path / DESCRIPTION} is damaged ({short_reason(error)}); choose another --out or delete "
                f"{self.path}"
            ) from error
        if kinds != set(FILES):
            raise ConfigError(
                f"{self.path} holds an evaluation of an earlier version, which cannot be continued; choose another "
                "--out or delete it"
            )
        if differences := list(_differences(known, description)):
            raise ConfigError(
                f"{self.path} already holds another evaluation: {', '.join(differences)}; choose another --out or "
                "delete it"
            )

    def begin(self, description: Mapping[str, Any]) -> None:
        """Create the folder and write the description."""
        self.responses.mkdir(parents=True, exist_ok=True)
        self._write(DESCRIPTION, json.dumps(description, indent=2) + "\n")

    def parts(self) -> dict[int, Path]:
        """Return the files of the finished chunks, by number of the chunk, in order."""
        paths = sorted(self.responses.glob("part-*.parquet"))
        return {int(path.stem.removeprefix("part-")): path for path in paths}

    def read(self, summary: Summary) -> frozenset[int]:
        """Add the stored responses to `summary`; returns the numbers of their chunks.

        Raises:
            ConfigError: a file cannot be read.
        """
        parts = self.parts()
        for path in parts.values():
            try:
                there = [name for name in OF_EPISODES if name in pq.read_schema(path).names]
                rows = pq.read_table(path, columns=[*COLUMNS, *there], partitioning=None)
            except (OSError, pa.ArrowException) as error:
                raise ConfigError(
                    f"{path} is damaged ({short_reason(error)}); delete it, and the same command answers its "
                    "prompts again"
                ) from error
            summary.add(rows)
        return frozenset(parts)

    def result(self) -> dict[str, Any]:
        """Read `metrics.json`. Returns an empty dict if there is none, or if the number of parts has changed since."""
        path = self.path / "metrics.json"
        try:
            known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError:
            # A damaged file is written once more.
            known = {}
        return known if known.get("parts") == len(self.parts()) else {}

    def add(self, chunk: int, rows: pa.Table) -> None:
        """Store the responses of a chunk."""
        path = self.responses / f"part-{chunk:06d}.parquet"
        unfinished = path.with_name(f".{path.name}.tmp")
        kept = images_once(rows).drop_columns([name for name in LEFT_OUT if name in rows.column_names])
        pq.write_table(kept, unfinished, compression="zstd")
        unfinished.replace(path)

    def report(self, metrics: Mapping[str, Any], table: Iterable[Mapping[str, Any]]) -> list[Path]:
        """Write `metrics.json` and `table.csv`; returns their paths."""
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


def _known(description: Mapping[str, Any]) -> Fingerprints:
    return Fingerprints(**description["files"])


def _differences(known: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    marks = _known(known)
    for key, value in now["settings"].items():
        # A description of an older version may lack the key.
        old = known["settings"].get(key, keys(Config)[key].default)
        if old != value and not same_files(key, old, value, marks):
            yield f"{key} ({old} there, {value} now)"
    for kind in FILES:
        for setting, text in marks.changes(_known(now), kind).items():
            yield f"{setting}: {text}"
