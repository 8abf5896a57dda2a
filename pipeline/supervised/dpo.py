"""The train worker of `jobs.dpo`: preference learning (DPO, IPO, ...) on a fixed data set of pairs.

1. The reference policy is the start model. Before the first step the policy equals it, so a first pass over all rows
   computes the reference's log-probs, and no second model is ever loaded. Every rank keeps them for all rows, two
   numbers per pair, because in each epoch rows come in another order and to other ranks. A frozen copy of the model
   would give the same numbers, but would need the memory of a second model and another pass in every epoch.
2. Both answers of a pair run in one forward pass, after one copy of their prompt (`models/sharing.py`).
3. The loss is the mean over the pairs of the global batch (`loop.py`).
"""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.preference import DPOConfig
from pipeline.losses.preference import PreferenceInput, checked, get_preference_loss
from pipeline.models.batch import TokenBatch, ranges
from pipeline.models.packing import pack
from pipeline.models.policy import Policy, load_policy
from pipeline.models.sharing import Passes, share_prefixes
from pipeline.rows import flat
from pipeline.store.events import Noted
from pipeline.supervised.dpo_data import CHOSEN, REJECTED, SIDES, DPOEncoder
from pipeline.supervised.loop import SupervisedLoop, WorkerSettings

SUMS = ("loss", "rows", CHOSEN, REJECTED, "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp", "correct")
"""Names of the sums over a micro-batch: losses; number of kept rows; number of answers, sum of rewards and sum of
log-probs of each side; and number of pairs whose chosen answer has the larger reward."""


class AnswerBatch(NamedTuple):
    """The C answers, chosen and rejected, in the rows of a table, as flat arrays."""

    tokens: TokenBatch
    """The answers as contexts: each a prompt, and the answer as the response; N answer tokens in all."""
    learnt: np.ndarray
    """[N] bool, true for tokens that train (tokens of the assistant)."""
    row: np.ndarray
    """[C] int64, ascending, number of the row in the table that each answer belongs to."""
    side: np.ndarray
    """[C] int64, 0 for a chosen answer, 1 for a rejected one (index in `SIDES`)."""

    @classmethod
    def of(cls, table: pa.Table) -> "AnswerBatch":
        """Collect the answers of both sides from encoded rows, row by row. Answers without tokens are left out."""
        prompts, prompt_offsets = flat(table, "prompt_ids")
        ids, offsets = zip(*(flat(table, f"{side}_ids") for side in SIDES), strict=True)
        masks = [flat(table, f"{side}_mask")[0] for side in SIDES]
        counts = np.stack([np.diff(ends) for ends in offsets], axis=1)
        row, side = np.nonzero(counts)
        base = np.cumsum([0, *(len(values) for values in ids[:-1])])
        starts = np.stack([ends[:-1] for ends in offsets], axis=1) + base
        index = ranges(starts[row, side], counts[row, side])
        prompt_counts = np.diff(prompt_offsets)[row]
        tokens = TokenBatch(
            prompts[ranges(prompt_offsets[row], prompt_counts)],
            np.concatenate([[0], np.cumsum(prompt_counts)]),
            np.concatenate(ids)[index],
            np.concatenate([[0], np.cumsum(counts[row, side])]),
            np.arange(len(row) + 1),
        )
        return cls(tokens, np.concatenate(masks)[index] > 0, row, side)

    def of_row(self, rows: int) -> list[list[int]]:
        """Return the numbers of the answers in each of the table's `rows` rows."""
        ends = np.searchsorted(self.row, np.arange(rows + 1))
        return [list(range(ends[row], ends[row + 1])) for row in range(rows)]


