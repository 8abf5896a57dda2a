"""Every key of `algorithm`, `actor` and `critic` does something: change the key, see the change.

`SHOWN` has one entry per key: where to look, another value, and the settings under which the key matters. Each look
runs real code (the advantage stage, an update of a tiny model, the train loop) and returns what came out of it.
"""

import dataclasses
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from jobs.tiny import build_model
from pipeline.advantage.estimators import Estimate, EstimatorInput
from pipeline.advantage.kl_controller import kl_controller
from pipeline.advantage.stage import Advantage
from pipeline.config import Config
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.config.learner import ActorConfig
from pipeline.config.model import ModelConfig
from pipeline.config.schema import keys
from pipeline.derived import UpdateShape, chunk_prompts
from pipeline.losses import LossInput, Sums
from pipeline.models.batch import TrainBatch
from pipeline.models.fsdp import full_state_dict
from pipeline.models.mesh import Mesh, make_mesh
from pipeline.models.tokenizer import load_tokenizer
from pipeline.plan.plan import plan
from pipeline.rows import SCHEMA
from pipeline.store.admission import Admission
from pipeline.train import actor as actor_module
from pipeline.train import loop
from pipeline.train.actor import Actor
from pipeline.train.critic import Critic
from pipeline.train.setup import build_actor, build_critic
from tests.filtered import filtered
from tests.train.test_actor import CPU, update
from tests.train.test_critic import make_config, table

SECTIONS = ("algorithm", "actor", "critic")
VOCABULARY = 320

Look = Callable[[Config], Any]


