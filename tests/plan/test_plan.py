"""The plan's numbers on hand-worked cases, the resource check, and what the terminal shows."""

import io

import pytest
from rich.console import Console

from pipeline.config import Config, ConfigError
from pipeline.plan.checks import check
from pipeline.plan.placement import Node, check_resources, lines, local_gpus, place
from pipeline.plan.plan import Plan, plan
from pipeline.plan.table import render
from tests.plan.test_checks import good
from tests.shapes import write_shape

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
    config = good(*SMALL, *overrides)
    check(config)
    return plan(config, train_rows)


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


def test_episodes_at_once():
    """8 chunks of 8 prompts x 4 samples over 3 engines, and as many again for each iteration ahead."""
    assert small().episodes_per_engine == 0 and "episodes" not in shown()
    assert small("agent.environment=a:B").episodes_per_engine == 3 * 8 * 4
    assert small("agent.environment=a:B", "algorithm.max_staleness=1").episodes_per_engine == 6 * 8 * 4
    assert small("agent.environment=a:B", "rollout.chunks_in_flight=1").episodes_per_engine == 8 * 4
    many = ["agent.environment=a:B", "rollout.n=256"]
    assert any("up to 6,144 episodes at a time and runs 4,096 of them" in note for note in small(*many).notes)
    few = small("agent.environment=a:B", "agent.max_episodes=50").notes
    assert any("up to 96 episodes at a time and runs 50 of them" in note for note in few)
    assert "up to 96 episodes at once" in shown("agent.environment=a:B")
    assert f"up to {small().chunks_in_flight_per_engine} chunks in flight" in shown()
    assert "scored by environment or program " in shown("agent.environment=a:B")
    assert "scored by reward " in shown("agent.tools=[a:b]")


def test_iterations(named):
    assert small().iterations is None
    assert small("trainer.total_epochs=2", train_rows=1000).iterations == 31
    assert small("data.train_max_samples=128", train_rows=1000).iterations == 2
    assert small("trainer.total_training_steps=5", train_rows=10).iterations == 5
    with pytest.raises(ConfigError) as refused:
        small("trainer.total_epochs=2", train_rows=10)
    named(refused.value, "10 trainer.total_epochs=2 20 data.train_batch_size")


def test_cpus_are_checked_against_what_the_local_ray_is_told(named):
    validate(good(*SMALL, "trainer.ray_num_cpus=7"))
    with pytest.raises(ConfigError) as refused:
        validate(good(*SMALL, "trainer.ray_num_cpus=6"))
    named(refused.value, "rollout.num_cpus 7 trainer.ray_num_cpus=6")


PPO = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]


def test_stages_exist_where_something_reads_what_they_write():
    def names(*overrides: str) -> list[str]:
        return [stage.name for stage in small(*overrides).stages]

    plain = ["prompts", "rollout", "reward, advantage", "train"]
    assert names() == plain
    assert names(*PPO) == [*plain[:3], "reference", "value", "train"]
    assert names("actor.use_kl_loss=true") == [*plain[:3], "reference", "train"]
    assert names("actor.use_kl_loss=true", "scoring.reference.placement=train_workers") == plain
    assert names("critic.enable=true") == [*plain[:3], "value", "train"]
    assert names("algorithm.adv_estimator=optimal_token_baseline") == [*plain[:3], "policy", "train"]


def test_scoring_pools_are_counted():
    pools = ["scoring.reference.num_workers=2", "scoring.reference.num_cpus=3", "scoring.reference.num_gpus=0.5"]
    numbers = small(*PPO, *pools, "scoring.value.num_gpus=1")
    assert numbers.cpus == 3 * 1 + 1 + 2 * 3 + 1 * 1 + 2 * 1 + 1
    assert numbers.gpus == 2 * 0.5 + 1 * 1


def test_updates_of_the_critic():
    assert small(*PPO).critic == small().actor
    critic = small(*PPO, "critic.ppo_mini_batch_size=16", "critic.ppo_epochs=1").critic
    assert critic and (critic.mini_batches, critic.epochs, critic.steps) == (4, 1, 4)


def test_warmup_leaves_iterations_for_the_policy(named):
    warmup = [*PPO, "trainer.total_training_steps=5"]
    small(*warmup, "critic.warmup=4")
    with pytest.raises(ConfigError) as refused:
        small(*warmup, "critic.warmup=5")
    named(refused.value, "critic.warmup=5 0")
    with pytest.raises(ConfigError) as refused:
        small(*PPO, "critic.warmup=20", train_rows=1000)
    named(refused.value, "critic.warmup=20 -5")


def test_greedy_responses_of_the_baselines():
    numbers = small("algorithm.adv_estimator=remax")
    assert (numbers.rows_per_iteration, numbers.greedy_rows_per_iteration) == (256, 64)
    assert "64 prompts x 4 samples = 256 rows and 64 greedy ones in 8 chunks" in shown("algorithm.adv_estimator=remax")


