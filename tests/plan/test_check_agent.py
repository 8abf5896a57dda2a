"""Settings of episodes that cannot be: one sentence each, with the key and what to do."""

import pytest

from pipeline.config.agent import AgentConfig
from pipeline.plan.checks import check
from pipeline.plan.plan import plan
from tests.plan.test_checks import good, refusal
from tests.sentences import Named

GAME = "agent.environment=my_game:HigherLower"
TOOLS = "agent.tools=[my_tools:calc]"
SCORE = "reward.custom_reward_function.path=score.py"


@pytest.mark.parametrize(
    "overrides",
    [
        GAME,
        TOOLS,
        f"{GAME} {TOOLS} agent.reward=sum {SCORE}",
        f"{TOOLS} {SCORE}",
        f"{GAME} agent.reward=function {SCORE} rollout.stop=[end]",
        "agent.environment=/code/my_game.py:HigherLower agent.tools=[/code/tools.py,/code/tools.yaml,a.b.c:d]",
        f"{GAME} agent.max_turns=1 agent.kwargs.highest=31 agent.parser=hermes agent.env_vars.KEY=x",
        f"{GAME} rollout.sleep=true rollout.num_gpus=0.4 trainer.use_gpu=true trainer.gpus_per_worker=0.6",
        f"{GAME} agent.max_turn_tokens=16 rollout.min_tokens=2",
        "agent.program=/code/my_program.py:run agent.max_contexts=3 agent.reward=sum",
        "agent.command=[python,my_agent.py] agent.max_contexts=3 agent.step_timeout_s=900",
        "agent.command=[python,my_agent.py,-x] agent.named.calc.tools=[my_tools:calc]",
        "agent.command=[bin/python,my_agent.py] agent.python=bin/python",
        f"{GAME} agent.named.calc.tools=[my_tools:calc] agent.named.calc.reward=function {SCORE}",
        "agent.kwargs={} agent.named.a.environment=my_game:A agent.named.a.kwargs.most=3 agent.named.b.max_turns=3",
        f"{GAME} agent.named.plain.environment=null {SCORE}",
        f"agent.tools=[mcp:server,'mcp:/a/b','mcp:https://a.b/mcp'] {SCORE}",
        "agent.environment=openenv:wss://a.b:8000/x",
        f"{GAME} {TOOLS} agent.isolation=namespaces agent.named.a.program=a:run agent.named.b.command=[a] "
        "agent.named.b.isolation=none",
        f"{GAME} agent.hosts=4 agent.min_hosts=2 agent.host_cpus=8 trainer.placement.agent.role=cpu",
        f"agent.hosts=1 agent.named.calc.tools=[my_tools:calc] {SCORE}",
        "data.recorded_run=runs/recorded data.train_files=null data.val_files=null rollout.ignore_eos=true " + GAME,
    ],
)
def test_what_fits_passes(overrides: str) -> None:
    check(good(*overrides.split()))


