"""The policy store of a run with dynamic sampling: it also keeps the account of kept and dropped groups (`groups.py`).

prompt source `open_page(page, chunk)` -> version         as `pace`; over once the last iteration is trained
              `set_batch(batch, state)`                   where the prompts of a batch begin
engine        `admit(chunk)` -> ticket                    None once the last iteration is trained
filter        `filtered(chunk, found)` -> verdict         drops groups, and so admits others
"""

from collections.abc import Callable
from typing import Any

from pipeline.admission import Admission
from pipeline.groups import Found, Groups, Opening, Verdict
from pipeline.published import POLICY, Ticket
from pipeline.store import PolicyStore


class DynamicStore(PolicyStore):
    """`PolicyStore` for an admission with `dynamic` set."""

    def __init__(self, admission: Admission, first: Callable[[], int] = int):
        super().__init__(admission, first)
        self._groups: Groups | None = None

    async def new_generation(self) -> int:
        self._groups = None
        return await super().new_generation()

    async def begin(self, generation: int, version: int, world_size: int, start: Any) -> None:
        self._check(generation)
        admission = self.admission
        assert admission.dynamic is not None
        # Before anybody who waits for `begin` goes on.
        self._groups = Groups(admission.dynamic, admission.chunk_prompts, admission.train_batch_size, version)
        await super().begin(generation, version, world_size, start)

    async def admit(  # type: ignore[override]
        self, generation: int, chunk: int, timeout: float, engine: str = ""
    ) -> Ticket | None:
        """Wait until the chunk may start; None if it never will, because all iterations have their groups."""

        def ready() -> bool:
            groups = self._groups
            if groups is None or groups.filled:
                # Not only when the last iteration is trained: that may wait for a validation behind this chunk.
                return groups is not None
            return self.version >= self._needed(chunk) and not groups.needless(chunk)

        await self._wait(generation, ready, timeout, "admission", lambda: self._versions.needs(self._needed(chunk)))
        assert self._groups is not None
        return None if self._groups.filled else self._versions.ticket(POLICY)

    async def filtered(self, generation: int, chunk: int, found: Found) -> Verdict:
        """What becomes of the kept groups of a chunk; what is dropped admits replacements. A chunk counts once."""
        async with self._changed:
            groups = self._account(generation)
            known, before = groups.settled(chunk), groups.dropped
            verdict = groups.settle(chunk, found)
            new = groups.dropped - before
            if verdict.full and not known:
                self._mailbox.post("prompts", iteration=verdict.iteration, metrics=groups.metrics(verdict, chunk))
            groups.forget(self.version)
        await self.drop(generation, new)
        return verdict

    async def open_page(self, generation: int, page: int, chunk: int, lookahead: int, timeout: float) -> Opening:
        """Hold the prompt source until chunk `chunk` of a page is at most `lookahead` versions from admission."""

        def ready() -> bool:
            groups = self._groups
            if groups is None or self.version < self.base:
                return False
            known = groups.opened(page) or groups.over(self.version)
            return known or self.version + lookahead >= self._needed(chunk)

        await self._wait(
            generation, ready, timeout, "pace", lambda: self._versions.needs(self._needed(chunk) - lookahead)
        )
        return self._account(generation).open(page, self.version)

    async def set_batch(self, generation: int, batch: int, number: int, state: Any, counts: dict[str, int]) -> None:
        """The prompts of a batch of this generation, the run's `number`th, begin at `state` of the source."""
        self._account(generation).set_batch(batch, number, state, counts)

    async def batch_state(self, generation: int, batch: int) -> Any:
        """Where the prompts of a batch begin.

        Raises:
            KeyError: it is not known (any more).
        """
        return self._start if batch == 0 else self._account(generation).batch_state(batch)

    async def position(self, generation: int, iteration: int) -> Any:
        self._check(generation)
        return self._start if iteration == self.base else self._account(generation).end_of(iteration)

    def _account(self, generation: int) -> Groups:
        self._check(generation)
        assert self._groups is not None, "the train loop has not begun"
        return self._groups
