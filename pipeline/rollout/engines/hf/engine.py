"""The model of `transformers` as the engine, computed by the code of the trainer.

    prompts that wait ─► prefill: each different prompt is read once, also for several samples ─► running rows
    running rows      ─► decode: one token for each row ─► finished rows leave, others go on

1. All running rows are one batch with one KV cache (`cache.py`). A step is one prefill or one decode.
2. A request has its own uniform numbers, one for each token, made from its seed. So its response does not depend on
   the other rows, but for rounding.
3. An update of the weights comes between two steps. To compute the KV again, running rows become waiting ones.
4. Without a cache (`rollout.engine_kwargs.use_cache=false`) each step passes whole rows in the trainer's way. That is
   slow, and it takes every model that can be trained. A finished row passes once more, by itself, for its log-probs: if
   the trainer passes single rows too, both compute the same numbers.
5. Images of prompts are read by the trainer's code (`ImageReader`), each once a prefill.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config.model import LoraConfig, ModelConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.errors import short_reason
from pipeline.generation import EngineOutput, EngineRequest
from pipeline.models.batch import TokenBatch
from pipeline.models.ends import find_ends
from pipeline.models.packing import ModelInputs, pack
from pipeline.models.policy import Policy, load_policy
from pipeline.models.pretrained import differs
from pipeline.models.sharing import Passes
from pipeline.models.state import tensors
from pipeline.models.support import SupportWriter
from pipeline.models.tokenizer import load_tokenizer
from pipeline.models.vision import read
from pipeline.rollout.engines.hf.cache import AHEAD, WindowCache
from pipeline.rollout.engines.hf.row import PartialRow, RouteWriter
from pipeline.rollout.engines.hf.sampling import draw
from pipeline.weights.load import Shard, copy_into

GIB = 1 << 30
log = logging.getLogger(__name__)


class HuggingFace:
    """The model of `transformers` with the protocol `Engine`.

    Args:
        model: settings of the model. Its weights are read from the disk.
        rollout: settings of the engine.
        max_model_len: maximum number of tokens of a row.
        seed: seed for requests without one.
    """

    def __init__(self, model: ModelConfig, rollout: RolloutConfig, max_model_len: int, seed: int) -> None:
        self._device = torch.device("cuda" if rollout.num_gpus else "cpu")
        # Published weights hold merged adapters.
        plain = replace(model, lora=LoraConfig(), enable_gradient_checkpointing=False, activation_offload=False)
        policy = load_policy(replace(plain, dtype=rollout.dtype), longest=max_model_len)
        self.policy: Policy = policy.to(self._device).eval().requires_grad_(False)
        self._targets = dict(tensors(self.policy.lm))
        self._tokenizer = load_tokenizer(model, needs_chat_template=False)
        self._ends = frozenset(find_ends(model, self._tokenizer, {}).ids)
        self._longest, self._most = max_model_len, rollout.max_num_seqs
        self._tokens = max(rollout.max_num_batched_tokens, max_model_len)
        self._shares_prompts = rollout.enable_prefix_caching
        self._vocabulary = self.policy.lm.config.get_text_config().vocab_size
        self._most_support = rollout.max_support
        self._width = self.policy.routers.width if rollout.replay_routes else 0
        if rollout.replay_routes and not self._width:
            raise ValueError(
                f"rollout.replay_routes=true, but {type(self.policy.lm).__name__} of model.path={model.path} has no "
                "routers that can be replayed; set it to false"
            )
        self._random = np.random.default_rng(seed)
        self._version = -1
        self._waiting: list[PartialRow] = []
        self._running: list[PartialRow] = []
        self._cache = WindowCache(self._device)
        self._packs = False
        self.uses_cache = rollout.engine_kwargs.get("use_cache", True) and self._can_cache()
        if not self.uses_cache and self.policy.image_reader is not None:
            # Features of images are placed only in packed rows.
            self._packs = Passes.of(self.policy, "never").packed
        self._cells = self._room(rollout) if self.uses_cache else 0

    def add(self, request_id: str, request: EngineRequest) -> None:
        """Add a request."""
        seed = int(self._random.integers(1 << 62)) if request.seed is None else request.seed
        uniforms = np.random.Generator(np.random.Philox(key=seed)).random(request.sampling.max_tokens)
        ends = frozenset() if request.ignore_eos else self._ends.union(request.ends)
        support = SupportWriter(self._vocabulary, self._most_support) if request.for_training else None
        routes = RouteWriter(self._width) if request.for_training and self._width else None
        self._waiting.append(PartialRow(request_id, request, uniforms, ends, support, routes))

    @torch.inference_mode()
    def step(self) -> list[EngineOutput]:
        """Prefill waiting prompts, if there is room for one, else decode one token of each running row."""
        if self.uses_cache:
            return self._prefill() if self._fits() else self._decode()
        self._running += self._take(len(self._waiting))
        return self._pass_whole()

    @torch.inference_mode()
    def abort(self, request_ids: list[str]) -> None:
        """Forget requests."""
        dropped = set(request_ids)
        self._waiting = [row for row in self._waiting if row.id not in dropped]
        self._keep(lambda row: row.id not in dropped)

    def drain(self) -> list[EngineOutput]:
        """Do nothing: no step is begun ahead."""
        return []

    def load(self, shards: Sequence[Shard], timeout: float, version: int) -> None:
        """Replace the weights in place; see `Engine.load`."""
        with torch.no_grad():
            copy_into(self._targets, shards, timeout, f"policy weights: version {version}")
        self._version = version

    def update(self, shards: Sequence[Shard], timeout: float, version: int, recompute: bool) -> None:
        """Replace the weights while requests run; see `Engine.update`."""
        self.load(shards, timeout, version)
        if recompute:
            self._waiting = self._running + self._waiting
            self._running = []
            self._cache.clear()

    def sleep(self) -> None:
        """Refuse: `EngineFacts.sleep` is False."""
        raise NotImplementedError("the engine hf does not sleep")

    def wake(self, shards: Sequence[Shard], timeout: float, version: int) -> None:
        """Refuse: `EngineFacts.sleep` is False."""
        raise NotImplementedError("the engine hf does not sleep")

    def close(self) -> None:
        """Do nothing: the engine ends with its process."""

    # Steps with a cache.

    def _fits(self) -> int:
        """Return the number of waiting rows for which there is room now."""
        longest = max((row.longest for row in self._running), default=0)
        rows = len(self._running)
        for taken, row in enumerate(self._waiting):
            longest = max(longest, row.longest)
            columns = -(-min(longest, self._longest) // AHEAD) * AHEAD
            rows += 1
            if rows > self._most or (rows > 1 and rows * columns > self._cells):
                return taken
        return len(self._waiting)

    def _take(self, most: int) -> list[PartialRow]:
        """Take waiting rows, as many as `max_num_seqs` leaves room for."""
        count = min(most, self._most - len(self._running))
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def _prefill(self) -> list[EngineOutput]:
        """Read waiting prompts, and sample the first token of each row."""
        prompts: list[PartialRow] = []
        number_of: dict[Any, int] = {}
        places: list[int] = []
        longest = 0
        for row in self._waiting[: self._fits()]:
            key = row.content if self._shares_prompts else row.id
            if key not in number_of:
                wider = max(longest, len(row.tokens))
                if prompts and (len(prompts) + 1) * wider > self._tokens:
                    break
                longest, number_of[key] = wider, len(prompts)
                prompts.append(row)
            places.append(number_of[key])
        rows = self._take(len(places))
        self._note()
        logits, cache = self._cache.prefill(self.policy, self._batch(prompts))
        for row, routes in zip(rows, self._noted(len(prompts), places), strict=False):
            if row.routes:
                row.routes.begin(routes[len(routes) - len(row.tokens) :])
        outputs = self._sample(rows, logits[places])
        going = [number for number, row in enumerate(rows) if not row.reason]
        self._cache.join(cache, [places[number] for number in going])
        self._running += [rows[number] for number in going]
        return outputs

    def _decode(self) -> list[EngineOutput]:
        rows = self._running
        self._note()
        logits = self._cache.decode(self.policy, [row.ids[-1] for row in rows])
        for row, routes in zip(rows, self._noted(len(rows), range(len(rows))), strict=False):
            if row.routes:
                row.routes.add(routes)
        outputs = self._sample(rows, logits)
        self._keep(lambda row: not row.reason)
        return outputs

    def _keep(self, stays: Callable[[PartialRow], bool]) -> None:
        """Remove the running rows that do not stay."""
        index = [number for number, row in enumerate(self._running) if stays(row)]
        if len(index) < len(self._running):
            order = self._cache.keep(index) if self.uses_cache else index
            self._running = [self._running[number] for number in order]

    def _can_cache(self) -> bool:
        """Compare a cached step with a pass over the whole row; False, with a line in the log, if they differ."""
        ids = [number % self.policy.lm.config.get_text_config().vocab_size for number in range(3, 12)]
        reason = "they differ"
        with torch.inference_mode():
            whole = self._logits(TokenBatch.of([ids, ids[:6]], [[0], [0]]))
            try:
                _, cache = WindowCache(self._device).prefill(self.policy, TokenBatch.of([ids[:-1], ids[:5]]))
                cached = cache.decode(self.policy, [ids[-1], ids[5]])
                self._cell_bytes = cache.cell_bytes
            # Families have caches of their own, and fail with other ones in many ways.
            except Exception as error:  # noqa: BLE001
                reason = short_reason(error)
            else:
                if not differs(cached.float(), whole.float()):
                    return True
        log.warning(
            "the engine hf passes whole rows, which is slow: a step with a KV cache does not compute the numbers of a "
            "whole row for %s (%s)",
            type(self.policy.lm).__name__,
            reason,
        )
        return False

    def _room(self, rollout: RolloutConfig) -> int:
        """Return the number of tokens whose KV fits into the memory of the settings."""
        space = float(rollout.cpu_kvcache_space_gb * GIB)
        if self._device.type == "cuda":
            weights = sum(tensor.nbytes for tensor in self._targets.values())
            total = torch.cuda.get_device_properties(self._device).total_memory
            space = rollout.gpu_memory_utilization * total - weights
        return int(space // self._cell_bytes)

    # Steps without a cache.

    def _batch(self, rows: Sequence[PartialRow], more: Sequence[int] = ()) -> TokenBatch:
        """Return rows in the trainer's form, with the tokens `more` after each."""
        reads = self.policy.image_reader is not None
        images = [row.request.images.encoded if row.request.images else () for row in rows] if reads else None
        return TokenBatch.of([row.request.prompt_ids for row in rows], [[*row.ids, *more] for row in rows], images)

    def _inputs(self, rows: TokenBatch) -> ModelInputs:
        """Lay out rows as the trainer does without shared prompts."""
        reader = self.policy.image_reader
        packs = [[row] for row in range(len(rows))]
        inputs = pack(rows, packs, packed=self._packs, place_images=reader.place if reader else None)
        return inputs.to(self._device)

    def _logits(self, rows: TokenBatch) -> Tensor:
        """Pass whole rows as the trainer does; returns logits [R, V] that predict each row's last token."""
        made = self._inputs(rows)
        self._note()
        last = torch.from_numpy(rows.response_offsets[1:] - 1).to(self._device)
        index = made.logit_index[last]
        hidden = read(self.policy, made.input_ids, index, made.positions, made.packing, made.images)
        return self.policy.logits(hidden)

    def _pass_whole(self) -> list[EngineOutput]:
        """Sample one token of each running row from a pass over the whole row."""
        rows = self._running
        # The last token of a response predicts nothing, so a further one comes after it.
        logits = self._logits(self._batch(rows, [0]))
        self._read_whole(rows)
        self._sample(rows, logits)
        done = [row for row in rows if row.reason]
        for row in done:
            if row.plain:
                row.log_probs = self._rescored(row)
        self._keep(lambda row: not row.reason)
        return [row.output() for row in done]

    def _rescored(self, row: PartialRow) -> list[float]:
        """Compute the log-probs of a response as the trainer does, in one pass over the row."""
        made = self._inputs(self._batch([row]))
        self._note()
        found = self.policy(**made.arguments, temperature=row.request.sampling.temperature or 1.0)
        self._read_whole([row])
        numbers: list[float] = found.log_probs.tolist()
        return numbers

    # Experts.

    def _note(self) -> None:
        """Let the next pass note the experts of its tokens, if they are wanted."""
        if self._width:
            self.policy.routers.note()

    def _noted(self, rows: int, index: Sequence[int]) -> list[np.ndarray]:
        """Return the experts [T, W] of the rows `index`, of a pass over R rows of T tokens; empty without experts."""
        if not self._width:
            return []
        noted = self.policy.routers.noted().view(rows, -1, self._width).cpu().numpy()
        return [noted[number] for number in index]

    def _read_whole(self, rows: Sequence[PartialRow]) -> None:
        """Give rows the experts of a pass over whole rows, in the order of the pass."""
        if not self._width:
            return
        noted = self.policy.routers.noted().cpu().numpy()
        start = 0
        for row in rows:
            length = len(row.tokens)
            if row.routes:
                row.routes.begin(noted[start : start + length])
            start += length if self._packs else len(noted) // len(rows)

    # Tokens.

    def _sample(self, rows: Sequence[PartialRow], logits: Tensor) -> list[EngineOutput]:
        """Add one token to each row, sampled from `logits` [R, V]; returns the rows that have ended."""
        for number, row in enumerate(rows):
            if row.ends and len(row.ids) < row.request.sampling.min_tokens:
                logits[number, list(row.ends)] = -torch.inf
        settings = [row.request.sampling for row in rows]
        chosen, log_probs = draw(logits, settings, [row.uniforms[len(row.ids)] for row in rows])
        sampled = log_probs.gather(1, chosen[:, None])[:, 0].tolist()
        for row, token, log_prob, every in zip(rows, chosen.tolist(), sampled, log_probs, strict=True):
            if row.support:
                row.note_support(every)
            row.ids.append(token)
            row.log_probs.append(log_prob)
            row.versions.append(self._version)
            row.reason = self._ended(row)
        return [row.output() for row in rows if row.reason]

    def _ended(self, row: PartialRow) -> str:
        """Return the reason why a response ends with its last token; "" if it does not."""
        sampling, count = row.request.sampling, len(row.ids)
        if row.ids[-1] in row.ends:
            return "stop"
        if sampling.stop and count > sampling.min_tokens - 1 and self._has_stop(row.ids, sampling.stop):
            return "stop"
        return "length" if count >= sampling.max_tokens or len(row.tokens) >= self._longest else ""

    def _has_stop(self, ids: list[int], texts: Sequence[str]) -> bool:
        """Return True if the last token completes one of the texts."""
        # A character has at most four tokens.
        tail = ids[-4 * max(map(len, texts)) - 4 :]
        text, before = (self._tokenizer.decode(part, skip_special_tokens=True) for part in (tail, tail[:-1]))
        return any(stop in text[max(0, len(before) - len(stop) + 1) :] for stop in texts)
