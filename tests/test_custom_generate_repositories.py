"""The repositories in ``custom_generate/``, loaded by transformers from their folders."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

import hfgen
from tests import tiny
from tests.test_bad_input import Recorder
from tests.test_contrastive import bart

FOLDER = Path(__file__).parent.parent / "custom_generate"
CONTRASTIVE = FOLDER / "contrastive-search"
MBR = FOLDER / "minimum-bayes-risk"
SAMPLES: dict[str, Any] = {"num_return_sequences": 6, "max_new_tokens": 8}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies code of repositories into a folder of its own."""
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder is put into it


def run(model: Any, repository: Path, *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    """What ``generate`` of a plain model returns; the model stays plain."""
    kind, attributes = type(model), {*vars(model)}
    torch.manual_seed(seed)
    result = model.generate(
        *args, custom_generate=str(repository), trust_remote_code=True, **kwargs
    )
    assert type(model) is kind
    assert not isinstance(model, hfgen.GenerationMixin)
    assert {*vars(model)} == attributes
    return result


def own(build: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return hfgen.mix_into(build()).generate(*args, **kwargs)


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2, bart])
def test_contrastive_search_has_the_tokens_of_hfgens_own_call(build: Callable[[], Any]) -> None:
    ids = tiny.prompt(2)
    mask = torch.tensor([[1] * 7, [0, 0, *[1] * 5]])
    kwargs = {"attention_mask": mask, "max_new_tokens": 10}
    options = {"penalty_alpha": 0.8, "top_k": 4}
    result = run(build(), CONTRASTIVE, ids, **kwargs, **options)
    assert torch.equal(result, own(build, ids, **kwargs, **options))
    assert not torch.equal(result, build().generate(ids, **kwargs))


def test_contrastive_search_reads_the_config_then_has_defaults() -> None:
    ids = tiny.prompt(1)
    model = tiny.llama()
    model.generation_config.update(do_sample=True, top_k=30)  # as checkpoints are published
    result = run(model, CONTRASTIVE, ids, max_new_tokens=10)
    expected = own(tiny.llama, ids, max_new_tokens=10, penalty_alpha=0.6, top_k=4)
    assert torch.equal(result, expected)

    config = GenerationConfig(penalty_alpha=0.9, top_k=8, max_new_tokens=10)
    result = run(model, CONTRASTIVE, ids, generation_config=config)
    assert torch.equal(result, own(tiny.llama, ids, generation_config=config))
    assert not torch.equal(result, expected)


def test_contrastive_search_streams_and_returns_outputs() -> None:
    streamer = Recorder()
    output = run(
        tiny.llama(),
        CONTRASTIVE,
        tiny.prompt(1),
        max_new_tokens=5,
        streamer=streamer,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert len(output.scores) == 5
    assert (len(streamer.puts), streamer.ends) == (1 + 5, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"penalty_alpha": 0}, "`penalty_alpha` .* above 0 and at most 1, but is 0"),
        ({"penalty_alpha": 1.5}, "`penalty_alpha` .* but is 1.5"),
        ({"penalty_alpha": "0.6"}, "`penalty_alpha` .* but is '0.6'"),
        ({"top_k": 1}, "`top_k` .* at least 2, but is 1"),
        ({"top_k": 2.5}, "`top_k` .* but is 2.5"),
        ({"do_sample": True}, "`do_sample=False`, but got `do_sample=True`"),
        ({"num_beams": 3}, "`num_beams=1`, but got `num_beams=3`"),
        ({"use_cache": False}, "`use_cache=False`"),
        ({"penalty_alfa": 0.5}, "penalty_alfa"),
    ],
    ids=str,
)
def test_contrastive_search_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tiny.llama(), CONTRASTIVE, tiny.prompt(1), max_new_tokens=2, **options)


