"""Pipeline stages: each rank has some neighbouring layers of a model.

    stage 0              embedding, layers 0 .. a      hidden states ─►
    stage 1                         layers a .. b      hidden states ─►   ...
    the last stage                  layers y .. z, norm, head             ─► log-probs

A stage is a model of `transformers` in which the modules of other stages are replaced by `Absent`, so its weights have
their usual names. If the head is tied to the embedding, both the first and the last stage have the weight: they take
the same steps, with the sum of their gradients (`schedule.py`), and only the first stage publishes and saves it.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import short_reason
from pipeline.models.layers import deal_layers
from pipeline.models.mesh import PipelineStage


class Absent(nn.Module):
    """In place of a module that another stage has; passes hidden states on."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class _Doubled(nn.Module):
    """In place of a layer, in a trial: 2 x + 1."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return 2 * hidden_states + 1


def cut(lm: Any, stage: PipelineStage) -> None:
    """Replace the modules of other stages in `lm`, in place.

    Args:
        lm: a `transformers` model whose class can be cut (`why_whole`), with weights of any kind.
        stage: the stage that remains.

    Raises ValueError for fewer layers than stages.
    """
    decoder = lm.get_decoder()
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    costs = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder.layers]
    try:
        bounds = deal_layers(costs, embedding.weight.numel(), head.weight.numel(), stage.count)
    except ValueError as error:
        raise ValueError(f"actor.parallel.pipeline={stage.count}: {error}") from error
    own = range(bounds[stage.number], bounds[stage.number + 1])
    # While transformers loads a model, its weights are not tied yet.
    names = {id(parameter): name for name, parameter in lm.named_parameters()}
    tied = head.weight is embedding.weight
    tied |= lm.all_tied_weights_keys.get(names[id(head.weight)]) == names[id(embedding.weight)]
    before = {*lm.state_dict()}
    for number in range(len(costs)):
        if number not in own:
            decoder.layers[number] = Absent()
    if not (stage.first or (stage.last and tied)):
        lm.set_input_embeddings(Absent())
    if not stage.last:
        for name in _after(decoder):
            setattr(decoder, name, Absent())
        lm.set_output_embeddings(Absent())
    if not (stage.last and tied):
        # The loader of transformers would look for the other one.
        lm.all_tied_weights_keys = {}
    # Nor does it report what other stages read.
    lm._keys_to_ignore_on_load_unexpected = {
        *(lm._keys_to_ignore_on_load_unexpected or ()),
        *(f"^{re.escape(name)}$" for name in before - {*lm.state_dict()}),
    }


def _after(decoder: Any) -> list[str]:
    """Return the names of the modules with weights between the layers and the head."""
    others = (decoder.layers, decoder.get_input_embeddings())
    return [
        name
        for name, child in decoder.named_children()
        if child not in others and next(child.parameters(), None) is not None
    ]


def borrowed(lm: Any, stage: PipelineStage) -> frozenset[str]:
    """Return the names of weights of this stage that the first stage has too, and publishes and saves."""
    weight = getattr(lm.get_input_embeddings(), "weight", None)
    if stage.first or weight is None:
        return frozenset()
    return frozenset(name for name, value in lm.named_parameters(remove_duplicate=False) if value is weight)


@torch.no_grad()
def why_whole(config: Any, build: Any) -> str | None:
    """Return why models of a class cannot be cut into stages, as a clause; None if they can.

    A model of the class, without layers, is tried: between the embedding and the head there must be nothing but layers
    and, after them, one norm.

    Args:
        config: configuration of the model.
        build: makes a model from the configuration, such as `AutoModelForCausalLM.from_config`.
    """
    try:
        with torch.device("meta"):
            lm = build(config)
        decoder, head = lm.get_decoder(), lm.get_output_embeddings()
        if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or decoder is lm:
            return "its decoder has no list of layers"
        if not isinstance(head, nn.Linear):
            return "its head is not a linear layer"
        after = _after(decoder)
        if len(after) > 1:
            return f"it has weights outside of its layers ({', '.join(after)})"
        for name, rope in list(decoder.named_modules()):
            if hasattr(rope, "inv_freq"):
                decoder.set_submodule(name, type(rope)(decoder.config))
        width = decoder.config.get_text_config().hidden_size
        given = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0))

        def passed() -> Tensor:
            found: Tensor = decoder(inputs_embeds=given, use_cache=False).last_hidden_state
            return found

        for number in range(len(decoder.layers)):
            decoder.layers[number] = Absent()
        # The norm is known to come after the layers if it changes what they give.
        for name in after:
            setattr(decoder, name, _Doubled())
        decoder.layers[0] = first = _Doubled()
        doubled = first(given)
        if not torch.equal(passed(), 2 * doubled + 1 if after else doubled):
            return "it computes more than its layers and a norm after them"
    # Each class has errors of its own.
    except Exception as error:  # noqa: BLE001
        return f"it cannot be tried: {short_reason(error)}"
    return None
