"""Check before anything starts that the sandbox can judge the assertions (tests) in the ground truths of all rows.

Rows with other assertions are counted here. They are refused, or left out, when the run reads them (`encode.py`).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from pipeline import cells
from pipeline.prompts.encode import ground_truth_of, structured
from pipeline.prompts.loader import PromptLoader
from pipeline.prompts.parquet import Place, PromptFile, Slice
from pipeline.reward.sandbox.forms import Refused
from pipeline.reward.truths import TruthCheck

COLUMNS = ["data_source", "agent_name", "reward_model.ground_truth"]
MOST_FORMS = 8  # number of forms that the sentence names


def check_assertions(loaders: Iterable[PromptLoader], check: TruthCheck, most: int) -> str:
    """Count the rows with assertions that the sandbox cannot judge.

    Args:
        loaders: loaders of all training and validation files.
        check: check of one ground truth.
        most: `data.max_bad_rows`.

    Returns:
        a sentence about the rows that the run will leave out; "" if all assertions can be judged.

    Raises:
        ValueError: more than `most` rows cannot be judged. The text names the forms of assertion, and the first such
            row with the reason.
        OSError: a file cannot be read.
    """
    forms: Counter[str] = Counter()
    with_assertions, first = 0, ""
    for file, place, values in itertools.chain.from_iterable(_candidates(loader, check) for loader in loaders):
        try:
            truth = ground_truth_of(structured(values, "reward_model"))
            with_assertions += check(values["data_source"], values.get("agent_name"), truth)
        except ValueError as error:
            # Other errors of the row are reported when the run reads it.
            if isinstance(error.__cause__, Refused):
                with_assertions += 1
                forms[error.__cause__.form] += 1
                first = first or f"{file.key}: {place}: {error}"
    refused = forms.total()
    if not refused:
        return ""
    shown = ", ".join(f"{form} ({count})" for form, count in forms.most_common(MOST_FORMS))
    more = f" and {len(forms) - MOST_FORMS} other forms" if len(forms) > MOST_FORMS else ""
    counted = f"{refused} of {with_assertions} rows' assertions cannot be judged: {shown}{more}"
    if refused <= most:
        return f"{counted}; they are set aside (data.max_bad_rows={most})"
    raise ValueError(
        f"{counted}. The first: {first}. Leave these rows out, or have them set aside with data.max_bad_rows={refused}"
    )


def _candidates(loader: PromptLoader, check: TruthCheck) -> Iterator[tuple[PromptFile, Place, dict[str, Any]]]:
    """Yield (file, place, columns) for each row that `check` applies to.

    Row groups without such rows are not read, apart from the columns `data_source` and `agent_name`.
    """
    left = loader.epoch_rows
    for file in loader.files:
        for group, group_rows in enumerate(file.row_groups):
            part = Slice(group, 0, min(left, group_rows))
            left -= part.rows
            if part.rows and _applies(file, part, check):
                for read, batch in file.read([part], COLUMNS):
                    for row, values in enumerate(cells.values(batch)):
                        if check.applies(values["data_source"], values.get("agent_name")):
                            yield file, file.place(group, read.start + row), values


def _applies(file: PromptFile, part: Slice, check: TruthCheck) -> bool:
    """Return True if `check` applies to at least one row of `part`."""
    batches = (batch.to_pylist() for _, batch in file.read([part], COLUMNS[:2]))
    return any(check.applies(row["data_source"], row.get("agent_name")) for rows in batches for row in rows)
