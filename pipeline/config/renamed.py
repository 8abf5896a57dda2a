"""Renamed and removed keys and values of settings, each with the sentence that an error about it contains."""

MOVED = {
    "agent.late": "agent.on_timeout",
    "agent.history": "agent.context",
    "agent.open_timeout_s": "agent.reset_timeout_s",
    "rollout.update": "rollout.weight_update",
    "model.lora.publish": "model.lora.weight_sync",
    "scoring.reference.where": "scoring.reference.placement",
    "trainer.early": "trainer.stream_gradients",
}
"""Old key to new key. When the settings in a run's folder are read, the value of an old key goes to the new one."""

RENAMED: dict[str, str] = {
    "rollout.oversample": "oversampling was removed: it trained on short responses first; use algorithm.max_staleness "
    "and rollout.weight_update=in_flight, which let long responses finish while later iterations are generated",
    "rollout.oversample_policy": "oversampling was removed; leave this key out",
    "rollout.partial_tokens": "partial rollouts were removed; rollout.weight_update=in_flight lets a long response "
    "continue with new weights",
    "rollout.scale_up_s": "an elastic pool grows by Ray Data's own autoscaling, which has no such time; leave it out",
    "rollout.scale_down_s": "an elastic pool grows by Ray Data's own autoscaling and keeps its engines; leave it out",
    "algorithm.on_stale": "no row can be older than algorithm.max_staleness any more; leave this key out",
    "stream.order": "every chunk gives the groups of its own prompts, in their order; leave this key out",
    "stream": "every chunk gives the groups of its own prompts, in their order",
    "loss.rpo_alpha": "it was removed; write a loss of your own (loss.type=package.module:function)",
    "loss.desirable_weight": "KTO was removed; leave it out",
    "loss.undesirable_weight": "KTO was removed; leave it out",
    "data.completion_key": "KTO was removed; give pairs of a better and a worse answer",
    "data.label_key": "KTO was removed; give pairs of a better and a worse answer",
    "data.margin_key": "only jobs.reward_model reads margins; leave it out",
    "agent.preload": "write agent.program=FILE.py:run with def run(row), which may use an OpenAI or Anthropic client; "
    "its file is imported once, and each episode is a fork",
    **{old: f"it is called {new} now" for old, new in MOVED.items()},
}
"""Old keys, each with the reason why it is gone and the remedy."""

FORGOTTEN = ("agent.preload",)
"""Removed keys that never changed a result. When the settings in a run's folder are read, these keys are dropped."""

VALUES: dict[str, dict[str, tuple[str, str]]] = {
    "agent.context": {"template": ("rerender", "it is called rerender now")},
    "agent.on_malformed": {"tell": ("retry", "it is called retry now")},
    "agent.isolation": {"auto": ("namespaces", "it meant namespaces; write that")},
    "trainer.weight_transport": {"delta": ("object_store", "it saved bytes and no time; leave this key out")},
}
"""Key to {removed value: (replacement, reason)}."""