def test_a_command_of_several_words_may_be_a_tool() -> None:
    check(good('agent.tools=["mcp: python server.py --port 1"]', SCORE))


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            "agent.command=[python,a.py] agent.episodes_per_process=2",
            "agent.episodes_per_process agent.command",
        ),
        (
            "agent.command=[python,a.py] agent.hosts=2",
            "agent.command agent.hosts",
        ),
        (f"{GAME} agent.hosts=2 agent.named.a.command=[b]", "agent.named.a.command agent.hosts"),
        (f"{GAME} agent.hosts=2 agent.min_hosts=3", "agent.min_hosts agent.hosts"),
        (f"{GAME} agent.min_hosts=1", "agent.min_hosts"),
        (f"{GAME} agent.hosts=-1", "agent.hosts"),
        ("agent.hosts=1", "agent.hosts"),
        (f"{GAME} agent.named.a.hosts=2", "agent.named.a.hosts"),
        ("agent.environment=HigherLower", "agent.environment"),
        ("agent.environment=/code/my_game.py", "agent.environment"),
        ("agent.environment=my_game:1st", "agent.environment"),
        ("agent.environment=my-game:Higher", "agent.environment"),
        ("agent.tools=[my_tools]", "agent.tools"),
        ("agent.tools=[a:b,mcp-server]", "agent.tools"),
        ("agent.tools=[mcp:]", "agent.tools"),
        ("agent.tools=['mcp:']", "agent.tools"),
        ("agent.environment=openenv:localhost:8000", "agent.environment"),
        ("agent.tools=[a:b,c:d,a:b]", "agent.tools"),
        ("agent.program=run", "agent.program"),
        (f"{GAME} agent.program=a:run", "agent.program agent.environment"),
        (f"{TOOLS} agent.program=a:run", "agent.program agent.tools"),
        (f"{TOOLS} agent.command=[python]", "agent.command agent.tools"),
        ("agent.program=a:run agent.command=[python]", "agent.command agent.program"),
        (f"agent.program=a:run {SCORE}", "reward.custom_reward_function.path"),
        (f"{GAME} agent.isolation=bubblewrap", "agent.isolation"),
        ("agent.isolation=namespaces agent.command=[a]", "agent.isolation agent.command"),
        (
            "agent.isolation=namespaces agent.environment=openenv:ws://a:1/x",
            "agent.isolation",
        ),
        (f"{TOOLS} agent.isolation=namespaces agent.named.a.tools=['mcp:server']", "agent.isolation"),
        (f"{TOOLS} agent.named.a.isolation=namespaces agent.named.a.tools=['mcp:a']", "agent.named.a.isolation"),
        (
            "agent.isolation=namespaces agent.tools=[pipeline.agent.python_tool:python]",
            "agent.isolation",
        ),
        (f"{GAME} agent.env_vars.a-b=1", "agent.env_vars"),
        ("agent.kwargs.highest=31", "agent.kwargs"),
        (f"{TOOLS} agent.reward=environment", "agent.reward"),
        (f"{TOOLS} agent.reward=sum", "agent.reward"),
        (f"{GAME} agent.reward=both", "agent.reward"),
        (f"{TOOLS} agent.parser=none", "agent.tools agent.parser"),
        (f"{TOOLS} agent.max_turns=1", "agent.tools agent.max_turns"),
        (f"{GAME} agent.max_turns=0", "agent.max_turns"),
        (f"{GAME} agent.reset_timeout_s=601", "agent.reset_timeout_s"),
        (f"{TOOLS} agent.step_timeout_s=601", "agent.step_timeout_s"),
        (f"{GAME} agent.episode_timeout_s=1800", "trainer.deadlines.chunk agent.episode_timeout_s"),
        (f"{GAME} {SCORE}", "reward.custom_reward_function.path"),
        (f"{GAME} reward.functions.mine.path=score.py", "reward.functions.mine"),
        (f"{GAME} reward.rule_kwargs.gsm8k.method=strict", "reward.rule_kwargs"),
        (f"{GAME} reward.model.path=judge", "reward.model.path"),
        (f"{GAME} rollout.ignore_eos=true", "rollout.ignore_eos agent.environment"),
        (f"{TOOLS} rollout.stop=[end]", "rollout.stop agent.tools"),
        (f"{GAME} agent.max_turn_tokens=513", "agent.max_turn_tokens"),
        (f"{GAME} agent.max_turn_tokens=4 rollout.min_tokens=5", "rollout.min_tokens agent.max_turn_tokens"),
        ("agent.named.a.tools=[calc]", "agent.named.a.tools"),
        (
            "agent.named.a.tool=[a:b]",
            "agent.named.a.tool",
        ),
        ("agent.named.a.named={}", "agent.named.a.named"),
        ("agent.named.a.max_turns=few", "agent.named.a.max_turns"),
        ("agent.named.a.max_turns=0", "agent.named.a.max_turns"),
        ("agent.named.a.on_timeout=soon", "agent.named.a.on_timeout"),
        ("agent.named.a.kwargs.x=1", "agent.named.a.kwargs"),
        (
            f"agent.max_turns=1 agent.named.a.{TOOLS[6:]}",
            "agent.named.a.tools agent.max_turns",
        ),
        (
            f"agent.named.a.{GAME[6:]} agent.named.a.{TOOLS[6:]} rollout.stop=[x]",
            "rollout.stop agent.named.a.tools",
        ),
        (
            f"agent.named.a.{GAME[6:]} agent.named.a.episode_timeout_s=1900",
            "trainer.deadlines.chunk agent.named.a.episode_timeout_s",
        ),
        ("agent.env_vars.A=[1]", "agent.env_vars.A"),
        ('agent.env_vars.A="a\\x00"', "agent.env_vars.A"),
        ("agent.command=[python,a.py,[b]]", "agent.command"),
        ("agent.named.a:b.on_timeout=score", "agent.named"),
        (f"{GAME} agent.named.b.environment=a:B {SCORE}", "reward.custom_reward_function.path"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: str, keys: str, named: Named) -> None:
    named(refusal(*overrides.split()), keys)


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        ("agent.max_turns=3", "agent.max_turns=3"),
        (f"{GAME} agent.max_contexts=2", "agent.max_contexts=2"),
        ("agent.program=a:run agent.max_contexts=2", ""),
        (f"{TOOLS} agent.same_seed_in_group=false", "agent.same_seed_in_group=false"),
        (
            f"data.recorded_run=r data.train_files=null data.val_files=null {GAME} agent.on_timeout=score",
            "agent.on_timeout=score",
        ),
        (f"{GAME} agent.on_malformed=end agent.max_turns=3 agent.same_seed_in_group=false agent.step_timeout_s=3", ""),
        (f"{TOOLS} agent.on_malformed=end agent.max_parallel_calls=1 agent.parser=hermes", ""),
    ],
)
def test_settings_that_nothing_reads_are_noted(overrides: str, unread: str) -> None:
    notes = [note for note in plan(good(*overrides.split())).notes if "not read" in note]
    assert notes == ([f"set, but not read in this run: {unread}"] if unread else [])


