"""`docs/monitoring.md` lists the metrics that the code makes: all of them, and no others.

Whatever makes metrics without Ray is run here, the update of actor and critic included. What only a run makes (clocks
of the loop, messages of the stages) is read off the source.
"""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.catalogue import POLICY_LOSSES
from pipeline.config.algorithm import RolloutCorrectionConfig
from pipeline.config.learner import ActorConfig, PolicyLossConfig
from pipeline.dynamic_sampling.ledger import IterationStats
from pipeline.losses.registry import LossInput
from pipeline.models.batch import TrainBatch
from pipeline.stats import Stats
from pipeline.track.history import RENAMED
from pipeline.track.metrics import PLACES, iteration_metrics, log_prob_gap, missing_rates
from pipeline.track.performance import derived, memory_metrics, sequence_balance
from pipeline.train.correction import RULES, correct, parse
from pipeline.train.setup import build_actor, build_critic
from tests.track.test_episodes import EPISODES, episode
from tests.track.test_metrics import ROWS, SCORED, table
from tests.track.test_performance import TIMES
from tests.track.test_validation import VALIDATION, metrics_of, validation
from tests.train import test_actor, test_critic
from tests.train.updates import update

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def documented() -> set[str]:
    """Names in the first column of the page's tables, `{a,b}` written out."""
    names: set[str] = set()
    _, _, tables = (ROOT / "docs" / "monitoring.md").read_text().partition("\n## Metrics")
    tables, _, _ = tables.partition("\n### Next to verl")
    for name in re.findall(r"^\| `([^`]+)`", tables, re.MULTILINE):
        choices = re.search(r"\{(\w+(?:,\w+)+)\}", name)
        options = choices.group(1).split(",") if choices else []
        written = [name.replace(choices.group(0), option) for option in options] if choices else [name]
        assert not names & set(written), f"{name} is listed twice"
        names |= set(written)
    return names


def rows_and_validation() -> set[str]:
    made: set[str] = set()
    for rows in (ROWS, SCORED, EPISODES):
        found = iteration_metrics(table(*rows))
        made |= {re.sub("^agent/tool/.*", "agent/tool/{tool}", name) for name in found}
        made |= set(sequence_balance(table(*rows)))
    made |= {*log_prob_gap([-1.0] * 7, [-1.1] * 7, [1] * 7, PLACES), *derived(TIMES, 6, 4, 3, 2)}
    ages = iteration_metrics(table(*ROWS), max_staleness=1)
    made |= {name.replace("/share/0", "/share/{age}") for name in ages if not name.endswith("/share/1")}
    made |= set(iteration_metrics(table({"uid": "a", "version_runs": [{"version": 2, "tokens": 2}]})))
    made |= set(IterationStats(groups=1, rows=1).metrics(batch=1))
    part = iteration_metrics(table({"uid": "a", "reward_parts": '{"part": 1}'}, {"uid": "b"}))
    made |= {name.replace("/part/", "/{part}/") for name in {**part, **missing_rates(part)}}
    long = dict.fromkeys(("part", "tool"), "x" * 201)
    many = episode([1], [], calls={long["tool"]: 1}) | {"reward_parts": json.dumps({long["part"]: 1})}
    made |= {name for name in iteration_metrics(table(many)) if name.endswith("_left_out")}
    judged = metrics_of(validation(("s", "a", 1.0, "x", '{"acc": 1}')))
    made |= {name.replace("/s/", "/{source}/") for name in judged if name.endswith("missing_rate")}
    for name in metrics_of(VALIDATION):
        if "/s/" in name:
            made.add(name.replace("/s/", "/{source}/").replace("@4", "@N").replace("@2", "@K"))
    return made


def memory(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    for kind in ("allocated", "reserved"):
        monkeypatch.setattr(f"torch.cuda.max_memory_{kind}", lambda device: 0)
    return set(memory_metrics(torch.device("cuda")))


def corrections() -> set[str]:
    every = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_threshold="0.5_2.0",
        rollout_is_batch_normalize=True,
        rollout_rs=",".join(RULES),
        rollout_rs_threshold=",".join("2.0" for _ in RULES),
    )
    numbers = np.array([-1.0, -1.1])
    stats = correct(parse(every), numbers, numbers, np.ones(2), np.array([0, 2]), list).stats
    by_rule = {f"rollout_corr/rollout_rs_{rule}_fraction": "rollout_corr/rollout_rs_{rule}_fraction" for rule in RULES}
    assert set(by_rule) < set(stats)
    return {by_rule.get(name, name) for name in stats}


def losses() -> set[str]:
    """Of the losses that come with the package; tests may have registered more."""
    config = ActorConfig(policy_loss=PolicyLossConfig(dro_beta=0.1))
    one = torch.ones(1)
    data = LossInput(-one, -one, one, one, torch.zeros(1, dtype=torch.long), 1, token_mask=one > 0, pair_margin=one)
    own = [loss for loss in POLICY_LOSSES.values() if loss.built_in]
    assert len(own) >= 12
    return {f"actor/{name}" for loss in own for name in loss.function(data, config)[1]}


def updates(model: Path) -> set[str]:
    """Of an actor that recomputes log-probs and one that does not, and of a critic."""
    stats: list[Stats] = []
    for source in ("recompute", "engine"):
        config = test_actor.make_config(model, old_log_probs=source, use_kl_loss=True, entropy_coeff=0.1)
        config.algorithm.rollout_correction.rollout_is = "sequence"
        rows = TrainBatch.from_table(test_actor.table())
        rows.ref_log_probs = rows.rollout_log_probs.copy()
        stats.append(update(build_actor(config, CPU, 1), rows))
    stats.append(update(build_critic(test_critic.make_config(model), CPU, 1), test_critic.table()))
    return {name for part in stats for name in part}


def written(folder: Path, groups: set[str]) -> set[str]:
    """Strings in the source that read like a metric of these groups, and what `timed` calls its blocks."""
    found: set[str] = set()
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "timed":
                if isinstance(node.args[1], ast.Constant):
                    found.add(f"timing_s/{node.args[1].value}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = node.value.split("/")
                if parts[0] in groups and re.fullmatch(r"[a-z_]+(/[a-z_]+)+", node.value):
                    found.add(node.value)
    return found


@pytest.mark.usefixtures("one_rank")
def test_every_metric_is_documented_and_every_documented_metric_is_made(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = documented()
    made = rows_and_validation() | memory(monkeypatch) | corrections() | losses() | updates(tiny_model)
    assert made - page == set(), "made, but not on the page"
    named = written(ROOT / "pipeline", {name.partition("/")[0] for name in page}) - set(RENAMED)
    # The source also names groups, such as `critic/score`, and beginnings.
    whole = {name for name in named if not any(other.startswith(name) for other in page - {name})}
    assert whole - page == set(), "named in the source, but not on the page"
    assert page - made - named == set(), "on the page, but not made"
