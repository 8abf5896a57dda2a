"""The teachers' log-probs and most likely tokens against the plain model's."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline.advantage.stage import Advantage
from pipeline.config import Config
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.derived import scorers, teachers
from pipeline.rows import TEACHER, TEACHER_TOP
from pipeline.scoring.served_teacher import ServedTeacher
from pipeline.scoring.teacher import Teacher
from pipeline.teachers import TeacherRows, taught
from tests.scoring.generated import assert_near, distributions, generated
from tests.scoring.test_reference import chosen, other_model

TOP = 5


def config_of(model: Path, top: int = TOP, **teacher: Any) -> Config:
    config = Config()
    config.model.path, config.algorithm.teacher_coef = str(model), 0.5
    config.actor.distill_coef, config.actor.distill_top_k = float(top > 0), max(top, 1)
    for key, value in teacher.items():
        setattr(config.teacher, key, value)
    return config


def scored(config: Config, table: pa.Table, temperature: float = 1.0, longest: int | None = None) -> pa.Table:
    rows = TeacherRows.of(config.teacher)
    for name, pool in teachers(config).items():
        stage = ServedTeacher if next(iter(pool.values())).url else Teacher
        made = stage(
            *(config.model, scorers(config)[name], name, pool, rows, config.data, config.actor, temperature, longest)
        )
        table = made(table)
    return table


def with_sources(sources: list[str]) -> pa.Table:
    """Generated rows with these data sources, prompts and ground truths."""
    table = generated()
    values = {
        "data_source": sources,
        "prompt": [json.dumps([{"role": "user", "content": f"What is {row}?"}]) for row in range(len(sources))],
        "ground_truth": [json.dumps(str(row)) for row in range(len(sources))],
        "extra_info": ['{"hint": "none"}'] * len(sources),
    }
    for name, column in values.items():
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(place), pa.array(column))
    return table


@pytest.fixture(scope="module")
def others(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two teachers with the policy's vocabulary."""
    folder, size = tmp_path_factory.mktemp("teachers"), AutoConfig.from_pretrained(tiny_model).vocab_size
    first = other_model(folder / "first", size)
    model = AutoModelForCausalLM.from_pretrained(first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(folder / "second")
    return [first, folder / "second"]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_the_plain_model(tiny_model: Path, others: list[Path], temperature: float) -> None:
    table = generated()
    done = scored(config_of(tiny_model, path=str(others[0]), max_token_len=30), table, temperature)
    assert done.column_names == [*table.column_names, *TEACHER.names, *TEACHER_TOP.names]
    assert_near(done["teacher_log_probs"], chosen(others[0], table, temperature))
    best = [each.topk(TOP, -1) for each in distributions(others[0], table, temperature)]
    assert done["teacher_top_ids"].to_pylist() == [each.indices.flatten().tolist() for each in best]
    assert_near(done["teacher_top_log_probs"], [each.values.flatten() for each in best])


def test_only_what_is_read_is_written(tiny_model: Path, others: list[Path]) -> None:
    table = generated()
    done = scored(config_of(tiny_model, top=0, path=str(others[0])), table)
    assert done.column_names == [*table.column_names, *TEACHER.names]


def test_each_row_has_the_teacher_of_its_source(tiny_model: Path, others: list[Path]) -> None:
    table = with_sources(["a", "b", "c", "a", "b", "b"])
    named = {"one": {"path": str(others[0]), "sources": ["a", "c"]}, "b": {"path": str(others[1])}}
    done = scored(config_of(tiny_model, named=named), table)
    first, second = (chosen(folder, table, 1.0) for folder in others)
    own = [first, second, first, first, second, second]
    assert_near(done["teacher_log_probs"], [rows[row] for row, rows in enumerate(own)])
    assert done["teacher_top_ids"].null_count == 0
    with pytest.raises(ValueError, match="`data_source` is 'b', for which there is no teacher .teachers take a, c"):
        scored(config_of(tiny_model, named={"one": named["one"]}), table)


def test_a_column_may_choose(tiny_model: Path, others: list[Path]) -> None:
    table = with_sources(["a"] * 6)
    place = table.column_names.index("extra_info")
    info = pa.array([json.dumps({"level": "hard" if row % 2 else "easy"}) for row in range(6)])
    table = table.set_column(place, "extra_info", info)
    named = {"easy": {"path": str(others[0])}, "hard": {"path": str(others[1])}}
    done = scored(config_of(tiny_model, named=named, by="extra_info.level"), table)
    both = [chosen(folder, table, 1.0) for folder in others]
    assert_near(done["teacher_log_probs"], [both[row % 2][row] for row in range(6)])


def adapter(base: Path, folder: Path, seed: int, rank: int) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder)
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    return folder


def test_adapters_on_a_common_base_share_a_pool(tiny_model: Path, tmp_path: Path) -> None:
    table = with_sources(["a", "b", "a", "b", "a", "c"])
    folders = {name: adapter(tiny_model, tmp_path / name, seed, 2 + seed) for seed, name in enumerate("abc")}
    named = {name: {"adapter": str(folder)} for name, folder in folders.items()}
    config = config_of(tiny_model, path=str(tiny_model), named=named)
    assert list(teachers(config)) == ["teacher.a"], "one copy of the base"
    done = scored(config, table)
    merged = {name: chosen(folder / "merged", table, 1.0) for name, folder in folders.items()}
    sources = table["data_source"].to_pylist()
    assert_near(done["teacher_log_probs"], [merged[name][row] for row, name in enumerate(sources)], 1e-4)
    # One adapter alone is merged.
    single = scored(config_of(tiny_model, path=str(tiny_model), adapter=str(folders["b"])), table)
    assert_near(single["teacher_log_probs"], merged["b"], 1e-4)


