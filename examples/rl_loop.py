"""GRPO on Countdown in one script: the maths of a Slipstream run without Ray, vLLM or FSDP.

Read it from `main` upwards. One iteration is:

1. take `prompts` puzzles, and sample `n` responses to each (`sample`);
2. score every response with the Countdown rule (`score`);
3. compare each score with those of its own group (`grpo_advantages`);
4. take AdamW steps on PPO's clipped loss, one per mini-batch (`update`, `ppo_loss`).

Advantages, loss, gradient clip, weight decay and schedule are those of `experiment=countdown_cpu`, and
`tests/test_rl_loop.py` holds them against the system's own code. The old log-probs of the ratio are those of sampling.
Left out: engines, overlap, checkpoints, the critic, KL penalties, and every reward but one.

Names of tensors end in their shape: B rows, P prompt tokens, T response tokens, L = P + T, V vocabulary.

    make demo-model
    python -m examples.rl_loop --model models/tiny-sft-1 --data data/countdown-1 --iterations 20
    python -m examples.rl_loop --model Qwen/Qwen2.5-0.5B-Instruct --data data/countdown --lr 1e-6 --device cuda
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Generator, Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.reward.rules.countdown import compute_score

CLIP, DUAL_CLIP, MAX_LOG_RATIO, STD_EPS = 0.2, 3.0, 20.0, 1e-6


@dataclass
class Settings:
    """Options of the command line; the defaults are those of the demo."""

    model: str = "models/tiny-sft-1"  # folder or hub name of a model with a chat template
    data: str = "data/countdown-1"  # folder with train.parquet and test.parquet of `jobs.prepare countdown`
    iterations: int = 130  # iterations of the run
    prompts: int = 64  # puzzles of an iteration
    n: int = 8  # responses to each puzzle
    mini_batch: int = 16  # puzzles of an optimiser step; `prompts` is a multiple of it
    micro_batch: int = 256  # responses of one forward and backward pass; changes memory, not the numbers
    max_tokens: int = 32  # response tokens at most
    temperature: float = 1.0  # of sampling, and of the log-probs
    lr: float = 1e-4  # learning rate of the first step; it falls linearly to a tenth
    weight_decay: float = 0.01  # of matrices; vectors have none
    eps: float = 1e-8  # of AdamW
    grad_clip: float = 1.0  # largest norm of the gradient
    test_every: int = 20  # iterations between tests with greedy responses
    test_prompts: int = 256  # puzzles of a test at most
    seed: int = 1  # of the order of puzzles and of sampling
    device: str = "cpu"  # where the model runs


@dataclass
class Rollouts:
    """Prompts, padded on the left, and sampled responses, padded on the right: all responses begin in column P."""

    input_ids_BL: Tensor
    attention_BL: Tensor
    """1 at prompt tokens and response tokens, 0 at padding."""
    mask_BT: Tensor
    """1 at response tokens, their end-of-sequence token included."""
    log_probs_BT: Tensor
    """Log-probs that the tokens were sampled with; 0 at padding."""

    def __getitem__(self, rows: slice) -> "Rollouts":
        return Rollouts(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    @property
    def responses(self) -> list[list[int]]:
        """Token ids of each response without padding."""
        ids_BT = self.input_ids_BL[:, -self.mask_BT.shape[1] :]
        return [ids[mask > 0].tolist() for ids, mask in zip(ids_BT, self.mask_BT, strict=True)]


def positions(attention_BL: Tensor) -> Tensor:
    """[B, L] place of each token in its own sequence, from 0; padding on the left does not count."""
    return (attention_BL.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, prompts: list[list[int]], max_tokens: int, temperature: float, generator: Generator
) -> Rollouts:
    """One response to each of the B `prompts` (token ids), token by token with a KV cache; `temperature` 0 takes the
    likeliest token. `generator` lives on the CPU."""
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    ids_BL, attention_BL = padded["input_ids"], padded["attention_mask"]
    step_ids, cache = ids_BL, None
    running_B = attention_BL.any(dim=1)
    masks, log_probs = [], []
    while len(masks) < max_tokens and running_B.any():
        # With the cache only the newest token goes through the model.
        places = positions(attention_BL)[:, -step_ids.shape[1] :]
        inputs = {"input_ids": step_ids, "attention_mask": attention_BL, "position_ids": places}
        output = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        log_probs_BV = (output.logits[:, -1].float() / (temperature or 1.0)).log_softmax(-1)
        if temperature:
            token_B = torch.multinomial(log_probs_BV.exp().cpu(), 1, generator=generator)[:, 0].to(model.device)
        else:
            token_B = log_probs_BV.argmax(-1)
        token_B = torch.where(running_B, token_B, tokenizer.pad_token_id)
        masks.append(running_B)
        log_probs.append(log_probs_BV.gather(1, token_B[:, None])[:, 0] * running_B)
        step_ids = token_B[:, None]
        ids_BL = torch.cat([ids_BL, step_ids], dim=1)
        attention_BL = torch.cat([attention_BL, running_B[:, None]], dim=1)
        running_B = running_B & (token_B != tokenizer.eos_token_id)
    return Rollouts(ids_BL, attention_BL.long(), torch.stack(masks, dim=1).float(), torch.stack(log_probs, dim=1))


def score(tokenizer: Any, rollouts: Rollouts, rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Scores [B] and accuracies [B] of the responses; `rows` are the B data rows, each with its ground truth."""
    texts = tokenizer.batch_decode(rollouts.responses, skip_special_tokens=True)
    results = [compute_score(text, row["reward_model"]["ground_truth"]) for text, row in zip(texts, rows, strict=True)]
    scores_B = torch.tensor([result["score"] for result in results], dtype=torch.float64)
    return scores_B, torch.tensor([result["acc"] for result in results], dtype=torch.float64)


