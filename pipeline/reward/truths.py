"""The check of ground truths for rules that use them, as rows are read instead of as responses are scored."""

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
    """The check of a row's ground truth, for rows whose response is run as a program."""

    agents: frozenset[str | None] = frozenset()
    """`agent_name` of the rows that rules score."""

    def applies(self, data_source: str, agent_name: str | None) -> bool:
        """Return whether the ground truth of such a row is checked."""
        return data_source in DATA_SOURCES and agent_name in self.agents

    def __call__(self, data_source: str, agent_name: str | None, ground_truth: Any) -> bool:
        """Return whether the ground truth holds assertions; refuse an unusable one.

        Raises:
            ValueError: a sentence with the reason, with `Refused` as its cause if assertions cannot be judged.
        """
        if not self.applies(data_source, agent_name):
            return False
        return any(isinstance(test.expected, Assertions) for test in truth.read(ground_truth))


def truth_check(config: RewardConfig, agent: AgentConfig) -> TruthCheck:
    """Make the check of a run with the sections `reward` and `agent`."""
    if all(function.path is not None for function in functions(config)):
        return TruthCheck()
    return TruthCheck(frozenset(name for name, one in agent.agents().items() if one.scored_by != "environment"))
