"""`chaos.json` and `chaos.md`: every kill and what came of it, and what was checked at the end."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.campaign import Strike
from tests.chaos.checks import Check


@dataclass
class Report:
    """All that is known of a run with kills."""

    command: list[str]
    """Of the driver."""
    seed: int
    iterations: int
    strikes: Sequence[Strike]
    events: Sequence[str]
    """What ended by itself."""
    elapsed_s: float
    twin_s: float | None
    """Seconds of the run without kills."""
    checks: list[Check] = field(default_factory=list)
    error: str | None = None
    """Why the script gave up."""

    @property
    def ok(self) -> bool:
        """Whether the run ended and all checks that judge are passed."""
        return self.error is None and all(check.ok is not False for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        content = asdict(self)
        del content["strikes"]
        return content | {"ok": self.ok, "kills": [strike.as_json() for strike in self.strikes]}

    def as_markdown(self) -> str:
        lines = [
            "| # | killed | in iteration | next one after | the one after it | done again | what happened |",
            "|--:|---|--:|--:|--:|--:|---|",
        ]
        for strike in self.strikes:
            killed = f"{strike.kind}{' (early)' if strike.early else ''}"
            times = f"{_seconds(strike.next_s)} | {_seconds(strike.second_s)} | {max(0, strike.again)}"
            lines.append(f"| {strike.number} | {killed} | {strike.iteration + 1} | {times} | {strike.told} |")
        lines += ["", *(f"- {sentence}" for sentence in self.summary()), ""]
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """Sentences."""
        kinds = len({strike.kind for strike in self.strikes})
        took = [strike.second_s for strike in self.strikes if strike.second_s is not None and not strike.early]
        told = [f"{len(self.strikes)} kills of {kinds} kinds in {self.elapsed_s:.0f} s (seed {self.seed})"]
        if self.twin_s is not None:
            told[0] += f"; the same run without kills took {self.twin_s:.0f} s"
        if took:
            told.append(
                f"two iterations after a kill were done within {statistics.median(took):.0f} s (median), "
                f"{max(took):.0f} s at most"
            )
        told += self.events
        told += [f"{_MARK[check.ok]} {check.name}: {check.sentence}" for check in self.checks]
        return told + ([f"FAILED: {self.error}"] if self.error else [])

    def write(self, folder: Path) -> None:
        (folder / "chaos.json").write_text(json.dumps(self.as_json(), indent=2) + "\n")
        (folder / "chaos.md").write_text(self.as_markdown())


_MARK = {True: "passed:", False: "FAILED:", None: "told:"}


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"
