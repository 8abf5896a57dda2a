"""The plan's numbers on hand-worked cases, the resource check, and what the terminal shows."""

import io

import pytest
from rich.console import Console

from pipeline.config import Config, ConfigError, load_config
from pipeline.plan.placement import check_resources, lines, local_gpus, place
from pipeline.plan.plan import Plan, plan
from pipeline.plan.table import render

SMALL = [
    "data.train_files=train.parquet",
    "model.path=owner/model",
    "data.train_batch_size=64",
    "rollout.chunk_prompts=8",
    "rollout.n=4",
    "rollout.num_engines=3",
    "trainer.num_workers=2",
    "actor.ppo_mini_batch_size=32",
    "actor.ppo_epochs=3",
]


def validate(config: Config) -> Plan:
    """The plan of a config that fits a local Ray, checked as `jobs.train` checks it."""
    resolved = plan(config)
    check_resources(resolved.stages, config.trainer.ray_num_cpus)
    return resolved


def small(*overrides: str, train_rows: int | None = None):
    return plan(load_config([*SMALL, *overrides]), train_rows)


def shown(*overrides: str) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(render(small(*overrides)))
    return console.file.getvalue()


def test_hand_worked_numbers():
    numbers = small(train_rows=1000)
    assert numbers.chunks_per_iteration == 8
    assert numbers.chunks_per_rank == 4
    assert numbers.rows_per_iteration == 256
    assert numbers.rows_per_rank == 128
    assert numbers.actor.mini_batches == 2
    assert numbers.actor.steps == 6
    assert numbers.critic is None and numbers.greedy_rows_per_iteration == 0
    # One validation sample per prompt: 256 sequences of the engine / 8 prompts of a chunk, more than a share of 8 / 3.
    assert numbers.chunks_in_flight_per_engine == 32
    assert small("rollout.max_num_seqs=8").chunks_in_flight_per_engine == 3  # 8 chunks over 3 engines, rounded up
    assert small("rollout.chunks_in_flight=5").chunks_in_flight_per_engine == 5
    assert numbers.iterations == 15
    assert numbers.cpus == 3 * 1 + 2 * 1 + 1 + 1
    assert numbers.gpus == 0


def test_iterations():
    assert small().iterations is None
    assert small("trainer.total_epochs=2", train_rows=1000).iterations == 31
    assert small("data.train_max_samples=128", train_rows=1000).iterations == 2
    assert small("trainer.total_training_steps=5", train_rows=10).iterations == 5
    with pytest.raises(ConfigError, match="10 training prompts x trainer.total_epochs=2 = 20 do not fill"):
        small("trainer.total_epochs=2", train_rows=10)


def test_cpus_are_checked_against_what_the_local_ray_is_told():
    validate(load_config([*SMALL, "trainer.ray_num_cpus=7"]))
    with pytest.raises(ConfigError, match=r"3 x 1 \+ 1 \+ 2 x 1 \+ 1 = 7 CPUs and trainer.ray_num_cpus=6"):
        validate(load_config([*SMALL, "trainer.ray_num_cpus=6"]))


PPO = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]


def test_stages_exist_where_something_reads_what_they_write():
    def names(*overrides: str) -> list[str]:
        return [stage.name for stage in small(*overrides).stages]

    plain = ["prompts", "rollout", "reward, advantage", "train"]
    assert names() == plain
    assert names(*PPO) == [*plain[:3], "reference", "value", "train"]
    assert names("actor.use_kl_loss=true") == [*plain[:3], "reference", "train"]
    assert names("critic.enable=true") == [*plain[:3], "value", "train"]
    assert names("algorithm.adv_estimator=optimal_token_baseline") == [*plain[:3], "policy", "train"]


