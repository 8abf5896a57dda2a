"""What becomes of `distillation.*`."""

from tests.jobs.verl.test_convert import converted, left, values

ON = ("algorithm.adv_estimator=grpo", "distillation.enabled=True")
LOSS, MODELS = "distillation.distillation_loss", "distillation.teacher_models"
ONE = (f"{MODELS}.teacher_model.model_path=Qwen/Qwen3-8B", "distillation.n_gpus_per_node=2", "distillation.nnodes=2")
GRADIENT = (f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True")
SUPERVISED = (f"{LOSS}.topk=64", f"{LOSS}.use_policy_gradient=False", f"{LOSS}.use_task_rewards=False")


def test_advantages_alone_and_with_rewards() -> None:
    alone = values(*ON, *ONE, *GRADIENT, f"{LOSS}.use_task_rewards=False", f"{LOSS}.distillation_loss_coef=0.5")
    assert (alone["teacher.path"], alone["teacher.num_workers"], alone["teacher.num_gpus"]) == ("Qwen/Qwen3-8B", 4, 1.0)
    assert (alone["algorithm.adv_estimator"], alone["algorithm.teacher_coef"]) == ("zero", 1.0)
    both = values(*ON, *ONE, *GRADIENT, f"{LOSS}.distillation_loss_coef=0.5")
    assert (both["algorithm.adv_estimator"], both["algorithm.teacher_coef"]) == ("grpo", 0.5)


def test_losses_over_the_likely_tokens() -> None:
    for mode, beta in (("forward_kl_topk", 0.0), ("reverse_kl_topk", 1.0), ("jsd_topk", 0.3)):
        found = values(*ON, *ONE, *SUPERVISED, f"{LOSS}.loss_mode={mode}", f"{LOSS}.jsd_beta=0.3")
        assert (found["actor.distill_coef"], found.get("actor.distill_top_k", 64)) == (1.0, 64)
        assert found.get("actor.distill_beta", 0.0) == beta
        assert found["algorithm.adv_estimator"] == "zero" and "algorithm.teacher_coef" not in found


def test_several_teachers_by_a_column() -> None:
    two = (
        *(f"+{MODELS}.math.key=openai/gsm8k", f"+{MODELS}.math.model_path=A", f"+{MODELS}.math.num_replicas=2"),
        *(f"+{MODELS}.code.key=taco", f"+{MODELS}.code.model_path=B", f"+{MODELS}.code.inference.name=vllm"),
    )
    found = converted(*ON, *two, *GRADIENT, "distillation.teacher_key=data_source")
    assert found.values["teacher.named"] == {
        "math": {"path": "A", "sources": ["openai/gsm8k"], "num_workers": 2},
        "code": {"path": "B", "sources": ["taco"], "num_workers": 1},
    }
    assert f"{MODELS}.math.model_path" in found.converted
    assert [entry.cannot for entry in found.left if ".inference." in entry.key] == [False]
    other = left(*ON, *two, *GRADIENT, "distillation.teacher_key=ability")
    assert other["distillation.teacher_key"] == ("data_source, agent_name or extra_info.NAME choose", True)


def test_losses_that_are_not_here_and_clamps() -> None:
    assert left(*ON, *ONE, f"{LOSS}.loss_mode=k3", f"{LOSS}.use_policy_gradient=False")[f"{LOSS}.loss_mode"][1]
    assert any("nothing is clamped" in note for note in converted(*ON, *ONE, *GRADIENT).notes)
    assert left(*ON, *ONE, *GRADIENT, f"{LOSS}.clip_ratio=0.3")[f"{LOSS}.clip_ratio"][1]


def test_coefficients_count_with_rewards_alone() -> None:
    half = f"{LOSS}.distillation_loss_coef=0.5"
    assert (
        values(*ON, *ONE, *SUPERVISED, f"{LOSS}.loss_mode=jsd_topk", f"{LOSS}.jsd_beta=0", half)["actor.distill_coef"]
        == 1.0
    )
    with_rewards = values(*ON, *ONE, *SUPERVISED[:2], f"{LOSS}.loss_mode=forward_kl_topk", half)
    assert with_rewards["actor.distill_coef"] == 0.5 and with_rewards["algorithm.adv_estimator"] == "grpo"


def test_nothing_is_read_if_it_is_off() -> None:
    off = values("algorithm.adv_estimator=grpo", "distillation.enabled=False", *ONE, *GRADIENT)
    assert "teacher.path" not in off and off["algorithm.adv_estimator"] == "grpo"
