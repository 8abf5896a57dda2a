"""What the train workers have published: the weights of each version, and which version is the current one.

Versions become current in their order, each when all ranks have published it. One that is to be validated stays current
until its validation has been recorded, so a validation is of the version that it names. Strictly on-policy none ever
waits: the rows that the next version is made from come after the validation.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.weights.load import Shard, checksum

POLICY = "policy"
CRITIC = "critic"
KL_COEFS_KEPT = 1000
"""Versions whose coefficients are known; no response is as old when it is scored."""


@dataclass(frozen=True)
class Ticket:
    """One model's weights of one version. For a chunk of prompts it is the permission to start."""

    version: int
    shards: list[Shard]


@dataclass
class Published:
    """One version."""

    validates: bool = False
    """Whether it stays current until it has been validated."""
    shards: dict[str, dict[int, Shard]] = field(default_factory=dict)
    """By model and rank."""
    checksum: int = 0
    """Of the policy."""
    stepped_at: float = 0.0

    def ranks(self) -> set[int]:
        return set(self.shards.get(POLICY, {}))


@dataclass
class _Validation:
    prompts: int | None = None
    """How many there are; None until the prompt stage has said."""
    recorded: set[str] = field(default_factory=set)
    """Those whose responses have been recorded."""

    @property
    def over(self) -> bool:
        return self.prompts is not None and len(self.recorded) >= self.prompts


class Versions:
    """The versions of one attempt.

    Args:
        max_staleness: for how many versions past its own an engine may still be loading one.
    """

    def __init__(self, max_staleness: int):
        self.current = -1
        self.world_size = 0
        self._max_staleness = max_staleness
        self._published: dict[int, Published] = {}
        self._validations: dict[int, _Validation] = defaultdict(_Validation)
        self._kl_coefs: dict[int, float] = {}

    def get(self, version: int) -> Published | None:
        """What is known of a version; None where nothing is, or nothing any more."""
        return self._published.get(version)

    def publish(
        self, version: int, shards: dict[str, Shard], stepped_at: float, kl_coef: float, validates: bool
    ) -> None:
        """One rank's part of a version; see `PolicyStore.publish`."""
        entry = self._published.setdefault(version, Published(validates))
        self._kl_coefs[version] = kl_coef
        self._kl_coefs.pop(version - KL_COEFS_KEPT, None)
        for model, shard in shards.items():
            entry.shards.setdefault(model, {})[shard.rank] = shard
        entry.stepped_at = max(entry.stepped_at, stepped_at)
        if self._complete(version):
            entry.checksum = checksum(list(entry.shards[POLICY].values()))
            self._advance()

    def announce(self, version: int, prompts: int) -> None:
        """`prompts` prompts validate `version`."""
        self._validations[version].prompts = prompts
        self._advance()

    def record(self, version: int, uids: Iterable[str]) -> None:
        """The validation of these prompts is recorded."""
        self._validations[version].recorded.update(uids)
        self._advance()

    def ticket(self, model: str) -> Ticket:
        """The current weights of `model`."""
        entry = self._published[self.current]
        if model not in entry.shards:
            raise ValueError(f"the train workers publish no {model}; they publish {', '.join(sorted(entry.shards))}")
        shards = entry.shards[model]
        return Ticket(self.current, [shards[rank] for rank in sorted(shards)])

    def kl_coef(self, version: int) -> float:
        """Coefficient of the KL in the reward that was published with a version.

        Raises:
            KeyError: the version is not known (any more).
        """
        return self._kl_coefs[version]

    def validated(self, version: int) -> bool:
        """Whether the version is current, or was, and nothing of its validation is missing."""
        return version < self.current or (version == self.current and not self._awaits_validation(version))

    def needs(self, version: int) -> str:
        """What a version that is not current yet waits for, in words."""
        if self._complete(version):
            return f"policy version {version}, which follows when version {self.current} has been validated"
        missing = sorted(set(range(self.world_size)) - self._published.get(version, Published()).ranks())
        ranks = f"train rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else "the train loop"
        return f"policy version {version} from {ranks} (current is {self.current})"

    def _complete(self, version: int) -> bool:
        entry = self._published.get(version)
        return entry is not None and 0 < self.world_size == len(entry.ranks())

    def _awaits_validation(self, version: int) -> bool:
        entry = self._published.get(version)
        return entry is not None and entry.validates and not self._validations[version].over

    def _advance(self) -> None:
        before = self.current
        for version in sorted(v for v in self._published if v > before):
            if not self._complete(version) or self._awaits_validation(self.current):
                break
            self.current = version
        if self.current == before:
            return
        for old in [v for v in self._published if v < self.current]:
            # An engine may still be loading it; its refs live on in the ticket.
            self._published[old].shards = {}
            if old < self.current - self._max_staleness - 1:
                del self._published[old]
        for old in [v for v in self._validations if v < self.current]:
            del self._validations[old]
