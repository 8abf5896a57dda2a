"""References for the trainer's speed: a loop of plain torch, and single kernels of attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu.battery import Figures, Options, attempt
from benchmarks.gpu.measure import fastest, peak_gib, rates
from benchmarks.gpu.shapes import SHAPES, batch, model_folder


def plain(options: Options) -> Figures:
    """Old log-probs, PPO loss, backward pass and AdamW of plain torch: rows by length, padded on the right."""
    import torch
    from torch.nn.utils import clip_grad_norm_
    from transformers import AutoModelForCausalLM

    device, shape = torch.device(options.device), SHAPES[options.shape]
    if options.device == "cuda":
        torch.cuda.set_device(0)
    folder = model_folder(options.shape, options.work, options.device)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.to(device)
    if options.shape != "tiny":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    data = batch(shape)
    order, groups = sorted(range(len(data)), key=lambda row: data.lengths[row]), [[]]  # type: ignore[var-annotated]
    for row in order:
        # The logits of a pass exist at once here, in float32.
        if groups[-1] and data.lengths[row] * (len(groups[-1]) + 1) > shape.budget // 4:
            groups.append([])
        groups[-1].append(row)

    def log_probs(group: list[int]) -> tuple[Any, Any]:
        ids = torch.zeros(len(group), max(data.lengths[row] for row in group), dtype=torch.int64)
        places, tokens = [], []
        for number, row in enumerate(group):
            prompt = data.prompt_ids[data.prompt_offsets[row] : data.prompt_offsets[row + 1]]
            span = slice(data.row_offsets[row], data.row_offsets[row + 1])
            response = data.response_ids[span]
            length = len(prompt) + len(response)
            ids[number, :length] = torch.tensor([*prompt, *response])
            places.append(number * ids.shape[1] + torch.arange(len(prompt) - 1, length - 1))
            tokens.append(torch.arange(span.start, span.stop))
        index, chosen = torch.cat(places).to(device), torch.cat(tokens)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            hidden = model.model(input_ids=ids.to(device)).last_hidden_state.flatten(0, 1)[index]
            logits = model.lm_head(hidden).float()
        targets = torch.as_tensor(data.response_ids)[chosen].to(device)
        return -torch.nn.functional.cross_entropy(logits, targets.long(), reduction="none"), chosen

    def step() -> float:
        with torch.no_grad():
            old = [log_probs(group)[0] for group in groups]
        total = 0.0
        for group, before in zip(groups, old, strict=True):
            new, chosen = log_probs(group)
            advantages = torch.as_tensor(data.advantages)[chosen].to(device)
            ratio = (new - before).exp()
            loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / len(data.response_ids)
            loss.backward()
            total += loss.item()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    loss = step()
    seconds = fastest(options.repeats - 1, step, device)
    return {"pg_loss": loss, **rates(data, options, seconds, passes=4), "peak_gib": peak_gib(device)}


def attention(options: Options) -> Figures:
    """Time one layer's attention over as many tokens as a pass has, forward and backward, in ms, by kernel."""
    import torch
    import torch.nn.functional as F

    device, shape = torch.device(options.device), SHAPES[options.shape]
    if options.device == "cuda":
        torch.cuda.set_device(0)
    cuda = options.device == "cuda"
    length = shape.prompt + shape.response
    count = max(1, (shape.budget if cuda else shape.budget // 4) // length)
    width, dtype = shape.hidden // shape.heads, torch.bfloat16 if cuda else torch.float32

    def tensors(batch: int, tokens: int) -> list[Any]:
        return [
            torch.randn(batch, heads, tokens, width, device=device, dtype=dtype, requires_grad=True)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        ]

    def timed(run: Callable[..., Any], inputs: list[Any]) -> Figures:
        def both() -> None:
            run(*inputs).float().sum().backward()

        return {"ms": 1e3 * fastest(max(3, options.repeats), both, device)}

    sdpa = partial(F.scaled_dot_product_attention, enable_gqa=True)
    rows, total = torch.arange(count, device=device).repeat_interleave(length), count * length

    def masked() -> Figures:
        places = torch.arange(total, device=device)
        mask = (rows[:, None] == rows[None]) & (places[:, None] >= places[None])
        return timed(partial(sdpa, attn_mask=mask), tensors(1, total))

    def flex() -> Figures:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not cuda:
            return {"left_out": "flex_attention has no backward pass on CPUs"}
        mask = create_block_mask(
            lambda b, h, q, k: (rows[q] == rows[k]) & (q >= k), None, None, total, total, device=options.device
        )
        compiled = torch.compile(flex_attention)
        return timed(partial(compiled, block_mask=mask, enable_gqa=True), tensors(1, total))

    def varlen() -> Figures:
        if not cuda:
            return {"left_out": "the kernel for rows end to end is CUDA's"}
        from torch.nn.attention.varlen import varlen_attn

        ends = torch.arange(count + 1, device=device, dtype=torch.int32) * length
        heads = [
            torch.randn(total, shape.heads, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        ]
        return timed(lambda q, k, v: varlen_attn(q, k, v, ends, ends, length, length, window_size=(-1, 0)), heads)

    return {
        "rows": count,
        "tokens_of_a_row": length,
        "padded_causal": attempt(lambda: timed(partial(sdpa, is_causal=True), tensors(count, length))),
        "packed_with_a_mask": attempt(masked),
        "packed_flex": attempt(flex),
        "packed_varlen": attempt(varlen),
    }
