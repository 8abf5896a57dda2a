"""The published policy versions, references to their weights, and the number of the current one.

Versions become current in order, each as soon as all ranks have published it. A version that will be validated stays
current until its validation is recorded, so all responses of the validation come from its weights. In a strictly
on-policy run this delays no version: the rows that train the next version follow the validation rows in the stream.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.greeting import GreetingPlan
from pipeline.weights.load import Shard, checksum

POLICY = "policy"
CRITIC = "critic"
KL_COEFS_KEPT = 1000
"""Number of newest versions whose KL coefficients are kept. No row in the advantage stage is from an older version."""


@dataclass(frozen=True)
class Ticket:
    """References to the weights of one model at one version. A ticket from `admit` also permits a chunk to start."""

    version: int
    shards: list[Shard]
    """One shard per train rank, by rank."""
    greeting: GreetingPlan | None = None
    """Rows that the engine must generate for the handshake, which compares log-probs of engine and trainer; None if
    none are needed."""


@dataclass
class Published:
    """The shards of one version that train ranks have published so far."""

    validates: bool = False
    """True if the version stays current until it has been validated."""
    shards: dict[str, dict[int, Shard]] = field(default_factory=dict)
    """Model to rank to shard."""
    checksum: int = 0
    """Checksum of the policy's weights."""
    stepped_at: float = 0.0
    """Wall-clock time at which the last rank's optimiser step ended."""

    def ranks(self) -> set[int]:
        return set(self.shards.get(POLICY, {}))


@dataclass
class _Validation:
    prompts: int | None = None
    """Number of validation prompts; None until the prompt stage has announced it."""
    recorded: set[str] = field(default_factory=set)
    """`uid` of each prompt whose scores have been recorded."""

    @property
    def over(self) -> bool:
        return self.prompts is not None and len(self.recorded) >= self.prompts


class Versions:
    """The versions of one attempt.

    Args:
        max_staleness: largest number of versions by which an engine's version may be older than the current one.
    """

    def __init__(self, max_staleness: int):
        self.current = -1
        self.world_size = 0
        self._max_staleness = max_staleness
        self._published: dict[int, Published] = {}
        self._validations: dict[int, _Validation] = defaultdict(_Validation)
        self._kl_coefs: dict[int, float] = {}

    def get(self, version: int) -> Published | None:
        """Return the entry of a version; None if no rank has published it, or it is already deleted."""
        return self._published.get(version)

    def publish(
        self, version: int, shards: dict[str, Shard], stepped_at: float, kl_coef: float, validates: bool
    ) -> None:
        """Add one rank's part of a version; see `PolicyStore.publish`."""
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
        """Record that `version` will be validated on `prompts` prompts."""
        self._validations[version].prompts = prompts
        self._advance()

    def record(self, version: int, uids: Iterable[str]) -> None:
        """Record that the scores of these validation prompts, given by `uid`, are recorded."""
        self._validations[version].recorded.update(uids)
        self._advance()

    def ticket(self, model: str, greeting: GreetingPlan | None = None) -> Ticket:
        """Return the current weights of `model`, and pass on the request for the handshake's rows, `greeting`."""
        entry = self._published[self.current]
        if model not in entry.shards:
            raise ValueError(f"the train workers publish no {model}; they publish {', '.join(sorted(entry.shards))}")
        shards = entry.shards[model]
        return Ticket(self.current, [shards[rank] for rank in sorted(shards)], greeting)

    def kl_coef(self, version: int) -> float:
        """Return the KL coefficient of the reward that was published with `version`.

        Raises:
            KeyError: the version is not known yet, or already deleted.
        """
        return self._kl_coefs[version]

    def validated(self, version: int) -> bool:
        """Return whether `version` is or was current, and its validation is completely recorded, if it has one."""
        return version < self.current or (version == self.current and not self._awaits_validation(version))

    def needs(self, version: int) -> str:
        """Describe, as a clause for errors, the event without which `version` cannot become current."""
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
            # An engine may still be loading it, from the refs in its ticket.
            self._published[old].shards = {}
            if old < self.current - self._max_staleness - 1:
                del self._published[old]
        for old in [v for v in self._validations if v < self.current]:
            del self._validations[old]