def grpo_advantages(scores_B: Tensor, n: int) -> Tensor:
    """[B] A = (R - mean) / (std + 1e-6) within each group of `n` rows (Shao et al. 2024, section 4.1.2).

    A group whose scores all agree says nothing about which response is better, so its advantages are exactly 0.
    """
    groups = scores_B.view(-1, n)
    deviations = groups - groups.mean(dim=1, keepdim=True)
    advantages = deviations / (groups.std(dim=1, keepdim=True) + STD_EPS)
    agree = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return torch.where(agree, 0.0, advantages).flatten()


def response_log_probs(model: Any, rollouts: Rollouts, temperature: float) -> Tensor:
    """[B, T] log-probs of the response tokens under the model as it is now; carries the gradient."""
    length = rollouts.mask_BT.shape[1]
    places = positions(rollouts.attention_BL)
    inputs = {"input_ids": rollouts.input_ids_BL, "attention_mask": rollouts.attention_BL, "position_ids": places}
    # The logits at a token predict the next one.
    logits_BTV = model(**inputs, logits_to_keep=length + 1).logits[:, :-1].float()
    log_probs_BTV = (logits_BTV / temperature).log_softmax(-1)
    return log_probs_BTV.gather(2, rollouts.input_ids_BL[:, -length:, None])[:, :, 0]