def scaled_rewards(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """An estimator of one's own."""
    advantages = data.per_token(data.rewards * config.adv_estimator_kwargs.get("factor", 1.0))
    return Estimate(advantages, advantages)


def scaled_gradient(data: LossInput, config: ActorConfig) -> tuple[torch.Tensor, Sums]:
    """A loss of one's own."""
    return -data.advantages * data.log_probs * config.policy_loss.kwargs.get("factor", 1.0), {}


# where to look


def generated() -> pa.Table:
    """Two groups of three scored responses of different lengths, with all that an estimator or the KL may read."""
    rng = np.random.default_rng(0)
    rows = []
    for number, length in enumerate((2, 3, 6, 4, 2, 3)):
        rows.append(
            {
                "split": "train",
                "uid": str(number // 3),
                "response_mask": [1] * length,
                "spans": [{"kind": 1, "tokens": 1}, {"kind": 1, "tokens": length - 1}],
                "rollout_log_probs": rng.normal(-1, 0.3, length),
                "kl_coef": 0.5,
                "score": float(rng.normal()),
                "reward_parts": json.dumps({"acc": number % 2, "format": float(rng.normal())}),
                "reward_error": None,
                "baseline": float(rng.normal()),
                "ref_log_probs": rng.normal(-1, 0.3, length),
                "values": rng.normal(0, 0.3, length),
                "sum_pi_squared": rng.uniform(0.2, 0.6, length),
                "teacher_log_probs": rng.normal(-1, 0.3, length),
            }
        )
    return pa.Table.from_pylist(rows, schema=pa.schema([SCHEMA.field(name) for name in rows[0]]))


def advantages(config: Config) -> Any:
    """What the advantage stage makes of the rows."""
    made = Advantage(config.algorithm, taught=True)(generated())
    return [made[name].to_pylist() for name in ("advantages", "returns", "reward")]


def admission(config: Config) -> list[int]:
    """The policy version that each chunk waits for."""
    rule = Admission(chunk_prompts(config), config.data.train_batch_size, config.algorithm.max_staleness)
    return [rule.version_needed(chunk) for chunk in range(8)]


def rows(seed: int) -> TrainBatch:
    made = TrainBatch.from_table(table(seed))
    rng, tokens = np.random.default_rng(seed + 200), len(made.mask)
    made.ref_log_probs = rng.normal(-5.7, 0.4, tokens).astype(np.float32)
    made.teacher_top_ids = np.stack([rng.permutation(VOCABULARY)[:4] for _ in range(tokens)]).astype(np.int32)
    made.teacher_top_log_probs = np.log(rng.dirichlet(np.ones(9), tokens)[:, :4]).astype(np.float32)
    return made


def from_teacher(config: Config) -> tuple[int, ...]:
    """The shape of what a teacher in the train workers writes into the rows."""
    config.teacher.path, config.teacher.placement = config.model.path, "train_workers"
    actor, made = learner(Actor, config), rows(0)
    actor.compute_reference(made)
    assert made.teacher_top_ids is not None
    return made.teacher_top_ids.shape


def learner(kind: type[Actor | Critic], config: Config) -> Any:
    build = build_actor if kind is Actor else build_critic
    return build(config, CPU, iterations=2)


def weights(kind: type[Actor | Critic], config: Config, iterations: int = 2) -> list[np.ndarray]:
    """The weights after so many iterations."""
    trained = learner(kind, config)
    for seed in range(iterations):
        update(trained, rows(seed))
    return [weight.numpy() for weight in full_state_dict(trained.module).values()]


def forward_passes(kind: type[Actor | Critic], config: Config) -> list[tuple[int, ...]]:
    """Rows and width of each forward pass over an iteration."""
    trained, whole = learner(kind, config), rows(0)
    return [tuple(batch.input_ids.shape) for batch in trained.micro_batches(whole, list(range(len(whole))))]


def gathered_weights(kind: type[Actor | Critic], config: Config) -> list[str]:
    """The weights that stay gathered between the forward and the backward pass."""
    trained = learner(kind, config)
    batch = trained.micro_batches(rows(0), [0, 1, 2])[0]
    arguments = [batch.input_ids, batch.logit_index, *([batch.targets] if kind is Actor else [])]
    trained.module(*arguments)
    return [name for name, weight in trained.module.named_parameters() if not isinstance(weight, DTensor)]


def optimiser(kind: type[Actor | Critic], config: Config) -> str:
    """The class of the optimiser, or the package that it needs."""
    try:
        return type(learner(kind, config).optimizer).__name__
    except ModuleNotFoundError as missing:
        return str(missing)


class LargestLogits(TorchDispatchMode):
    """Records the most positions for which logits exist at a time."""

    positions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and out.shape[-1] == VOCABULARY:
            self.positions = max(self.positions, len(out))
        return out


def logits(config: Config) -> int:
    """The most positions for which logits exist at a time."""
    trained, whole = learner(Actor, config), rows(0)
    with LargestLogits() as mode, torch.no_grad():
        for batch in trained.micro_batches(whole, list(range(len(whole)))):
            trained._pass(batch)
    return mode.positions


def mesh(config: Config) -> tuple[list[Any], int]:
    """How eight workers would be divided."""
    with (
        patch("pipeline.models.mesh.init_device_mesh") as made,
        patch("torch.distributed.get_world_size", return_value=8),
    ):
        expert = make_mesh("cpu", config.actor.parallel).expert
    return [call.args for call in made.call_args_list], expert


def stages(config: Config) -> list[str]:
    """The stages of the stream."""
    config = changed(config, {"data.train_files": "train.parquet", "rollout.chunk_prompts": 4})
    return [stage.name for stage in plan(config).stages]


def trained(config: Config) -> list[list[str]]:
    """The learners that each of three iterations updates."""
    dry: Any = SimpleNamespace(config=config, actor="actor", critic="critic")
    found = []
    for dry.version in range(3):
        found.append(loop.Loop._trained(dry))
    return found


def strategy(config: Config) -> list[str]:
    """The functions that prepare the policy for training."""
    called: list[str] = []

    def stop(name: str) -> Any:
        def prepare(*_: Any) -> None:
            called.append(name)
            raise InterruptedError

        return prepare

    with (
        patch.object(actor_module, "load_policy"),
        patch.object(actor_module, "fsdp", stop("fsdp")),
        patch.object(actor_module, "megatron", stop("megatron")),
        suppress(InterruptedError),
    ):
        made: Any = Mesh(None, None)  # type: ignore[arg-type]
        options: Any = {"correction": None, "temperature": 1.0, "seed": 0}
        Actor(config.actor, config.model, UpdateShape.of(config, config.actor), CPU, 1, made, **options)
    return called


def kl_coefficients(config: Config) -> list[float]:
    """The coefficient of the KL in the reward after iterations with a KL near the target and far above any."""
    kl_state = kl_controller(config.algorithm.kl_ctrl)
    dry: Any = SimpleNamespace(config=config, device=None, kl=kl_state, world_size=1)
    coefficients = [dry.kl.coef]
    with patch.object(loop.ranks, "all_reduce", lambda values, device: values):
        for kl in (0.11, 5.0):
            loop.Loop._update_kl(dry, pa.table({"kl": [kl] * 12}))
            coefficients.append(dry.kl.coef)
    return coefficients


# what shows each key


@dataclasses.dataclass(frozen=True)
class Shown:
    """The key set to `value` changes what `look` finds under the settings `given`."""

    look: Look
    value: Any
    given: dict[str, Any] = dataclasses.field(default_factory=dict)


def estimator(name: str, **settings: Any) -> dict[str, Any]:
    return {"algorithm.adv_estimator": name, **{f"algorithm.{key}": value for key, value in settings.items()}}


def loss(name: str, **settings: Any) -> dict[str, Any]:
    options = {f"actor.policy_loss.{key}": value for key, value in settings.items()}
    return {"actor.policy_loss.loss_mode": name, **options}


actor, critic = partial(weights, Actor), partial(weights, Critic)
KL = {"algorithm.use_kl_in_reward": True}
ADAPTIVE = {**KL, "algorithm.kl_ctrl.type": "adaptive"}
FILTERED = {"algorithm.filter_groups.enable": True}
CORRECTION = "algorithm.rollout_correction"
RECOMPUTE = {"actor.old_log_probs": "recompute"}
WEIGHTS = {**RECOMPUTE, f"{CORRECTION}.rollout_is": "token"}
REJECTION = {
    **RECOMPUTE,
    f"{CORRECTION}.rollout_rs": "token_k1",
    f"{CORRECTION}.rollout_rs_threshold": "0.8_1.2",
}
GDPO = estimator("gdpo", gdpo_reward_keys=["acc", "format"])
OWN = f"{__name__}:"
CLIP_COV = loss("clip_cov", clip_cov_ratio=0.5, clip_cov_lb=-9.0, clip_cov_ub=9.0)
ONLINE_DPO = {**loss("online_dpo"), "actor.loss_agg_mode": "seq-mean-token-sum"}
KL_COV = loss("kl_cov", kl_cov_ratio=0.5)
MEAN_OF_NORMED = "seq-mean-token-sum-norm"

SHOWN = {
    "algorithm.adv_estimator": Shown(advantages, "rloo"),
    "algorithm.adv_estimator_kwargs": Shown(advantages, {"factor": 2.0}, estimator(OWN + "scaled_rewards")),
    "algorithm.gamma": Shown(advantages, 0.5, estimator("gae")),
    "algorithm.turn_gamma": Shown(advantages, 0.5, estimator("gae")),
    "algorithm.lam": Shown(advantages, 0.5, estimator("gae")),
    "algorithm.norm_adv_by_std_in_grpo": Shown(advantages, False),
    "algorithm.gdpo_reward_keys": Shown(advantages, ["acc", "score"], GDPO),
    "algorithm.gdpo_reward_weights": Shown(advantages, [1.0, 3.0], GDPO),
    "algorithm.f_norm": Shown(advantages, 2.0, estimator("gpg")),
    "algorithm.handle_zero_tail": Shown(advantages, False, estimator("optimal_token_baseline")),
    "algorithm.teacher_coef": Shown(advantages, 0.5),
    "algorithm.use_kl_in_reward": Shown(advantages, True),
    "algorithm.kl_penalty": Shown(advantages, "low_var_kl", {"algorithm.use_kl_in_reward": True}),
    "algorithm.kl_ctrl.type": Shown(kl_coefficients, "adaptive", KL),
    "algorithm.kl_ctrl.kl_coef": Shown(kl_coefficients, 0.5, KL),
    "algorithm.kl_ctrl.target_kl": Shown(kl_coefficients, 0.2, ADAPTIVE),
    "algorithm.kl_ctrl.horizon": Shown(kl_coefficients, 200, ADAPTIVE),
    f"{CORRECTION}.rollout_is": Shown(actor, "sequence", WEIGHTS),
    f"{CORRECTION}.rollout_is_threshold": Shown(actor, "0.8_1.2", WEIGHTS),
    f"{CORRECTION}.rollout_is_batch_normalize": Shown(actor, True, WEIGHTS),
    f"{CORRECTION}.rollout_rs": Shown(actor, "seq_mean_k1", REJECTION),
    f"{CORRECTION}.rollout_rs_threshold": Shown(actor, "0.5_2.0", REJECTION),
    "algorithm.filter_groups.enable": Shown(filtered, True),
    "algorithm.filter_groups.metric": Shown(filtered, "acc", FILTERED),
    "algorithm.filter_groups.max_num_gen_batches": Shown(filtered, 1, FILTERED),
    "algorithm.filter_groups.surplus": Shown(filtered, "carry", FILTERED),
    "algorithm.max_staleness": Shown(admission, 1),
    "actor.policy_loss.loss_mode": Shown(actor, "gspo"),
    "actor.policy_loss.clip_cov_ratio": Shown(actor, 0.1, CLIP_COV),
    "actor.policy_loss.clip_cov_lb": Shown(actor, 0.0, CLIP_COV),
    "actor.policy_loss.clip_cov_ub": Shown(actor, 0.0, CLIP_COV),
    "actor.policy_loss.kl_cov_ratio": Shown(actor, 0.1, KL_COV),
    "actor.policy_loss.ppo_kl_coef": Shown(actor, 1.0, KL_COV),
    "actor.policy_loss.dro_beta": Shown(actor, 1.0, loss("dro", dro_beta=0.1)),
    "actor.policy_loss.dpo_beta": Shown(actor, 1.0, ONLINE_DPO),
    "actor.policy_loss.tau_pos": Shown(actor, 2.0, loss("sapo")),
    "actor.policy_loss.tau_neg": Shown(actor, 2.0, loss("sapo")),
    "actor.policy_loss.kwargs": Shown(actor, {"factor": -1.0}, loss(OWN + "scaled_gradient")),
    "actor.clip_ratio": Shown(actor, 0.1),
    "actor.clip_ratio_low": Shown(actor, 0.1),
    "actor.clip_ratio_high": Shown(actor, 0.1),
    "actor.clip_ratio_c": Shown(actor, 1.1),
    "actor.loss_agg_mode": Shown(actor, "seq-mean-token-mean"),
    "actor.loss_scale_factor": Shown(actor, 1.0, {"actor.loss_agg_mode": MEAN_OF_NORMED}),
    "actor.entropy_coeff": Shown(actor, 0.1),
    "actor.distill_coef": Shown(actor, 1.0),
    "actor.distill_beta": Shown(actor, 0.7, {"actor.distill_coef": 1.0}),
    "actor.distill_top_k": Shown(from_teacher, 9, {"actor.distill_coef": 1.0}),
    "actor.use_kl_loss": Shown(actor, True),
    "actor.kl_loss_coef": Shown(actor, 1.0, {"actor.use_kl_loss": True}),
    "actor.kl_loss_type": Shown(actor, "low_var_kl+", {"actor.use_kl_loss": True}),
    "actor.kl_loss_ratio": Shown(actor, True, {"actor.use_kl_loss": True}),
    "actor.grad_clip": Shown(actor, 1e-3),
    "actor.ppo_epochs": Shown(actor, 2),
    "actor.ppo_mini_batch_size": Shown(actor, 4),
    "actor.ppo_max_token_len_per_gpu": Shown(partial(forward_passes, Actor), 40),
    "actor.old_log_probs": Shown(actor, "recompute"),
    "actor.logits_chunk_tokens": Shown(logits, 8),
    "actor.parallel.tensor": Shown(mesh, 2),
    "actor.parallel.sequence": Shown(mesh, 2),
    "actor.parallel.expert": Shown(mesh, 2, {"actor.parallel.tensor": 2}),
    "actor.parallel.replicate": Shown(mesh, 4),
    "actor.parallel.pipeline": Shown(mesh, 2),
    "actor.strategy": Shown(strategy, "megatron"),
    "critic.enable": Shown(stages, True),
    "critic.path": Shown(partial(weights, Critic, iterations=0), "OTHER MODEL"),
    "critic.warmup": Shown(trained, 2),
    "critic.cliprange_value": Shown(critic, 0.01),
    "critic.loss_agg_mode": Shown(critic, "seq-mean-token-mean"),
    "critic.grad_clip": Shown(critic, 1e-3),
    "critic.ppo_epochs": Shown(critic, 2),
    "critic.ppo_mini_batch_size": Shown(critic, 4),
    "critic.ppo_max_token_len_per_gpu": Shown(partial(forward_passes, Critic), 40),
}
for name, kind, look, gathered in (
    ("actor", Actor, actor, partial(gathered_weights, Actor)),
    ("critic", Critic, critic, partial(gathered_weights, Critic)),
):
    cosine = {f"{name}.optim.lr_scheduler_type": "cosine"}
    SHOWN |= {
        f"{name}.optim.lr": Shown(look, 1e-3),
        f"{name}.optim.betas": Shown(look, (0.5, 0.9)),
        f"{name}.optim.eps": Shown(look, 1e-1),
        f"{name}.optim.weight_decay": Shown(look, 0.5),
        f"{name}.optim.lr_scheduler_type": Shown(look, "linear"),
        f"{name}.optim.lr_warmup_steps": Shown(look, 2),
        f"{name}.optim.lr_warmup_steps_ratio": Shown(look, 1.0),
        f"{name}.optim.min_lr_ratio": Shown(look, 0.5, cosine),
        f"{name}.fsdp.reshard_after_forward": Shown(gathered, False),
        f"{name}.fsdp.param_dtype": Shown(look, "bfloat16"),
        f"{name}.fsdp.reduce_dtype": Shown(look, "bfloat16"),
        f"{name}.optim.name": Shown(partial(optimiser, kind), "adamw_8bit"),
        f"{name}.fsdp.offload": Shown(partial(optimiser, kind), "optimizer"),
    }


def changed(config: Config, settings: dict[str, Any]) -> Config:
    """A copy of `config` with `settings`, by dotted key."""
    config = dataclasses.replace(config)
    for key, value in settings.items():
        *sections, name = key.split(".")
        part: Any = config
        for section in sections:
            setattr(part, section, dataclasses.replace(getattr(part, section)))
            part = getattr(part, section)
        assert getattr(part, name) != value, f"{key} is {value} already"
        setattr(part, name, value)
    return config


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and a and isinstance(a[0], np.ndarray):
        return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What was found under settings that several entries share."""
    return {}


@pytest.fixture(scope="module")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with other weights than the tiny one."""
    folder = tmp_path_factory.mktemp("other")
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    model = build_model(tokenizer, hidden=64, layers=2, heads=2, kv_heads=2, tie=True, seed=1)
    model.save_pretrained(folder)
    return folder


def test_every_key_has_an_entry() -> None:
    declared = {key for key in keys(Config) if key.split(".")[0] in SECTIONS}
    assert sorted(declared - SHOWN.keys()) == [], "show in SHOWN what these keys change, or remove them"
    assert sorted(SHOWN.keys() - declared) == [], "there are no such keys"


@pytest.mark.parametrize("key", SHOWN)
@pytest.mark.usefixtures("one_rank")
def test_changing_the_key_changes_what_happens(
    key: str, tiny_model: Path, other_model: Path, found: dict[str, Any]
) -> None:
    shown = SHOWN[key]
    base = changed(make_config(tiny_model), shown.given)
    place = repr((shown.look, base))
    if place not in found:
        found[place] = shown.look(base)
    value = str(other_model) if key == "critic.path" else shown.value
    assert not same(shown.look(changed(base, {key: value})), found[place])


@pytest.mark.parametrize("look", dict.fromkeys(shown.look for shown in SHOWN.values()))
@pytest.mark.usefixtures("one_rank")
def test_the_same_settings_give_the_same(look: Look, tiny_model: Path) -> None:
    assert same(look(make_config(tiny_model)), look(make_config(tiny_model)))
