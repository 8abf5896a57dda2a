"""Settings of episodes that cannot be: one sentence each, with the key and what to do."""

import pytest

from pipeline.config.agent import AgentConfig
from pipeline.plan.checks import check
from pipeline.plan.plan import plan
from tests.plan.test_checks import good, refusal

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
    ("overrides", "words"),
    [
        (
            "agent.command=[python,a.py] agent.episodes_per_process=2",
            "agent.episodes_per_process=2 with agent.command=['python', 'a.py']: a command serves one episode",
        ),
        (
            "agent.command=[python,a.py] agent.hosts=2",
            "agent.command=['python', 'a.py'] with agent.hosts=2: it asks the policy at an address of the engine's own",
        ),
        (f"{GAME} agent.hosts=2 agent.named.a.command=[b]", "agent.named.a.command=['b'] with agent.hosts=2: it asks"),
        (f"{GAME} agent.hosts=2 agent.min_hosts=3", "agent.min_hosts=3 is above agent.hosts=2; lower it"),
        (f"{GAME} agent.min_hosts=1", "agent.min_hosts=1 is above agent.hosts=0; lower it"),
        (f"{GAME} agent.hosts=-1", "agent.hosts=-1 must be at least 0"),
        ("agent.hosts=1", "agent.hosts=1 would hold nothing without agent.environment"),
        (f"{GAME} agent.named.a.hosts=2", "agent.named.a.hosts: all agents share the hosts; set agent.hosts"),
        ("agent.environment=HigherLower", "'HigherLower' is not the name of a class; write module:Class"),
        ("agent.environment=/code/my_game.py", "is not the name of a class"),
        ("agent.environment=my_game:1st", "is not the name of a class"),
        ("agent.environment=my-game:Higher", "is not the name of a class"),
        ("agent.tools=[my_tools]", "agent.tools[0]='my_tools' is not the name of a tool"),
        ("agent.tools=[a:b,mcp-server]", "agent.tools[1]='mcp-server' is not"),
        ("agent.tools=[mcp:]", "agent.tools[0]={'mcp': None} is no text; write it in quotes, such as"),
        ("agent.tools=['mcp:']", "agent.tools[0]='mcp:' is not the name of a tool; write module:function"),
        ("agent.environment=openenv:localhost:8000", "is not the name of a class"),
        ("agent.tools=[a:b,c:d,a:b]", "agent.tools[2]=a:b is given twice"),
        ("agent.program=run", "agent.program='run' is not the name of a function; write module:function"),
        (f"{GAME} agent.program=a:run", "agent.program=a:run drives the episodes itself"),
        (f"{TOOLS} agent.program=a:run", "agent.program=a:run drives the episodes itself"),
        (f"{TOOLS} agent.command=[python]", "agent.command=['python'] drives the episodes itself"),
        ("agent.program=a:run agent.command=[python]", "agent.command=['python'] drives the episodes itself"),
        (f"agent.program=a:run {SCORE}", "custom_reward_function.path=score.py does nothing: the environment or the"),
        (f"{GAME} agent.isolation=bubblewrap", "agent.isolation=bubblewrap must be one of none, namespaces"),
        (
            "agent.isolation=namespaces agent.command=[a]",
            "agent.isolation=namespaces leaves environment processes without a netw",
        ),
        (
            "agent.isolation=namespaces agent.environment=openenv:ws://a:1/x",
            "isolation=namespaces leaves environment processes wi",
        ),
        (f"{TOOLS} agent.isolation=namespaces agent.named.a.tools=['mcp:server']", "agent.isolation=namespaces leaves"),
        (
            f"{TOOLS} agent.named.a.isolation=namespaces agent.named.a.tools=['mcp:a']",
            "agent.named.a.isolation=namespaces leaves",
        ),
        (
            "agent.isolation=namespaces agent.tools=[pipeline.agent.python_tool:python]",
            "agent.isolation=namespaces, and the tool pipeline.agent.python_tool isolates each call itself",
        ),
        (f"{GAME} agent.env_vars.a-b=1", "'a-b' is not the name of an environment variable"),
        ("agent.kwargs.highest=31", "agent.environment is not set; leave them out"),
        (f"{TOOLS} agent.reward=environment", "agent.reward=environment needs the rewards of agent.environment"),
        (f"{TOOLS} agent.reward=sum", "agent.reward=sum needs the rewards of agent.environment"),
        (f"{GAME} agent.reward=both", "must be one of environment, function, sum, null"),
        (f"{TOOLS} agent.parser=none", "no call of a tool would be found"),
        (f"{TOOLS} agent.max_turns=1", "could call a tool and never read its reply"),
        (f"{GAME} agent.max_turns=0", "agent.max_turns=0 must be at least 1"),
        (f"{GAME} agent.open_timeout_s=601", "agent.open_timeout_s=601 is above agent.episode_timeout_s=600"),
        (f"{TOOLS} agent.step_timeout_s=601", "agent.step_timeout_s=601 is above agent.episode_timeout_s=600"),
        (f"{GAME} agent.episode_timeout_s=1800", "trainer.deadlines.chunk=1800 is not above agent.episode_timeout_s"),
        (f"{GAME} {SCORE}", "custom_reward_function.path=score.py does nothing: the environment or the program"),
        (f"{GAME} reward.functions.mine.path=score.py", "reward.functions.mine does nothing"),
        (f"{GAME} reward.rule_kwargs.gsm8k.method=strict", 'reward.rule_kwargs={"gsm8k": {"method": "strict"}} does'),
        (f"{GAME} reward.model.path=judge", "reward.model.path=judge does nothing"),
        (f"{GAME} rollout.ignore_eos=true", "rollout.ignore_eos=true: an answer would not end"),
        (f"{TOOLS} rollout.stop=[end]", "a text could end an answer inside a call"),
        (f"{GAME} agent.max_turn_tokens=513", "agent.max_turn_tokens=513 is above data.max_response_length=512"),
        (f"{GAME} agent.max_turn_tokens=4 rollout.min_tokens=5", "rollout.min_tokens=5 is above agent.max_turn_tokens"),
        ("agent.named.a.tools=[calc]", "agent.named.a.tools[0]='calc' is not the name of a tool"),
        (
            "agent.named.a.tool=[a:b]",
            "there is no key agent.named.a.tool; the keys of an agent are environment, kwargs",
        ),
        ("agent.named.a.named={}", "there is no key agent.named.a.named"),
        ("agent.named.a.max_turns=few", "agent.named.a.max_turns='few' does not fit; expected a whole number"),
        ("agent.named.a.max_turns=0", "agent.named.a.max_turns=0 must be at least 1"),
        ("agent.named.a.late=soon", "agent.named.a.late=soon must be one of error, score"),
        ("agent.named.a.kwargs.x=1", "agent.named.a.kwargs are arguments of the environment, and agent.named.a.envi"),
        (
            f"agent.max_turns=1 agent.named.a.{TOOLS[6:]}",
            "agent.named.a.tools=['my_tools:calc'] with agent.max_turns=1",
        ),
        (
            f"agent.named.a.{GAME[6:]} agent.named.a.{TOOLS[6:]} rollout.stop=[x]",
            "with agent.named.a.tools=['my_tools:",
        ),
        (f"agent.named.a.{GAME[6:]} agent.named.a.episode_timeout_s=1900", "not above agent.named.a.episode_timeout_s"),
        ("agent.env_vars.A=[1]", "agent.env_vars.A=[1] is no text that an environment variable can hold"),
        ('agent.env_vars.A="a\\x00"', "agent.env_vars.A='a\\x00' is no text that an environment variable can hold"),
        ("agent.command=[python,a.py,[b]]", "agent.command[2]=['b'] is no text that a command can hold; write it in"),
        ("agent.named.a:b.late=score", "agent.named: 'a:b' is not the name of an agent"),
        (f"{GAME} agent.named.b.environment=a:B {SCORE}", "custom_reward_function.path=score.py does nothing"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: str, words: str) -> None:
    assert words in refusal(*overrides.split())


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        ("agent.max_turns=3", "agent.max_turns=3"),
        (f"{GAME} agent.max_contexts=2", "agent.max_contexts=2"),
        ("agent.program=a:run agent.max_contexts=2", ""),
        (f"{TOOLS} agent.same_seed_in_group=false", "agent.same_seed_in_group=false"),
        (f"data.recorded_run=r data.train_files=null data.val_files=null {GAME} agent.late=score", "agent.late=score"),
        (f"{GAME} agent.on_malformed=end agent.max_turns=3 agent.same_seed_in_group=false agent.step_timeout_s=3", ""),
        (f"{TOOLS} agent.on_malformed=end agent.max_parallel_calls=1 agent.parser=hermes", ""),
    ],
)
def test_settings_that_nothing_reads_are_noted(overrides: str, unread: str) -> None:
    notes = [note for note in plan(good(*overrides.split())).notes if "read by nothing" in note]
    assert notes == ([f"set, and read by nothing in this run: {unread}"] if unread else [])


