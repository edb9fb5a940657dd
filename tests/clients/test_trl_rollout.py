"""``hfgen.trl.rollout`` in TRL's GRPO trainer: ratios, seeds, prefills, changed weights, ranks, and bad input."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

import hfgen
import hfgen.trl
from tests import processes, tiny
from tests.clients import grpo
from tests.clients.conftest import TEMPLATE, model

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

STEPS = int(os.environ.get("HFGEN_STEPS", "2"))
CODE = [
    "def add(a, b):\n",
    "import os\n\n\ndef read(path):\n    ",
    "x",
    "class Parser:\n",
    "return ",
]


class Watching(GRPOTrainer):
    """Counts tokens whose importance ratio, of the trainer's to the sampler's probability, is not 1."""

    n_tokens = n_wrong = 0

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        ids, mask = (
            torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], dim=1)
            for kind in ("ids", "mask")
        )
        n_new = inputs["completion_ids"].shape[1]
        new, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, n_new)
        ratio = (new.detach() - inputs["sampling_per_token_logps"]).exp()
        ratio = ratio[inputs["completion_mask"].bool()]
        self.n_tokens += ratio.numel()
        self.n_wrong += int((ratio != 1).sum())
        return super()._compute_loss(model, inputs)


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / 20 for text in completions]


def train_builtin(
    folder: Path,
    rollout: Any,
    dtype: torch.dtype = torch.float32,
    peft: Any = None,
    **settings: Any,
) -> Watching:
    weights, tokenizer = hfgen.builtin_model()
    config = GRPOConfig(
        str(folder),
        **{
            "max_steps": STEPS,
            "num_generations": 2,
            "per_device_train_batch_size": 6,
            "max_completion_length": 12,
            "learning_rate": 1e-3,
            "gradient_checkpointing": False,
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        | settings,
    )
    prompts = Dataset.from_dict({"prompt": CODE})
    trainer = Watching(
        weights.to(dtype).requires_grad_(True),
        vowels,
        config,
        prompts,
        processing_class=tokenizer,
        rollout_func=rollout,
        peft_config=peft,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("dtype", "settings", "options"),
    [
        (torch.bfloat16, {"gradient_checkpointing": True}, {}),
        (torch.float32, {"temperature": 0.7, "beta": 0.1}, {"prompt_lookup_num_tokens": 3}),
        (torch.bfloat16, {"top_p": 0.9}, {"stop": ["\n\n"]}),
    ],
    ids=["checkpoints", "temperature, drafts", "top-p, stops"],
)
def test_every_importance_ratio_is_one(
    tmp_path: Path, dtype: torch.dtype, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    trainer = train_builtin(tmp_path, hfgen.trl.rollout(exact=True, **options), dtype, **settings)
    assert trainer.n_tokens > STEPS * 6 * 6
    assert trainer.n_wrong == 0


def test_with_adapters(tmp_path: Path) -> None:
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    trainer = train_builtin(tmp_path, hfgen.trl.rollout(exact=True), peft=adapters)
    assert trainer.n_wrong == 0
    assert any(
        weight.abs().sum() > 0
        for name, weight in trainer.model.named_parameters()
        if "lora_B" in name
    )


def test_without_exact_mode_ratios_differ(tmp_path: Path) -> None:
    trainer = train_builtin(tmp_path, hfgen.trl.rollout(), torch.bfloat16)
    assert trainer.n_wrong > trainer.n_tokens / 2


@pytest.mark.parametrize("exact", [False, True])
def test_the_same_run_writes_the_same_bytes(tmp_path: Path, exact: bool) -> None:
    """And a prefix cache, whose entries are of old weights after a step, changes nothing."""
    runs = []
    for number in range(3):
        weights = model()
        engine = None
        if number == 2:
            engine = hfgen.Engine(weights, prefix_cache=hfgen.PrefixCache(2**24))
        rollout = hfgen.trl.rollout(engine, exact=exact)
        torch.manual_seed(number)  # rollouts do not draw from torch's generator
        settings = {"per_device_train_batch_size": 4, "max_completion_length": 8}
        texts, trainer = grpo.trained(str(tmp_path), rollout, weights, **settings)
        runs.append((texts, trainer.model.state_dict()))
    (texts, final), *others = runs
    assert len(texts) == 8
    assert not torch.equal(final["lm_head.weight"], model().lm_head.weight)
    for other_texts, other_final in others:
        assert other_texts == texts
        assert all(torch.equal(other_final[name], weight) for name, weight in final.items())


def test_a_prompt_is_forwarded_once_for_its_samples(tmp_path: Path) -> None:
    weights = model()
    engine = hfgen.Engine(weights)
    before = engine.stats.prefill_tokens
    settings = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 8}
    rollout = hfgen.trl.rollout(engine)
    grpo.trained(str(tmp_path), rollout, weights, max_completion_length=4, **settings)
    prompts = {tuple(output.prompt_token_ids) for output in rollout.outputs}
    assert (len(rollout.outputs), len(prompts)) == (8, 2)
    assert engine.stats.prefill_tokens - before == sum(map(len, prompts))
    samples = {tuple(output.token_ids) for output in rollout.outputs}
    assert len(samples) > 4  # each has noise of its own


@pytest.mark.parametrize("max_rows", [2, 3, 32])
def test_rows_at_once_do_not_decide(max_rows: int, tmp_path: Path) -> None:
    """One batch, or an engine of few rows: the same completions and log-probabilities."""
    rollout = hfgen.trl.rollout(exact=True, max_rows=max_rows)
    settings = {"per_device_train_batch_size": 4, "max_completion_length": 8, "max_steps": 1}
    grpo.trained(str(tmp_path), rollout, **settings)
    sequences = [output.sequences[0] for output in rollout.outputs]
    expected = hfgen.trl.rollout(exact=True, stop=["no such text"])  # by an engine
    grpo.trained(str(tmp_path), expected, **settings)
    others = [output.sequences[0] for output in expected.outputs]
    assert [s.token_ids for s in sequences] == [s.token_ids for s in others]
    assert [s.logprobs for s in sequences] == [s.logprobs for s in others]
    assert [str(s.finish_reason) for s in sequences] == [str(s.finish_reason) for s in others]


def test_fields_and_kept_ids_reach_the_reward(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def reward(completion_ids: Any, kept_ids: Any, n_tokens: Any, **_: Any) -> list[float]:
        seen.update(completion_ids=completion_ids, kept_ids=kept_ids, n_tokens=n_tokens)
        return [float(n) for n in n_tokens]

    rollout = hfgen.trl.rollout(
        fields=lambda prompts, outputs: {"n_tokens": [len(output.token_ids) for output in outputs]}
    )
    config = GRPOConfig(
        str(tmp_path), max_steps=1, num_generations=2, per_device_train_batch_size=4, top_p=0.5,
        max_completion_length=5, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": grpo.PROMPTS})
    tokenizer = tiny.byte_tokenizer()
    GRPOTrainer(
        model(), reward, config, prompts, processing_class=tokenizer, rollout_func=rollout
    ).train()
    assert seen["n_tokens"] == [len(ids) for ids in seen["completion_ids"]]
    for ids, kept in zip(seen["completion_ids"], seen["kept_ids"], strict=True):
        assert all(token in support for token, support in zip(ids, kept, strict=True))
        assert all(len(support) < 258 for support in kept)


def test_chats(tmp_path: Path) -> None:
    rollout = hfgen.trl.rollout()
    config = GRPOConfig(
        str(tmp_path), max_steps=1, num_generations=2, per_device_train_batch_size=2,
        max_completion_length=4, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    chat = [{"role": "user", "content": "hi"}]
    tokenizer = tiny.byte_tokenizer(TEMPLATE)
    trainer = GRPOTrainer(
        model(),
        lambda completions, **_: [float(len(turns[0]["content"])) for turns in completions],
        config,
        Dataset.from_dict({"prompt": [chat, chat]}),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.train()
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert rollout.outputs[0].prompt_token_ids == ids
    picture = [{"role": "user", "content": [{"type": "image", "image": None}]}]
    with pytest.raises(ValueError, match="type 'image'; allowed is text"):
        rollout([picture], trainer)


def test_ranks_that_end_at_different_lengths(tmp_path: Path) -> None:
    results = processes.run(grpo.roll_out_sharded, str(tmp_path), STEPS)
    texts = [text for texts, _ in results for text in texts]
    assert len(texts) == 2 * STEPS
    assert len({len(text) for text in texts}) > 1


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "training.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["trainer"].state.global_step == 2


# ------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "engine"}, "`engine` has to be an hfgen.Engine, but is str"),
        ({"seed": 0.5}, "`seed` has to be an integer, but is 0.5"),
        ({"temperature": 0.5}, "`temperature` is an option of GRPOConfig"),
        ({"max_new_tokens": 5}, "`max_new_tokens` is an option of GRPOConfig"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        hfgen.trl.rollout(**arguments)


def of_another_model() -> Any:
    return hfgen.trl.rollout(hfgen.Engine(model()))


def closed() -> Any:
    rollout = hfgen.trl.rollout()
    original = rollout._decode

    def decode(weights: Any, *arguments: Any) -> Any:
        rollout.engine = hfgen.Engine(weights)
        rollout.engine.close()
        return original(weights, *arguments)

    rollout._decode = decode
    return rollout


def closed_in_a_step() -> Any:
    """The engine is closed by what a step calls."""
    rollout = hfgen.trl.rollout()

    def close(*_: Any) -> bool:
        rollout.engine.close()
        return False

    rollout.kwargs["stopping_criteria"] = [close]
    original = rollout._decode

    def decode(weights: Any, *arguments: Any) -> Any:
        rollout.engine = hfgen.Engine(weights)
        return original(weights, *arguments)

    rollout._decode = decode
    return rollout


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (of_another_model, {}, "the engine's model is not the trainer's"),
        (closed, {}, "closed"),
        (closed_in_a_step, {}, "."),
        (lambda: hfgen.trl.rollout(exact=True), {"bf16": True}, "mixed precision .bf16."),
        (
            lambda: hfgen.trl.rollout(exact=True),
            {"temperature": 0.5, "top_k": 5},
            "`top_k`=5 gives log-probabilities that the trainer does not compute",
        ),
        (lambda: hfgen.trl.rollout(fields=lambda *_: {"a": [1]}), {}, "field 'a' has to be a list"),
        (lambda: hfgen.trl.rollout(fields=lambda *_: [1]), {}, "`fields` has to return a dict"),
        (lambda: hfgen.trl.rollout(no_such_option=1), {}, "no_such_option"),
    ],
)  # fmt: skip
def test_a_step_that_fails_leaves_the_trainer_usable(
    tmp_path: Path, make: Callable[[], Any], settings: dict[str, Any], message: str
) -> None:
    rollouts = [make()]
    start = model()
    settings = {"per_device_train_batch_size": 4, "max_completion_length": 6, **settings}

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        try:
            return rollouts[0](prompts, trainer)
        except Exception:
            assert trainer.model.training
            for name, weight in trainer.model.state_dict().items():
                assert torch.equal(weight, start.state_dict()[name])
            raise

    with pytest.raises(Exception, match=message):
        grpo.trained(str(tmp_path), rollout, **settings)


def test_a_tokenizer_without_padding(tmp_path: Path) -> None:
    """TRL pads with the end of a sequence; where there is none either, the tokenizer is named."""
    config = GRPOConfig(
        str(tmp_path), max_steps=1, num_generations=2, per_device_train_batch_size=4,
        max_completion_length=5, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": grpo.PROMPTS})
    tokenizer = tiny.byte_tokenizer()
    tokenizer.pad_token = None

    def train() -> int:
        options = {"processing_class": tokenizer, "rollout_func": hfgen.trl.rollout()}
        steps: int = GRPOTrainer(model(), vowels, config, prompts, **options).train().global_step
        return steps

    assert train() == 1
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no `pad_token`"):
        train()


def test_a_reward_that_raises(tmp_path: Path) -> None:
    fails = [True]

    def reward(completions: list[str], **_: Any) -> list[float]:
        if fails[0]:
            raise RuntimeError("no reward today")
        return [float(len(set(text))) for text in completions]

    config = GRPOConfig(
        str(tmp_path), max_steps=1, num_generations=2, per_device_train_batch_size=4,
        max_completion_length=5, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = GRPOTrainer(
        model(),
        reward,
        config,
        Dataset.from_dict({"prompt": grpo.PROMPTS}),
        processing_class=tiny.byte_tokenizer(),
        rollout_func=hfgen.trl.rollout(exact=True),
    )
    with pytest.raises(RuntimeError, match="no reward today"):
        trainer.train()
    fails[0] = False
    assert trainer.train().global_step == 1