def test_scoring_pools_are_counted():
    pools = ["scoring.reference.num_workers=2", "scoring.reference.num_cpus=3", "scoring.reference.num_gpus=0.5"]
    numbers = small(*PPO, *pools, "scoring.value.num_gpus=1")
    assert numbers.cpus == 3 * 1 + 1 + 2 * 3 + 1 * 1 + 2 * 1 + 1
    assert numbers.gpus == 2 * 0.5 + 1 * 1
    with pytest.raises(ConfigError) as error:
        check_resources(numbers.stages, None, [{"CPU": 13.0, "GPU": 8.0}])
    assert (
        "the run needs rollout.num_engines x rollout.num_cpus + reward.num_cpus + scoring.reference.num_workers x "
        "scoring.reference.num_cpus + scoring.value.num_workers x scoring.value.num_cpus + trainer.num_workers x "
        "trainer.cpus_per_worker + 1 for prompts = 3 x 1 + 1 + 2 x 3 + 1 x 1 + 2 x 1 + 1 = 14 CPUs and the cluster "
        "has 13"
    ) in str(error.value)
    with pytest.raises(ConfigError) as error:
        check_resources(numbers.stages, None, [{"CPU": 14.0, "GPU": 1.0}])
    assert (
        "scoring.reference.num_workers x scoring.reference.num_gpus + scoring.value.num_workers x "
        "scoring.value.num_gpus = 2 x 0.5 + 1 x 1 = 2 GPUs and the cluster has 1"
    ) in str(error.value)
    with pytest.raises(ConfigError, match="not together for .* x reference of 3 CPUs"):
        check_resources(numbers.stages, None, [{"CPU": 2.0, "GPU": 1.0}] * 10)


def test_updates_of_the_critic():
    assert small(*PPO).critic == small().actor
    critic = small(*PPO, "critic.ppo_mini_batch_size=16", "critic.ppo_epochs=1").critic
    assert critic and (critic.mini_batches, critic.epochs, critic.steps) == (4, 1, 4)


def test_warmup_leaves_iterations_for_the_policy():
    warmup = [*PPO, "trainer.total_training_steps=5"]
    small(*warmup, "critic.warmup=4")
    with pytest.raises(ConfigError, match="critic.warmup=5 leaves 5 - 5 = 0 iterations"):
        small(*warmup, "critic.warmup=5")
    with pytest.raises(ConfigError, match="critic.warmup=20 leaves 15 - 20 = -5 iterations"):
        small(*PPO, "critic.warmup=20", train_rows=1000)


def test_greedy_responses_of_the_baselines():
    numbers = small("algorithm.adv_estimator=remax")
    assert (numbers.rows_per_iteration, numbers.greedy_rows_per_iteration) == (256, 64)
    assert "64 prompts x 4 samples = 256 rows and 64 greedy ones in 8 chunks" in shown("algorithm.adv_estimator=remax")