def ppo_loss(log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over response tokens of PPO's clipped loss, max(-A r, -A clip(r, 0.8, 1.2)) (Schulman et al. 2017).

    Where A < 0 the loss is at most -3 A (dual clip, Ye et al. 2020), so that one token whose probability rose a lot on
    a bad response cannot dominate the gradient.
    """
    log_ratio = torch.where(mask_BT > 0, log_probs_BT - old_log_probs_BT, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages = advantages_B[:, None].float()
    loss_BT = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    loss_BT = torch.where(advantages < 0, torch.minimum(loss_BT, -advantages * DUAL_CLIP), loss_BT)
    return (loss_BT * mask_BT).sum()


def build_optimizer(model: Any, settings: Settings) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW and its schedule: linear from `lr` to a tenth of it at the last step of the run."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.999), eps=settings.eps)
    last_step = max(1, settings.iterations * (settings.prompts // settings.mini_batch) - 1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.9 * min(1.0, step / last_step))


def update(
    model: Any, optimizer: Any, scheduler: Any, rollouts: Rollouts, advantages_B: Tensor, settings: Settings
) -> dict[str, float]:
    """One optimiser step for each mini-batch; mean loss and mean gradient norm of the steps."""
    losses, norms = [], []
    mini_rows = settings.mini_batch * settings.n
    for start in range(0, len(advantages_B), mini_rows):
        end = start + mini_rows
        # The loss is a mean over the tokens of the whole mini-batch, so micro-batches do not change it.
        tokens = rollouts[start:end].mask_BT.sum().clamp(min=1)
        optimizer.zero_grad()
        total = 0.0
        for first in range(start, end, settings.micro_batch):
            rows = slice(first, min(first + settings.micro_batch, end))
            part = rollouts[rows]
            log_probs_BT = response_log_probs(model, part, settings.temperature)
            loss = ppo_loss(log_probs_BT, part.log_probs_BT, advantages_B[rows], part.mask_BT) / tokens
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip).item())
        losses.append(total)
        optimizer.step()
        scheduler.step()
    return {"actor/pg_loss": sum(losses) / len(losses), "actor/grad_norm": sum(norms) / len(norms)}


def train(settings: Settings) -> Iterator[dict[str, float]]:
    """Run the loop; yields the metrics of the model as it is given, and then those of each iteration."""
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32).to(settings.device)
    train_rows = pq.read_table(Path(settings.data, "train.parquet")).to_pylist()
    test_rows = pq.read_table(Path(settings.data, "test.parquet")).to_pylist()[: settings.test_prompts]
    generator = Generator().manual_seed(settings.seed)
    optimizer, scheduler = build_optimizer(model, settings)

    def rollout(rows: list[dict[str, Any]], temperature: float) -> Rollouts:
        chats = [row["prompt"] for row in rows]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
        return sample(model, tokenizer, prompts, settings.max_tokens, temperature, generator)

    def test() -> dict[str, float]:
        _, accuracies_B = score(tokenizer, rollout(test_rows, temperature=0.0), test_rows)
        return {"val/acc": accuracies_B.mean().item()}

    yield {"iteration": 0, **test()}
    order: list[int] = []
    for iteration in range(1, settings.iterations + 1):
        begun = time.perf_counter()
        while len(order) < settings.prompts:
            order += torch.randperm(len(train_rows), generator=generator).tolist()
        chosen, order = order[: settings.prompts], order[settings.prompts :]
        rows = [train_rows[index] for index in chosen for _ in range(settings.n)]
        rollouts = rollout(rows, settings.temperature)
        scores_B, _ = score(tokenizer, rollouts, rows)
        advantages_B = grpo_advantages(scores_B, settings.n).to(model.device)
        metrics = update(model, optimizer, scheduler, rollouts, advantages_B, settings)
        metrics["critic/score/mean"] = scores_B.mean().item()
        metrics["response_length/mean"] = rollouts.mask_BT.sum(1).mean().item()
        metrics["timing_s/step"] = time.perf_counter() - begun
        if iteration % settings.test_every == 0 or iteration == settings.iterations:
            metrics |= test()
        yield {"iteration": iteration, **metrics}


def main(arguments: list[str] | None = None) -> None:
    """Print one line for each iteration."""
    parser = argparse.ArgumentParser(prog="python -m examples.rl_loop", description="GRPO on Countdown in one script.")
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default, help="default: %(default)s")
    for metrics in train(Settings(**vars(parser.parse_args(arguments)))):
        print("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)


if __name__ == "__main__":
    main()