def test_gpus_are_checked(monkeypatch, named):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert local_gpus() == 4
    config = good(*SMALL, "trainer.ray_num_cpus=8", "rollout.num_gpus=1", "trainer.use_gpu=true")
    with pytest.raises(ConfigError) as refused:
        validate(config)
    named(refused.value, "rollout.num_gpus 5 4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    assert validate(config).gpus == 5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert local_gpus() == 0


def test_render_shows_the_arithmetic_and_notes():
    text = shown("rollout.num_engines=9")
    assert "64 prompts x 4 samples = 256 rows in 8 chunks" in text
    assert "2 mini-batches x 3 epochs = 6" in text
    assert "1 engines stay idle" in text


def test_the_table_shows_the_mesh():
    assert "replicate 1 x shard 2 x tensor 1 = 2 train workers; weights over 2" in shown()
    assert "each rank has 64 of the 128 rows of a mini-batch" in shown()
    mesh = ["trainer.num_workers=8", "rollout.chunk_prompts=4", "actor.parallel.tensor=2", "actor.parallel.replicate=2"]
    text = shown(*mesh)
    assert "replicate 2 x shard 2 x tensor 2 = 8 train workers; weights over 4" in text and "experts" not in text
    assert "each 2 neighbouring ranks have the same 32 of the 128 rows of a mini-batch" in text
    assert "; weights over 4, experts over the 2 of tensor" in shown(*mesh, "actor.parallel.expert=2")
    text = shown(*mesh, "actor.parallel.sequence=2")
    assert "replicate 2 x shard 1 x sequence 2 x tensor 2 = 8 train workers; weights over 4" in text
    assert "each 4 neighbouring ranks have the same 64 of the 128 rows of a mini-batch" in text


def test_the_table_shows_host_memory_of_a_node(tmp_path):
    folder = write_shape("Qwen2.5-0.5B", tmp_path)
    model = [f"model.path={folder}", "trainer.num_workers=16", "rollout.chunk_prompts=2"]
    text = shown(*model, "trainer.use_gpu=true", "actor.fsdp.offload=all")
    # A sixteenth of 4 bytes for each of 494 million parameters, on eight workers; 16 bytes later.
    assert (
        "with 8 train workers 942 MiB at start; later 3.7 GiB of offloaded state, and 942 MiB of each version" in text
    )
    assert "with 16 train workers 1.8 GiB at start; later 0 B of offloaded state" in shown(*model)


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


POOLS = "scoring.reference.num_workers=2 scoring.reference.num_cpus=3 scoring.reference.num_gpus=0.5"
SCORED = f"algorithm.adv_estimator=gae algorithm.use_kl_in_reward=true {POOLS} scoring.value.num_gpus=1"
GPUS = "rollout.num_gpus=1 trainer.use_gpu=true"
KINDS = "8@role=cpu 4+4@role=rollout,zone=a 4+2@role=train"
ENGINES = "trainer.placement.rollout.role=rollout"
HOSTS = "agent.environment=my_game:Game agent.hosts=3 agent.host_cpus=2"
ELASTIC = "rollout.min_engines=2 rollout.max_engines=6 rollout.num_gpus=1"
SPLIT = "rollout.num_gpus=1 rollout.tensor_parallel_size=4 rollout.num_engines=2"
SHARED = "rollout.num_gpus=0.4 trainer.use_gpu=true trainer.gpus_per_worker=0.6 rollout.num_engines=2"
LARGE = "rollout.num_cpus=3 rollout.num_engines=2 trainer.num_workers=1"


def cluster(text: str) -> list[Node]:
    """Nodes written `CPUs+GPUs@key=value,...`."""
    nodes = []
    for node in text.split():
        resources, _, named = node.partition("@")
        cpus, _, gpus = resources.partition("+")
        labels = dict(pair.split("=") for pair in named.split(",") if pair)
        nodes.append(Node({"CPU": float(cpus), "GPU": float(gpus or 0)}, labels))
    return nodes


@pytest.mark.parametrize(
    ("overrides", "nodes", "keys"),
    [
        # Sums.
        ("rollout.num_cpus=4", "16", ""),
        ("rollout.num_cpus=4", "4 4", "rollout.num_cpus 16 8"),
        (
            SCORED,
            "13+8",
            "rollout.num_cpus reward.num_cpus scoring.reference.num_workers scoring.reference.num_cpus 14 13",
        ),
        (SCORED, "14+1", "scoring.reference.num_gpus scoring.value.num_gpus 2 1"),
        # An actor has everything from one node.
        ("rollout.num_cpus=4", " ".join(["2"] * 10), "rollout 4"),
        (SCORED, " ".join(["2+1"] * 10), "reference 3"),
        (LARGE, "5 4", ""),
        (LARGE, "5 2 2", "rollout 3"),
        (SPLIT, "4+4 4+4", ""),
        (SPLIT, "8+7", "rollout.num_engines rollout.tensor_parallel_size 8 7"),
        (SPLIT, "4+3 4+3 4+2", "rollout 1"),
        # Parts of a GPU are parts of one: 2 x 0.6 + 4 x 0.2 fit, 0.8 is left of no GPU.
        (SHARED, "8+2", ""),
        (f"{SHARED} rollout.num_engines=4 rollout.num_gpus=0.2", "8+2", ""),
        (f"{SHARED} rollout.num_engines=1 rollout.num_gpus=0.8", "8+2", "rollout 0.8"),
        # Labels.
        (f"{GPUS} {ENGINES} trainer.placement.train.role=train", KINDS, ""),
        (f"{GPUS} {ENGINES} trainer.placement.train.role=rollout", KINDS, "role=rollout"),
        (f"{GPUS} {ENGINES} trainer.placement.rollout.zone=b", KINDS, "role=rollout,zone=b"),
        ("reward.num_cpus=5 trainer.placement.reward.role=train", KINDS, "advantage 5 role=train"),
        (
            "rollout.num_engines=1 rollout.num_cpus=6 trainer.placement.rollout.kind=small",
            "20 4@kind=small 4@kind=small",
            "rollout 6",
        ),
        # Pools that grow leave the tasks their CPUs; engines that hold GPUs stop where there are no more of them.
        (ELASTIC, "6+2", ""),
        (ELASTIC, "5+2", "rollout.min_engines rollout.num_cpus 6 5"),
        ("rollout.max_engines=6", "10", ""),
        ("rollout.max_engines=6", "8", "rollout.max_engines=6 5 4"),
        ("rollout.max_engines=60 rollout.num_gpus=1", "12+5", ""),
        (f"rollout.max_engines=60 {ENGINES}", "4 8@role=rollout", ""),
        # Hosts of environments.
        (HOSTS, "13", ""),
        (HOSTS, "12", "agent.hosts agent.host_cpus 13 12"),
        (f"{HOSTS} trainer.placement.agent.role=cpu", "7 6@role=cpu", ""),
        (f"{HOSTS} trainer.placement.agent.role=cpu", "20 4@role=cpu", "agent 2"),
        (f"{HOSTS} agent.min_hosts=1", "9", ""),
        (f"{HOSTS} agent.min_hosts=1", "8", "agent.min_hosts agent.host_cpus 9 8"),
        (f"{HOSTS} agent.min_hosts=1", "10", "agent.hosts=3 2 1"),
        (f"data.recorded_run=runs/x data.train_files=null data.val_files=null {HOSTS}", "4", ""),
    ],
)
def test_nodes_that_hold_the_run_and_others(overrides, nodes, keys, named):
    stages = small(*overrides.split()).stages
    if not keys:
        check_resources(stages, None, cluster(nodes))
        return
    with pytest.raises(ConfigError) as refused:
        check_resources(stages, None, cluster(nodes))
    named(refused.value, keys)


def test_the_filter_is_placed_with_the_prompts():
    filtered = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc")
    stages = small(*filtered, "trainer.placement.prompts.role=cpu").stages
    assert [stage.name for stage in stages if stage.labels == {"role": "cpu"}] == ["prompts", "filter"]


def test_a_local_ray_has_no_labels(named):
    with pytest.raises(ConfigError) as refused:
        validate(good(*SMALL, "trainer.ray_num_cpus=16", ENGINES))
    named(refused.value, "role=rollout")


def test_the_fewest_engines_are_counted():
    numbers = small(*ELASTIC.split())
    assert numbers.cpus == 2 * 1 + 2 * 1 + 1 + 1 and numbers.gpus == 2
    text = shown(*ELASTIC.split())
    assert "2 up to 6 x 1 CPU + 1 GPU" in text and "at least 6 CPUs, 2 GPUs" in text


def test_stages_on_their_nodes():
    shared = SHARED.split()
    numbers, nodes = small(*shared), cluster("2+1 2+1 2")
    placed_stages = place(numbers.stages, nodes)
    assert list(lines(placed_stages)) == [
        "2 CPUs and 0 GPUs: prompts; reward, advantage",
        "2 nodes of 2 CPUs and 1 GPUs: GPU 0: train 0.6 + rollout 0.4",
    ]
    console = Console(file=io.StringIO(), width=400)
    console.print(render(numbers, placed_stages))
    assert "GPU 0: train 0.6 + rollout 0.4" in console.file.getvalue()
    placed = small(*shared, "trainer.placement.train.role=big")
    assert "2 x 1 CPU + 0.6 GPU on nodes labelled role=big" in shown(*shared, "trainer.placement.train.role=big")
    assert place(placed.stages, nodes) == []
    big = place(placed.stages, [*nodes, *cluster("8+4@role=big")])
    assert "8 CPUs and 4 GPUs (role=big): GPU 0 to 1: train 0.6; GPU 2 to 3: free" in list(lines(big))
