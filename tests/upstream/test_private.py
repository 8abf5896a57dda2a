"""Private interfaces of libraries: the installed versions have them, and another version is refused by a sentence."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.tensor._utils as tensor_utils
from peft.utils import transformers_weight_conversion as conversion
from ray._private import services
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import placement_types
from transformers import PreTrainedModel, modeling_utils

from pipeline import upstream
from pipeline.upstream import apart, peft, private, transformers, version_of
from pipeline.upstream import torch as of_torch

MESH = SimpleNamespace(get_all_groups=lambda: [])
CPU = torch.device("cpu")


def test_what_the_library_lacks_is_named_with_its_version() -> None:
    assert private(SimpleNamespace(a=SimpleNamespace(b=3)), "a.b", "torch") == 3
    with pytest.raises(ImportError, match=r"^torch [\w.+]+ has no a\.c in SimpleNamespace, .* requirements/$"):
        private(SimpleNamespace(a=SimpleNamespace(b=3)), "a.c", "torch")
    assert version_of("no-such-package", "torch") == f"torch {torch.__version__}"
    assert version_of("no-such-package") == "no-such-package"


def enter(context: Any) -> None:
    with context:
        pass


GUARDS: list[tuple[Any, str, Callable[[], object]]] = [
    (placement_types, "_StridedShard", lambda: importlib.reload(of_torch)),
    (tensor_utils, "compute_local_shape_and_global_offset", lambda: importlib.reload(of_torch)),
    (distributed_c10d, "_get_default_group", lambda: of_torch.share_deadline(MESH, CPU)),  # type: ignore[arg-type]
    (conversion, peft.CONVERTER, lambda: enter(peft.targets_as_named())),
    (services, "canonicalize_bootstrap_address", lambda: apart.canonical("auto")),
    (PreTrainedModel, transformers.LOADER, lambda: enter(transformers.replaced_loader(print))),
    (PreTrainedModel, transformers.FINISHER, lambda: enter(transformers.replaced_loader(print))),
    (modeling_utils, transformers.OPENER, lambda: enter(transformers.replaced_loader(print))),
]


@pytest.mark.parametrize(("owner", "name", "use"), GUARDS, ids=lambda value: value if isinstance(value, str) else "")
def test_another_version_is_refused(
    owner: Any, name: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError, match="install the version of requirements/"):
        use()


def test_the_groups_of_a_mesh_wait_as_long_as_the_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[Any] = []
    whole = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=SimpleNamespace(_timeout=7)))
    monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: whole)
    monkeypatch.setattr(distributed_c10d, "_set_pg_timeout", lambda *found: set_to.append(found))
    of_torch.share_deadline(SimpleNamespace(get_all_groups=lambda: ["a", "b"]), CPU)  # type: ignore[arg-type]
    assert set_to == [(7, "a"), (7, "b")]
    whole._get_backend = lambda device: SimpleNamespace()
    with pytest.raises(ImportError, match=r"has no options\._timeout"):
        of_torch.share_deadline(MESH, CPU)  # type: ignore[arg-type]


def test_inputs_of_parts_that_fsdp_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    class Part(nn.Module):
        def __init__(self, state: Any) -> None:
            super().__init__()
            self._get_fsdp_state = lambda: state

    policy = torch.distributed.fsdp.MixedPrecisionPolicy()
    state = SimpleNamespace(_mp_policy=policy)
    monkeypatch.setattr(of_torch, "FSDPModule", Part)
    with of_torch.uncast_inputs(Part(state)):
        assert not state._mp_policy.cast_forward_inputs
    assert state._mp_policy is policy and policy.cast_forward_inputs
    for other in (SimpleNamespace(), SimpleNamespace(_mp_policy=None)):
        with pytest.raises(ImportError, match="install the version of requirements/"):
            enter(of_torch.uncast_inputs(Part(other)))


def test_the_loader_of_transformers_is_replaced_within_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        PreTrainedModel, transformers.LOADER, staticmethod(lambda model, state_dict, checkpoint_files, load_config: 1)
    )
    assert transformers.knows_loader()
    with transformers.replaced_loader(lambda read, *args: calls.append((read(*args), args))):
        PreTrainedModel._load_pretrained_model("m", "s", "f", "c")  # type: ignore[arg-type]
    assert calls == [(1, ("m", "s", "f", "c"))]
    PreTrainedModel._load_pretrained_model("m", "s", "f", "c")  # type: ignore[arg-type]
    assert len(calls) == 1
    monkeypatch.setattr(PreTrainedModel, transformers.LOADER, staticmethod(lambda model, files: 1))
    assert not transformers.knows_loader()


def test_adapters_are_switched_off_within_the_block() -> None:
    layers = [SimpleNamespace(_disable_adapters=value) for value in (False, True)]
    with peft.switched_off(layers):
        assert all(layer._disable_adapters for layer in layers)
    assert [layer._disable_adapters for layer in layers] == [False, True]
    with pytest.raises(ImportError, match="has no _disable_adapters"):
        enter(peft.switched_off([SimpleNamespace()]))


def test_only_this_package_reads_private_names() -> None:
    """Names of other libraries that begin with `_`, as modules or imported from them."""
    root = Path(upstream.__file__).parents[1]
    found = set()
    for path in root.rglob("*.py"):
        if path.parent == root / "upstream":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("pipeline", "__")):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {f"{path.relative_to(root)}: {name}" for name in names if "._" in name}
    assert found == ALLOWED


ALLOWED = {
    # Used by many projects, and the same in all versions that are supported.
    "models/precision.py: torch.utils._pytree.tree_map",
    "models/repeatable.py: torch.utils._pytree.tree_leaves",
    "rollout/engines/vllm/confirm.py: torch.utils._pytree.tree_leaves",
    "rollout/engines/vllm/confirm.py: torch.utils._python_dispatch.TorchDispatchMode",
    "models/sequence_parallel.py: torch.distributed._functional_collectives.all_to_all_single_autograd",
    # The documented name of NIXL's interface.
    "weights/direct.py: nixl._api.nixl_agent",
    "weights/direct.py: nixl._api.nixl_agent_config",
}
