"""Contexts: the sequences, each a prompt and response tokens, that make up a row.

    row        response_ids  a1 a2 a3 b1 b2 c1 ...        one reward, one set of advantages
    contexts   prompt_ids a1 a2 a3 | prompt b1 b2 | prompt c1 ...

Most rows have one context: the prompt and the response of the row. If an episode summarises its past, drops a part of
it, or begins another conversation, the response continues after another prompt. Each such prompt, and the number of
response tokens that follow it, is in the row's column `contexts`. Models process contexts. Everything else works on
rows: groups, rewards, mini-batches, and the "sequences" of losses, of their aggregation and of the off-policy
correction. So an episode has the weight of one row, for any number of contexts.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.rows import flat


def unfold(table: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read the C contexts of R rows with N response tokens in all, as flat arrays.

    Returns:
        ids of prompt tokens, context after context, and offsets [C + 1] of the contexts in this array;
        ids of response tokens [N], and offsets [C + 1] of the contexts in this array;
        offsets [R + 1] of the rows in the contexts: row i has the contexts `offsets[i]:offsets[i + 1]`.

    Raises:
        ValueError: the numbers of tokens in `contexts` do not add up to the response, a context after the first has no
            prompt, or a response follows an empty prompt.
    """
    prompt_ids, prompt_offsets = flat(table, "prompt_ids")
    response_ids, response_offsets = flat(table, "response_ids")
    context_offsets = np.arange(len(table) + 1)
    listed = _lengths(table["contexts"].combine_chunks()) if "contexts" in table.column_names else np.zeros(1)
    if listed.any():
        prompts, tokens = _checked(table, listed, np.diff(response_offsets))
        counts = np.maximum(listed, 1)
        context_offsets = _offsets(counts)
        in_list = np.repeat(listed > 0, counts)
        further = np.ones(len(in_list), dtype=bool)
        further[context_offsets[:-1]] = False

        context_tokens = np.repeat(np.diff(response_offsets), counts)
        context_tokens[in_list] = tokens
        response_offsets = _offsets(context_tokens)

        prompt_lengths = np.zeros(len(in_list), dtype=np.int64)
        prompt_lengths[in_list] = _lengths(prompts)
        prompt_lengths[~further] = np.diff(prompt_offsets)
        prompt_offsets = _offsets(prompt_lengths)
        of_further = np.repeat(further, prompt_lengths)
        joined = np.empty(len(of_further), dtype=np.int32)
        joined[of_further] = prompts.flatten().to_numpy(zero_copy_only=False)
        joined[~of_further] = prompt_ids
        prompt_ids = joined
    orphan = (np.diff(prompt_offsets) == 0) & (np.diff(response_offsets) > 0)
    if orphan.any():
        row = int(np.searchsorted(context_offsets, np.flatnonzero(orphan)[0], side="right")) - 1
        raise ValueError(
            f"row {row} (uid {table['uid'][row].as_py()}) has an empty prompt, so the first token of its response "
            "cannot be predicted; the chat template must produce at least one token"
        )
    return prompt_ids, prompt_offsets, response_ids, response_offsets, context_offsets


def _checked(table: pa.Table, listed: np.ndarray, lengths: np.ndarray) -> tuple[pa.Array, np.ndarray]:
    """Read and check the column `contexts`, with K contexts in all.

    Args:
        table: the rows.
        listed: [R] number of contexts in each row's list.
        lengths: [R] number of response tokens of each row.

    Returns:
        prompts, a list array [K] of token ids (empty for the first context of a row), and the number of response tokens
        of each context, [K].

    Raises ValueError as `unfold` does.
    """
    contexts = table["contexts"].combine_chunks().flatten()
    prompts, tokens = contexts.field("prompt"), pc.fill_null(contexts.field("tokens"), -1).to_numpy()
    row = np.repeat(np.arange(len(listed)), listed)
    place = np.arange(len(row)) - np.repeat(_offsets(listed)[:-1], listed)
    has_prompt = _lengths(prompts) > 0

    def refuse(wrong: np.ndarray, sentence: str) -> None:
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            number, count = place[at] + 1, listed[row[at]]
            uid = table["uid"][int(row[at])].as_py()
            raise ValueError(f"row {row[at]} (uid {uid}), context {number} of {count}: {sentence.format(tokens[at])}")

    refuse((place == 0) & has_prompt, "it has a prompt of its own; the first context follows `prompt_ids`")
    refuse((place > 0) & ~has_prompt, "it has no prompt, so its first token cannot be predicted")
    refuse(tokens < 0, "it has {} response tokens; their number is at least 0, and null is none")
    totals = np.bincount(row, tokens, len(listed))
    wrong = np.flatnonzero((listed > 0) & (totals != lengths))
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"row {at} (uid {table['uid'][at].as_py()}) has {lengths[at]} response tokens, but {totals[at]:.0f} in its "
            f"{listed[at]} contexts; every token must belong to one context, in their order"
        )
    return prompts, tokens


def _lengths(array: pa.ListArray) -> np.ndarray:
    """[rows] number of entries of each list; 0 for null."""
    return pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])