def test_what_is_wrong_with_the_section_is_said_once() -> None:
    assert refusal(GAME, "agent.max_turns=0", "agent.named.a.on_timeout=score").count("agent.max_turns=0") == 1
    text = refusal(TOOLS, "agent.max_turns=1", "agent.named.a.max_parallel_calls=2")
    assert text.count("could call a tool") == 1


def test_a_name_takes_what_it_leaves_out_from_the_section() -> None:
    section = AgentConfig("a:Game", {"most": 3}, max_turns=5, on_timeout="score")
    section.named = {"longer": {"max_turns": 9}, "calc": {"tools": ["b:c"]}, "other": {"environment": "a:Other"}}
    agents = section.agents()
    assert agents["longer"] == AgentConfig("a:Game", {"most": 3}, max_turns=9, on_timeout="score")
    # Code of its own replaces all code of the section.
    assert agents["calc"] == AgentConfig(tools=["b:c"], max_turns=5, on_timeout="score")
    assert agents["other"] == AgentConfig("a:Other", max_turns=5, on_timeout="score")
    # What verl's files name is the section, and a single answer, unless the config says otherwise.
    assert agents["tool_agent"] == agents[None] and not agents["single_turn_agent"].plays
    section.named["tool_agent"] = {"tools": ["d:e"]}
    assert section.agents()["tool_agent"].tools == ["d:e"]
    assert section.scored_by_name() == {
        **dict.fromkeys(("calc", "tool_agent", "single_turn_agent"), "function"),
        **dict.fromkeys((None, "longer", "other"), "environment"),
    }
