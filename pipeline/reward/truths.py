"""Check the ground truths of rows for the sandbox when rows are read, not only when responses are scored."""

from dataclasses import dataclass
from typing import Any

from pipeline.config.agent import AgentConfig
from pipeline.config.reward import RewardConfig
from pipeline.reward.functions import functions
from pipeline.reward.sandbox import truth
from pipeline.reward.sandbox.grammar import Assertions
from pipeline.reward.sandbox.rule import DATA_SOURCES


@dataclass(frozen=True)
class TruthCheck:
    """Checks the ground truth of rows with responses that the sandbox runs as programs."""

    agents: frozenset[str | None] = frozenset()
    """Values of `agent_name` for which built-in rules score the rows."""

    def applies(self, data_source: str, agent_name: str | None) -> bool:
        """Return True if the ground truth of a row with these columns is checked."""
        return data_source in DATA_SOURCES and agent_name in self.agents

    def __call__(self, data_source: str, agent_name: str | None, ground_truth: Any) -> bool:
        """Check the ground truth of a row. Returns True if it holds assertions (Python code with `assert`).

        Raises:
            ValueError: the ground truth cannot be used. The exception's cause is `Refused` if it holds assertions that
                cannot be judged.
        """
        if not self.applies(data_source, agent_name):
            return False
        return any(isinstance(test.expected, Assertions) for test in truth.read(ground_truth))


def truth_check(config: RewardConfig, agent: AgentConfig) -> TruthCheck:
    """Return the check of ground truths for a run with these sections `reward` and `agent`."""
    if all(function.path is not None for function in functions(config)):
        return TruthCheck()
    return TruthCheck(frozenset(name for name, one in agent.agents().items() if one.scored_by != "environment"))