def test_minimum_bayes_risk_has_the_tokens_of_hfgens_own_call() -> None:
    ids, words = tiny.prompt(2), tiny.ascii_tokenizer()
    by_text = run(tiny.llama(), MBR, ids, tokenizer=words, **SAMPLES)
    recipe, call = hfgen.minimum_bayes_risk(), {"do_sample": True, **SAMPLES}
    assert torch.equal(
        by_text, own(tiny.llama, ids, custom_generate=recipe, tokenizer=words, **call)
    )

    by_tokens = run(
        tiny.llama(),
        MBR,
        ids,
        utility="token_f1",
        n_best=2,
        return_dict_in_generate=True,
        **SAMPLES,
    )
    recipe = hfgen.minimum_bayes_risk(hfgen.token_f1, n_best=2, on_tokens=True)
    expected = own(tiny.llama, ids, custom_generate=recipe, return_dict_in_generate=True, **call)
    assert by_tokens.sequences.shape[0] == 4
    assert torch.equal(by_tokens.sequences, expected.sequences)
    assert torch.equal(by_tokens.sequences_scores, expected.sequences_scores)


def test_minimum_bayes_risk_takes_your_utility_and_draws_16_samples() -> None:
    compared = set()

    def utility(hypothesis: tuple[int, ...], reference: tuple[int, ...]) -> float:
        compared.add(hypothesis)
        return -abs(len(hypothesis) - len(reference))

    run(tiny.llama(), MBR, tiny.prompt(1), max_new_tokens=8, utility=utility, on_tokens=True)
    assert len(compared) == 16
    compared.clear()
    config = GenerationConfig(num_return_sequences=5, max_new_tokens=8, do_sample=True)
    run(
        tiny.llama(), MBR, tiny.prompt(1), generation_config=config, utility=utility, on_tokens=True
    )
    assert len(compared) == 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"utility": "bleurt"}, ValueError, "`utility` .* 'chrf', 'token_f1', .* 'bleurt'"),
        ({"utility": 3}, TypeError, "`utility`"),
        ({"n_best": 0, "utility": "token_f1"}, ValueError, "`n_best` .* at least 1"),
        ({"n_best": 7, "utility": "token_f1"}, ValueError, "`n_best` .* at most"),
        ({"num_return_sequences": 1, "utility": "token_f1"}, ValueError, "2 or more"),
        ({"do_sample": False, "utility": "token_f1"}, ValueError, "do_sample != True"),
        ({"utility": "chrf"}, ValueError, "tokenizer"),
        ({"utility": "token_f1", "streamer": Recorder()}, ValueError, "`streamer`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_minimum_bayes_risk_refuses(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        run(tiny.llama(), MBR, tiny.prompt(1), **SAMPLES | options)


@pytest.mark.parametrize("switch", [hfgen.mix_into, None], ids=["mixed", "patched"])
def test_a_model_that_generates_with_hfgen_runs_them_too(switch: Any) -> None:
    ids, options = tiny.prompt(1), {"penalty_alpha": 0.8, "top_k": 4, "max_new_tokens": 6}
    call = {"custom_generate": str(CONTRASTIVE), "trust_remote_code": True, **options}
    if switch is not None:
        result = switch(tiny.llama()).generate(ids, **call)
    else:
        with hfgen.patched():
            result = tiny.llama().generate(ids, **call)
    assert torch.equal(result, own(tiny.llama, ids, **options))


def test_a_repository_with_weights_generates_by_itself(tmp_path: Path) -> None:
    """``from_pretrained`` puts the function in the place of the model's ``generate``."""
    folder = tmp_path / "model"
    shutil.copytree(CONTRASTIVE, folder)
    tiny.llama().save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    result = model.generate(inputs=tiny.prompt(1), max_new_tokens=6)
    expected = own(tiny.llama, tiny.prompt(1), max_new_tokens=6, penalty_alpha=0.6, top_k=4)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("repository", [CONTRASTIVE, MBR], ids=lambda path: path.name)
def test_it_can_be_pushed_as_it_is(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The card has the tag by which the hub finds it, and its example runs."""
    card = (repository / "README.md").read_text(encoding="utf-8")
    assert re.match(r"---\n(.*\n)*tags:\n  - custom_generate\n---\n", card)
    assert "hfgen" in (repository / "custom_generate" / "requirements.txt").read_text()
    shutil.copytree(repository, tmp_path / repository.name)
    model = tiny.llama(vocab_size=258, eos_token_id=0, bos_token_id=0, pad_token_id=1)
    model.save_pretrained(tmp_path / "my-model")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(compile(example, str(repository), "exec"), {"__name__": "example"})
    assert "Once upon a time" in capsys.readouterr().out
