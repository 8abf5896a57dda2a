"""Whether everything that belongs to a run is recorded, once."""

from collections import Counter
from pathlib import Path

from tests.chaos.checks import Recorded, check


def account(run_dir: Path, iterations: int, prompts: int, batch: int, samples: int) -> list[str]:
    """What is missing of a strictly on-policy run, or there twice; one sentence each.

    Args:
        run_dir: the run's folder.
        iterations: that the run has.
        prompts: in the training files.
        batch: prompts of one iteration.
        samples: responses per prompt.
    """
    run = Recorded.of(run_dir, iterations)
    found = [judged.sentence for judged in check(run, None, iterations, batch * samples, samples) if not judged.ok]
    visits = {uid for table in run.rows.values() for uid in table["uid"].to_pylist()}
    epochs = Counter(int(uid.partition("-")[0]) for uid in visits)
    for epoch in range(-(-iterations * batch // prompts)):
        expected = min(prompts, iterations * batch - epoch * prompts)
        if epochs[epoch] != expected:
            found.append(f"epoch {epoch} has {epochs[epoch]} prompts, not {expected}")
    return found