def test_a_teacher_may_read_a_prompt_of_its_own(tiny_model: Path, others: list[Path]) -> None:
    table = with_sources(["a"] * 6)
    template = "{prompt} It is {ground_truth} ({extra_info.hint})."
    config = config_of(tiny_model, path=str(others[0]), prompt=template)
    config.data.max_prompt_length = 4  # the policy's own prompts are shorter
    done = scored(config, table, longest=8)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {row}? It is {row} (none)."}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for row in range(6)
    ]
    place = table.column_names.index("prompt_ids")
    taught_table = table.set_column(place, table.schema.field(place), pa.array(prompts, pa.list_(pa.int32())))
    assert_near(done["teacher_log_probs"], chosen(others[0], taught_table, 1.0))
    assert done["prompt_ids"].equals(table["prompt_ids"]), "the policy keeps its own"


def test_values_of_a_template_are_not_templates_themselves() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{ground_truth}?"}]
    made = taught("{prompt} {extra_info.a} {other}", messages, 7, {"a": {"b": "{prompt}"}})
    assert made == [messages[0], {"role": "user", "content": '{ground_truth}? {"b": "{prompt}"} {other}'}]


def test_rows_are_checked_when_they_are_read() -> None:
    config = Config()
    config.teacher.named = {"a": {"path": "x", "prompt": "{extra_info.hint}"}, "b": {"path": "y"}}
    rows = TeacherRows.of(config.teacher)
    rows.check("a", None, {"hint": "h"})
    rows.check("b", None, None)
    config.teacher.by = "extra_info.level"
    by_level = TeacherRows.of(config.teacher)
    assert by_level.check("x", None, {"level": "b"}) == "b"
    for level in (["b"], {"b": 1}, 5, None):
        with pytest.raises(ValueError, match="for which there is no teacher"):
            by_level.check("x", None, {"level": level})
    for source, info, words in (("a", {}, "extra_info.hint` is missing"), ("c", {}, "for which there is no teacher")):
        with pytest.raises(ValueError, match=words):
            rows.check(source, None, info)


def test_advantages_are_log_ratios_of_teacher_and_engine(tiny_model: Path, others: list[Path]) -> None:
    table = scored(config_of(tiny_model, path=str(others[0])), generated())
    alone = Advantage(AlgorithmConfig(adv_estimator="zero", teacher_coef=0.5), taught=True)(table)
    wanted = [0.5 * row for row in chosen(others[0], table, 1.0)]  # the engine's log-probs are 0
    assert_near(alone["advantages"], wanted)
    both = Advantage(AlgorithmConfig(teacher_coef=0.5), taught=True)(table)
    rewards = Advantage(AlgorithmConfig())(table)
    assert_near(
        both["advantages"],
        [torch.tensor(row).double() + own for row, own in zip(rewards["advantages"].to_pylist(), wanted, strict=True)],
    )


def sizes_of(table: pa.Table) -> pa.Array:
    """Supports of the sampled token alone."""
    return pa.array([[1] * len(ids) for ids in table["response_ids"].to_pylist()], pa.list_(pa.int32()))


class _Server(BaseHTTPRequestHandler):
    """A server with vLLM's answers, computed by the plain model."""

    model: Any
    broken = False

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "big", "object": "model", "created": 0, "owned_by": "me"}]})

    @torch.no_grad()
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "big" and asked["max_tokens"] == 1
        ids, count = asked["prompt"], asked["prompt_logprobs"]
        log_probs = torch.log_softmax(self.model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        entries: list[dict[str, Any] | None] = [None]
        for place, token in enumerate(ids[1:]):
            best = log_probs[place].topk(count).indices.tolist()
            named = [token, *(one for one in best if one != token)]
            entries.append({str(one): {"logprob": log_probs[place, one].item(), "rank": 1} for one in named})
        choice = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}
        choice["prompt_logprobs"] = None if self.broken else entries
        self._answer({"id": "1", "object": "text_completion", "created": 0, "model": "big", "choices": [choice]})

    def _answer(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def test_a_served_teacher_gives_the_same(tiny_model: Path, others: list[Path]) -> None:
    class Server(_Server):
        model = AutoModelForCausalLM.from_pretrained(others[0], dtype=torch.float32)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        url, table = f"http://127.0.0.1:{server.server_port}/v1", generated()
        served = scored(config_of(tiny_model, url=url), table)
        plain = scored(config_of(tiny_model, path=str(others[0])), table)
        assert served["teacher_top_ids"].equals(plain["teacher_top_ids"])
        for name in ("teacher_log_probs", "teacher_top_log_probs"):
            assert_near(served[name], [torch.tensor(row).double() for row in plain[name].to_pylist()])
        cut = table.set_column(table.column_names.index("support_sizes"), "support_sizes", sizes_of(table))
        cut = cut.set_column(cut.column_names.index("support"), "support", cut["response_ids"])
        with pytest.raises(ValueError, match="were sampled from a part of the vocabulary"):
            scored(config_of(tiny_model, url=url), cut)
        Server.broken = True
        with pytest.raises(RuntimeError, match="teacher at http.* failed: .*it must return prompt_logprobs"):
            scored(config_of(tiny_model, url=url), table)
    finally:
        server.shutdown()
