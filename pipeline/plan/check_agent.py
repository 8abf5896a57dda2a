"""Check the settings of episodes. Part of `checks.check`. The user's code is not run here, but in `rollout/dry.py`."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from pipeline.config import Config
from pipeline.config.agent import AgentConfig
from pipeline.config.bounds import sentences, violations
from pipeline.derived import uses_agent, uses_engines
from pipeline.imports import is_spec

_FILE = re.compile(r".*\.(?:py|ya?ml)", re.ASCII)
_MCP = re.compile(r"mcp:\s*\S.*")
_OPENENV = re.compile(r"openenv:(?:ws|http)s?://\S+")
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
OF_THE_RUN = {"hosts", "min_hosts", "host_cpus"}
"""Keys of `agent` that hold for the whole run, so a named agent must not set them."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
Spelled = Callable[[str], str]
"""Function from a key of the section `agent` to its name in error texts; see `AgentConfig.spelling`."""


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence per problem with the settings of agents."""
    for named in config.agent.named:
        if not _NAME.fullmatch(named):
            yield f"agent.named: {named!r} is not the name of an agent; write letters, digits, _ and -"
        for key in OF_THE_RUN & set(config.agent.named[named]):
            yield f"agent.named.{named}.{key}: all agents share the hosts; set agent.{key}"
    found: dict[str, None] = {}
    for name, agent in config.agent.declared().items():
        spelled = config.agent.spelling(name)
        own = [] if name is None else violations(agent, "agent.", spelled)
        found |= dict.fromkeys([*own, *_of_agent(replace(config, agent=agent), spelled)])
    # A problem of the section is found again in each agent that inherits the setting.
    yield from (text for text in found if text not in set(violations(config.agent, "agent.")))
    idle = config.agent.hosts and not any(agent.plays for agent in config.agent.declared().values())
    what = "agent.environment, agent.tools and agent.program"
    yield from sentences(config, {f"{{agent.hosts}} is not used without {what}; leave it out": idle})
    if uses_agent(config):
        yield from sentences(config, _rewards(config))


def _of_agent(config: Config, key: Spelled) -> Iterator[str]:
    """Yield one sentence per problem of one agent. The section `agent` of `config` holds the settings of this agent."""
    agent = config.agent
    yield from sentences(config, agent.problems(), key)
    yield from _names(agent, key)
    if agent.plays and uses_engines(config):
        yield from sentences(config, _generation(config), key)


def _names(agent: AgentConfig, key: Spelled) -> Iterator[str]:
    """Yield one sentence per value that is not a valid name of an environment, program, tool, variable or command."""
    if agent.environment is not None and not (_OPENENV.fullmatch(agent.environment) or is_spec(agent.environment)):
        yield (
            f"{key('agent.environment')}={agent.environment!r} is not the name of a class; write module:Class, such as "
            "my_game:HigherLower, the file, such as /code/my_game.py:HigherLower, or openenv:URL"
        )
    if agent.program is not None and not is_spec(agent.program):
        yield (
            f"{key('agent.program')}={agent.program!r} is not the name of a function; write module:function, such as "
            "my_program:run, or the file, such as /code/my_program.py:run"
        )
    for number, tool in enumerate(agent.tools):
        if not isinstance(tool, str):
            yield f"{key('agent.tools')}[{number}]={tool!r} is not text; write it in quotes, such as 'mcp: COMMAND'"
        elif not (is_spec(tool) or any(form.fullmatch(tool) for form in (_FILE, _MCP))):
            yield (
                f"{key('agent.tools')}[{number}]={tool!r} is not the name of a tool; write module:function, such as "
                "my_tools:calc, a file, such as /code/my_tools.py, or mcp: COMMAND or URL"
            )
        elif tool in agent.tools[:number]:
            yield f"{key('agent.tools')}[{number}]={tool} is given twice; leave one of them out"
    for variable, value in agent.env_vars.items():
        if not _VARIABLE.fullmatch(variable):
            yield f"{key('agent.env_vars')}: {variable!r} is not the name of an environment variable"
        if not _is_word(value):
            yield f"{key('agent.env_vars')}.{variable}={value!r} is not text that an environment variable can hold"
    for number, word in enumerate(agent.command):
        if not _is_word(word):
            yield f"{key('agent.command')}[{number}]={word!r} is not text that a command can hold; write it in quotes"


def _is_word(value: object) -> bool:
    """Return True if `value` is text that a process can get as an argument or variable.

    The type is checked since OmegaConf does not check the entries of such lists and mappings.
    """
    return isinstance(value, str) and "\0" not in value


def _rewards(config: Config) -> dict[str, object]:
    """Return sentences on reward settings without effect on episodes, each with a true value if it applies."""
    reward = config.reward
    own = all(agent.scored_by == "environment" for agent in config.agent.declared().values())
    instead = (
        "does nothing: the environment or the program gives the rewards; set agent.reward=sum to add it to them, "
        "agent.reward=function to score with it only, or leave it out"
    )
    table: dict[str, object] = {
        f"{{reward.custom_reward_function.path}} {instead}": own and reward.custom_reward_function.path is not None,
        f"{{reward.rule_kwargs}} {instead}": own and reward.rule_kwargs,
        f"{{reward.model.path}} {instead}": own and reward.model.path is not None,
    }
    for name in reward.functions:
        table[f"reward.functions.{name} {instead}"] = own
    return table


def _generation(config: Config) -> dict[str, object]:
    """Return sentences on generation settings that do not work with episodes, each with a true value if it applies."""
    agent, data, rollout = config.agent, config.data, config.rollout
    return {
        "{rollout.ignore_eos}: an answer would not end before the episode is full; leave it out with "
        "{agent.environment:key} and {agent.tools:key}": rollout.ignore_eos,
        "{rollout.stop} with {agent.tools}: a text could end an answer inside a call; leave it out": (
            rollout.stop and agent.tools
        ),
        "{agent.max_turn_tokens} is above {data.max_response_length}, which all answers and replies of an episode "
        "share; lower it": agent.max_turn_tokens > data.max_response_length,
        "{rollout.min_tokens} is above {agent.max_turn_tokens}, and both count the tokens of one answer; lower it": (
            0 < agent.max_turn_tokens < rollout.min_tokens
        ),
        "{trainer.deadlines.chunk} is not above {agent.episode_timeout_s}: a chunk takes as long as its longest "
        "episode; raise the first or lower the second": config.trainer.deadlines.chunk <= agent.episode_timeout_s,
    }