def test_what_is_wrong_with_the_section_is_said_once() -> None:
    assert refusal(GAME, "agent.max_turns=0", "agent.named.a.late=score").count("agent.max_turns=0") == 1
    text = refusal(TOOLS, "agent.max_turns=1", "agent.named.a.max_parallel_calls=2")
    assert text.count("could call a tool") == 1


def test_a_name_takes_what_it_leaves_out_from_the_section() -> None:
    section = AgentConfig("a:Game", {"most": 3}, max_turns=5, late="score")
    section.named = {"longer": {"max_turns": 9}, "calc": {"tools": ["b:c"]}, "other": {"environment": "a:Other"}}
    agents = section.agents()
    assert agents["longer"] == AgentConfig("a:Game", {"most": 3}, max_turns=9, late="score")
    # Code of its own replaces all code of the section.
    assert agents["calc"] == AgentConfig(tools=["b:c"], max_turns=5, late="score")
    assert agents["other"] == AgentConfig("a:Other", max_turns=5, late="score")
    # What verl's files name is the section, and a single answer, unless the config says otherwise.
    assert agents["tool_agent"] == agents[None] and not agents["single_turn_agent"].plays
    section.named["tool_agent"] = {"tools": ["d:e"]}
    assert section.agents()["tool_agent"].tools == ["d:e"]
    assert section.scored_by_name() == {
        **dict.fromkeys(("calc", "tool_agent", "single_turn_agent"), "function"),
        **dict.fromkeys((None, "longer", "other"), "environment"),
    }