def test_gpus_are_checked(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert local_gpus() == 4
    config = load_config([*SMALL, "trainer.ray_num_cpus=8", "rollout.num_gpus=1", "trainer.use_gpu=true"])
    with pytest.raises(ConfigError, match=r"3 x 1 \+ 2 x 1 = 5 GPUs and this machine has 4"):
        validate(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    assert validate(config).gpus == 5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert local_gpus() == 0


def test_a_cluster_needs_a_node_for_each_actor():
    numbers = small("rollout.num_cpus=4")
    check_resources(numbers.stages, None, [{"CPU": 16.0}])
    with pytest.raises(ConfigError, match="not together for .* x rollout of 4 CPUs"):
        check_resources(numbers.stages, None, [{"CPU": 2.0}] * 10)
    with pytest.raises(ConfigError, match="= 16 CPUs and the cluster has 8"):
        check_resources(numbers.stages, None, [{"CPU": 4.0}] * 2)


def test_render_shows_the_arithmetic_and_notes():
    text = shown("rollout.num_engines=9")
    assert "64 prompts x 4 samples = 256 rows in 8 chunks" in text
    assert "2 mini-batches x 3 epochs = 6" in text
    assert "1 engines stay idle" in text


def test_the_table_says_what_overlaps():
    stale, bypass = "algorithm.max_staleness=1", "actor.old_log_probs=engine"
    assert "strictly on-policy" in shown() and "training begins with the first chunks" in shown()
    text = shown("algorithm.max_staleness=2")
    assert "engines generate up to 2 iterations ahead" in text
    assert "token weights by default, bound 2.0, ratio to the recomputed old policy (decoupled)" in text
    assert "no weights by default, ratio to the engine's policy (bypass)" in shown(stale, bypass)
    assert "no weights, ratio" in shown(stale, "algorithm.rollout_correction.rollout_is=none")
    assert "(trainer.stream_gradients=false)" in shown("trainer.stream_gradients=false")
    assert "iteration is complete: algorithm.adv_estimator" in shown("algorithm.adv_estimator=reinforce_plus_plus")


NODES = [{"CPU": 8.0}, {"CPU": 4.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 2.0}]
LABELS = [{"role": "cpu"}, {"role": "rollout", "zone": "a"}, {"role": "train"}]
GPUS = ("rollout.num_gpus=1", "trainer.use_gpu=true")


def test_stages_keep_to_the_nodes_of_their_labels():
    placed = small(*GPUS, "trainer.placement.rollout.role=rollout", "trainer.placement.train.role=train")
    check_resources(placed.stages, None, NODES, LABELS)
    # All GPUs together would do, but not those of the right nodes.
    with pytest.raises(ConfigError, match=r"2 x train of .* on nodes labelled role=rollout.*"):
        check_resources(small(*GPUS, "trainer.placement.train.role=rollout").stages, None, NODES, [LABELS[0], {}, {}])
    crowded = small(*GPUS, "trainer.placement.rollout.role=rollout", "trainer.placement.train.role=rollout")
    with pytest.raises(ConfigError, match="not together for .* on nodes labelled role=rollout"):
        check_resources(crowded.stages, None, NODES, LABELS)
    lights = small("reward.num_cpus=5", "trainer.placement.reward.role=train")
    with pytest.raises(ConfigError, match="reward, advantage of 5 CPUs and 0 GPUs on nodes labelled role=train"):
        check_resources(lights.stages, None, NODES, LABELS)
    both = small(*GPUS, "trainer.placement.rollout={role: rollout, zone: b}")
    with pytest.raises(ConfigError, match="labelled role=rollout,zone=b"):
        check_resources(both.stages, None, NODES, LABELS)


def test_an_actor_larger_than_any_node_of_its_labels():
    large = small("rollout.num_engines=1", "rollout.num_cpus=6", "trainer.placement.rollout.kind=small")
    with pytest.raises(ConfigError, match="not together for .* x rollout of 6 CPUs"):
        check_resources(
            large.stages, None, [{"CPU": 20.0}, {"CPU": 4.0}, {"CPU": 4.0}], [{}, {"kind": "small"}, {"kind": "small"}]
        )


def test_a_local_ray_has_no_labels():
    with pytest.raises(ConfigError, match="on nodes labelled role=rollout"):
        validate(load_config([*SMALL, "trainer.ray_num_cpus=16", "trainer.placement.rollout.role=rollout"]))


# Parts of GPUs, and pools that grow.


def test_the_fewest_engines_are_required():
    elastic = ("rollout.min_engines=2", "rollout.max_engines=6", "rollout.num_gpus=1")
    numbers = small(*elastic)
    assert numbers.cpus == 2 * 1 + 2 * 1 + 1 + 1 and numbers.gpus == 2
    text = shown(*elastic)
    assert "2 up to 6 x 1 CPU + 1 GPU" in text and "at least 6 CPUs, 2 GPUs" in text
    check_resources(numbers.stages, None, [{"CPU": 6.0, "GPU": 2.0}])
    with pytest.raises(
        ConfigError, match=r"rollout.min_engines x rollout.num_cpus .* 2 x 1 \+ 1 \+ 2 x 1 \+ 1 = 6 CPUs"
    ):
        check_resources(numbers.stages, None, [{"CPU": 5.0, "GPU": 2.0}])


def test_engines_that_are_added_leave_the_tasks_their_cpus():
    numbers = small("rollout.max_engines=6")
    check_resources(numbers.stages, None, [{"CPU": 10.0}])
    with pytest.raises(
        ConfigError, match="5 engines would take the CPUs of the tasks of reward, advantage.* at most 4"
    ):
        check_resources(numbers.stages, None, [{"CPU": 8.0}])
    # Engines that hold GPUs stop where there are no more of them, and others may come with nodes of their own.
    on_gpus = small("rollout.max_engines=60", "rollout.num_gpus=1")
    check_resources(on_gpus.stages, None, [{"CPU": 12.0, "GPU": 5.0}])
    labelled = small("rollout.max_engines=60", "trainer.placement.rollout.role=rollout")
    check_resources(labelled.stages, None, [{"CPU": 4.0}, {"CPU": 8.0}], [{}, {"role": "rollout"}])


def test_an_engine_of_several_gpus_has_them_on_one_node():
    numbers = small("rollout.num_gpus=1", "rollout.tensor_parallel_size=4", "rollout.num_engines=2")
    assert numbers.gpus == 8
    check_resources(numbers.stages, None, [{"CPU": 4.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 4.0}])
    with pytest.raises(ConfigError, match=r"rollout.num_engines x rollout.tensor_parallel_size = 2 x 4 = 8 GPUs and"):
        check_resources(numbers.stages, None, [{"CPU": 8.0, "GPU": 7.0}])
    with pytest.raises(ConfigError, match="not together for .* x rollout of 1 CPUs"):
        check_resources(
            numbers.stages, None, [{"CPU": 4.0, "GPU": 3.0}, {"CPU": 4.0, "GPU": 3.0}, {"CPU": 4.0, "GPU": 2.0}]
        )


def test_parts_of_a_gpu_are_parts_of_one():
    shared = ("rollout.num_gpus=0.4", "trainer.use_gpu=true", "trainer.gpus_per_worker=0.6", "rollout.num_engines=2")
    numbers = small(*shared)
    assert numbers.gpus == pytest.approx(2)
    check_resources(numbers.stages, None, [{"CPU": 8.0, "GPU": 2.0}])
    # 2 x 0.6 + 4 x 0.2 = 2, and 2 x 0.6 + 1 x 0.8 too, but 0.8 is left of no GPU.
    split = (*shared, "rollout.num_engines=4", "rollout.num_gpus=0.2")
    check_resources(small(*split).stages, None, [{"CPU": 8.0, "GPU": 2.0}])
    with pytest.raises(ConfigError, match="enough in all, but not together for .* 1 x rollout of 1 CPUs and 0.8 GPUs"):
        check_resources(
            small(*shared, "rollout.num_engines=1", "rollout.num_gpus=0.8").stages, None, [{"CPU": 8.0, "GPU": 2.0}]
        )


def test_actors_have_everything_from_one_node():
    fits = small("rollout.num_cpus=3", "rollout.num_engines=2", "trainer.num_workers=1")
    check_resources(fits.stages, None, [{"CPU": 5.0}, {"CPU": 4.0}])
    with pytest.raises(ConfigError, match="enough in all, but not together"):
        check_resources(fits.stages, None, [{"CPU": 5.0}, {"CPU": 2.0}, {"CPU": 2.0}])


def test_who_sits_where():
    shared = ("rollout.num_gpus=0.4", "trainer.use_gpu=true", "trainer.gpus_per_worker=0.6", "rollout.num_engines=2")
    numbers, nodes = small(*shared), [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0}]
    seated = place(numbers.stages, nodes)
    assert list(lines(seated)) == [
        "2 CPUs and 0 GPUs: prompts; reward, advantage",
        "2 nodes of 2 CPUs and 1 GPUs: GPU 0: train 0.6 + rollout 0.4",
    ]
    console = Console(file=io.StringIO(), width=400)
    console.print(render(numbers, seated))
    assert "GPU 0: train 0.6 + rollout 0.4" in console.file.getvalue()
    placed = small(*shared, "trainer.placement.train.role=big")
    assert "2 x 1 CPU + 0.6 GPU on nodes labelled role=big" in shown(*shared, "trainer.placement.train.role=big")
    assert place(placed.stages, nodes) == []
    big = place(placed.stages, [*nodes, {"CPU": 8.0, "GPU": 4.0}], [{}, {}, {}, {"role": "big"}])
    assert "8 CPUs and 4 GPUs (role=big): GPU 0 to 1: train 0.6; GPU 2 to 3: free" in list(lines(big))