class DPOLoop(SupervisedLoop[DPOConfig]):
    """The train loop of one train worker of `jobs.dpo`."""

    encoder = DPOEncoder
    measured = SUMS
    first_pass = True

    def __init__(self, settings: WorkerSettings[DPOConfig]) -> None:
        self.loss = get_preference_loss(settings.config.loss.type)
        self._dropped = 0.0
        super().__init__(settings)

    def load(self) -> Policy:
        policy = load_policy(self.config.model, mesh=self.mesh, longest=self.config.data.max_length)
        self._shared = Passes.of(policy, self.config.model.share_prompts).shared
        return policy

    def run(self) -> None:
        """Compute the reference's log-probs of all rows, then train."""
        self.keep_reference()
        self.rows = self.open("train")
        super().run()

    # The reference.

    def keep_reference(self) -> None:
        """Compute and keep the reference's log-probs of both answers of every row, with the untrained policy.

        Reads the data set of the first pass. A collective. Sets `self.reference`, [rows, 2] by row number, NaN for rows
        that the pass did not have.
        """
        numbers, scores = [np.zeros(0, dtype=np.int64)], [np.zeros((0, len(SIDES)))]
        if self.rank == 0:
            self._tell(Noted("computing the log-probs of the start model"))
        while (table := self.rows.next("rows for the reference")) is not None:
            numbers.append(table["row"].to_numpy())
            scores.append(self.score(table))
        row = torch.from_numpy(np.concatenate(numbers)).to(self.device)
        size = int(self._reduce(int(row.max()) + 1 if len(row) else 0, dist.ReduceOp.MAX))
        found = torch.from_numpy(np.concatenate(scores)).to(self.device)
        # If the last batch begins the next epoch, a row comes twice.
        times = found.new_zeros(size, 1).index_add_(0, row, found.new_ones(len(row), 1))
        sums = found.new_zeros(size, found.shape[1]).index_add_(0, row, found)
        dist.all_reduce(times)
        dist.all_reduce(sums)
        self.reference = (sums / times).cpu().numpy()  # NaN for a row that never came
        if self.val_rows is not None:
            self.val_rows = self._with_reference(self.val_rows, self.score(self.val_rows))

    @torch.no_grad()
    def score(self, table: pa.Table) -> np.ndarray:
        """[R, 2] float64, log-prob of the chosen and the rejected answer of each row under the current policy.

        A log-prob is the sum over the answer's tokens, in nats; 0 for a row that was left out. A collective.
        """
        self.model.eval()
        scores = np.zeros((len(table), len(SIDES)))
        for index in self.micro_batches(self.lengths(table)):
            answers, log_probs, _ = self._forward(table.take(pa.array(index, pa.int64())))
            scores[np.asarray(index, dtype=np.int64)[answers.row], answers.side] = log_probs.cpu().numpy()
        return scores

    def _with_reference(self, table: pa.Table, scores: np.ndarray) -> pa.Table:
        for number, side in enumerate(SIDES):
            table = table.append_column(f"ref_{side}", pa.array(scores[:, number]))
        return table

    # The update.

    def step(self, table: pa.Table) -> dict[str, float]:
        """Take one optimiser step on the rows of `table`; a collective.

        Returns the metrics of the global batch. `dropped` is the number of rows left out so far in the run.
        """
        row = table["row"].to_numpy()
        scores = self.reference[row[row < len(self.reference)]]
        if len(scores) < len(row) or not np.isfinite(scores).all():
            raise RuntimeError("a row came that the first pass did not have; did a file change while it was read?")
        metrics = super().step(self._with_reference(table, scores))
        self._dropped += metrics["dropped"]
        return metrics | {"dropped": self._dropped}

    def state(self) -> dict[str, Any]:
        return {"dropped": self._dropped}

    def load_state(self, state: dict[str, Any]) -> None:
        self._dropped = state["dropped"]

    def count(self, table: pa.Table) -> int:
        return int(np.count_nonzero(np.diff(flat(table, f"{CHOSEN}_ids")[1])))

    def sums(self, table: pa.Table, index: list[int]) -> Tensor:
        config = self.config.loss
        part = table.take(pa.array(index, pa.int64()))
        answers, log_probs, tokens = self._forward(part)
        chosen, rejected = (torch.from_numpy(np.flatnonzero(answers.side == side)).to(self.device) for side in (0, 1))
        columns = np.stack([part[f"ref_{side}"].to_numpy() for side in SIDES], axis=1)
        ratios = log_probs - torch.from_numpy(columns[answers.row, answers.side]).to(self.device)
        data = PreferenceInput(
            chosen=ratios[chosen],
            rejected=ratios[rejected],
            chosen_tokens=tokens[chosen],
            rejected_tokens=tokens[rejected],
        )
        loss = checked(self.loss, data, self.loss.function(data, config)).sum()
        counts = loss.new_tensor([len(np.unique(answers.row)), len(chosen), len(rejected)])
        values = (
            *(config.beta * data.chosen, config.beta * data.rejected),
            *(log_probs[chosen], log_probs[rejected], _correct(data)),
        )
        return torch.cat([loss[None], counts, torch.stack([value.detach().sum() for value in values])])

    def means(self, sums: list[float], total: float, rows: int) -> dict[str, float]:
        """Compute the metrics of a batch. Means over no rows are left out.

        Args:
            sums: the `SUMS` over all ranks.
            total: number of kept pairs, over all ranks.
            rows: number of rows, over all ranks.
        """
        found = dict(zip(SUMS, sums, strict=True))
        metrics = {"loss": found["loss"] / total} if total else {}
        for side in SIDES:
            if found[side]:
                metrics[f"rewards/{side}"] = found[f"{side}_reward"] / found[side]
                metrics[f"logps/{side}"] = found[f"{side}_logp"] / found[side]
        if found[CHOSEN] and found[REJECTED]:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        if total:
            metrics["rewards/accuracies"] = found["correct"] / total
        return metrics | {"dropped": rows - found["rows"]}

    def save(self) -> None:
        """Save the model and its tokenizer.

        Raises:
            RuntimeError: every row was left out.
        """
        self.check_kept(self._dropped, "rows")
        super().save()

    # The forward pass.

    def _packs(self, answers: AnswerBatch, members: list[int]) -> list[list[int]]:
        """Group the answers of one row into packs: a single pack if they share one copy of their prompt.

        Args:
            answers: the answers of all rows.
            members: numbers of the row's answers in `answers`.
        """
        return share_prefixes(answers.tokens, members, self.config.trainer.max_token_len_per_gpu, self._shared)

    def lengths(self, table: pa.Table) -> list[int]:
        """Return the number of tokens of each row in a micro-batch, both answers counted. If rows are padded, padding
        counts as in a micro-batch in which the row is the longest."""
        answers = AnswerBatch.of(table)
        lengths = []
        for members in answers.of_row(len(table)):
            of_packs = answers.tokens.pack_lengths(self._packs(answers, members))
            lengths.append(sum(of_packs) if self.packed else len(of_packs) * max(of_packs, default=0))
        return lengths

    def _forward(self, part: pa.Table) -> tuple[AnswerBatch, Tensor, Tensor]:
        """Run the policy on the rows `part`, one micro-batch.

        Returns the C answers; [C] float64, the sum of the log-probs of each answer's tokens of the assistant; and [C],
        the number of these tokens.
        """
        answers = AnswerBatch.of(part)
        packs = [one for members in answers.of_row(len(part)) for one in self._packs(answers, members)]
        inputs = pack(answers.tokens, packs, read=answers.learnt, packed=self.packed).to(self.device)
        log_probs = self.model(
            inputs.input_ids,
            inputs.logit_index,
            inputs.targets,
            chunk_tokens=self.config.trainer.logits_chunk_tokens,
            positions=inputs.positions,
            packing=inputs.packing,
        )[0].double()
        count = len(answers.row)
        totals = log_probs.new_zeros(count).index_add(0, inputs.row_index, log_probs)
        return answers, totals, torch.bincount(inputs.row_index, minlength=count)


def _correct(data: PreferenceInput) -> Tensor:
    """[C] 1 for each pair whose chosen answer has the larger reward, 0.5 if the rewards are equal, else 0."""
    return (torch.sign((data.chosen - data.rejected).detach()) + 1) / 2
