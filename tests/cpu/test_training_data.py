"""Word problems, tokenizer and bundled files of the tiny pair."""

import json
import re

import pytest
from tokenizers import Tokenizer

from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.checkpoint.tiny import draft_directory, problems_path, target_directory
from sgl_muse_mega.checkpoint.weights import Nvfp4Experts
from sgl_muse_mega.config import check_pair, load_draft_config, load_target_config
from training import data, sizes, tokenizer
from training.problems import Problem, distinct_problems, final_answer, problems
from training.templates import TEMPLATES

LIMIT_BYTES = 24_000_000
WORKED = re.compile(r"(\d+)([-+*/])(\d+) = <<\1\2\3=(\d+)>>\4(?!\d)")
VALUE = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__truediv__}


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer.from_file(str(target_directory() / "tokenizer.json"))


def test_every_step_of_every_template_is_worked_correctly() -> None:
    operators = set()
    for problem in problems("train", 12345, 2000):
        *steps, last = problem.answer.split("\n")
        assert 1 <= len(steps) <= 3
        for step in steps:
            left, operator, right, value = WORKED.search(step).groups()
            assert VALUE[operator](int(left), int(right)) == int(value)
            operators.add(operator)
        assert last == f"#### {value}"
        assert problem.result == value
        assert not set("{}[]@|") & set(problem.question + problem.answer)
    assert operators == set(VALUE)


def test_first_steps_only_use_numbers_of_the_question() -> None:
    for problem in problems("train", 99, 500):
        left, _, right, _ = WORKED.search(problem.answer).groups()
        words = set(re.findall(r"\d+", problem.question)) | {"2"}  # "half" and "twice" are words
        assert {left, right} <= words


def test_final_answer_takes_the_last_mark() -> None:
    assert final_answer("1 #### 5\n#### 72") == "72"
    assert final_answer("#### none") == ""


def test_templates_are_many_and_have_one_to_three_steps() -> None:
    assert len(TEMPLATES) >= 30
    assert {len(template.steps) for template in TEMPLATES} == {1, 2, 3}


def test_bundled_problems_are_the_unseen_split_and_distinct() -> None:
    lines = [json.loads(line) for line in problems_path().read_text("utf-8").splitlines()]
    assert len({line["question"] for line in lines}) == len(lines) == data.UNSEEN_COUNT
    assert [Problem(**line) for line in lines] == distinct_problems("unseen", 0, data.UNSEEN_COUNT)


def test_training_chunks_leave_held_out_questions_out(monkeypatch: pytest.MonkeyPatch, bundled: Tokenizer) -> None:
    monkeypatch.setattr(data, "CHUNK", 300)
    plain = list(problems("train", 0 + 7 + 1, 300))
    excluded = frozenset(p.question for p in plain[:100])
    monkeypatch.setattr(data, "_worker", (bundled, excluded), raising=False)
    ids, lengths, prompts = data._chunk(0, 7)
    kept = [p for p in plain if p.question not in excluded]
    assert len(ids) == len(kept) < 300
    text = bundled.decode(ids[0, : lengths[0]].tolist())
    assert text == tokenizer.format_prompt(kept[0].question) + " " + kept[0].answer
    assert bundled.decode(ids[0, prompts[0] : lengths[0]].tolist()) == " " + kept[0].answer


def test_tokenizer_splits_digits_and_survives_any_text(bundled: Tokenizer) -> None:
    vocabulary = bundled.get_vocab()
    assert len(vocabulary) <= sizes.TARGET.vocab_size
    digits = [text for text in vocabulary if re.search(r"\d", text)]
    assert sorted(digits) == list("0123456789")
    for text in ("<<48/2=24>>24", "naïve 日本 \t\n 007", ""):
        assert bundled.decode(bundled.encode(text).ids) == text
    assert bundled.encode("x").ids[0] == tokenizer.BOS
    assert [vocabulary[text] for text in tokenizer.SPECIAL_TOKENS] == list(range(len(tokenizer.SPECIAL_TOKENS)))


def test_problems_outlast_the_window(bundled: Tokenizer) -> None:
    lengths = data.encode(bundled, list(problems("train", 4, 300))).lengths
    assert (lengths > sizes.WINDOW).float().mean() > 0.9


def test_bundled_pair_loads_has_every_feature_and_is_small() -> None:
    config, draft_config = load_target_config(target_directory()), load_draft_config(draft_directory())
    check_pair(config, draft_config)
    assert (config, draft_config) == (sizes.TARGET, sizes.DRAFT)
    weights, draft = load_target(target_directory(), config), load_draft(draft_directory(), draft_config)
    quantised = [isinstance(layer.gate_up_proj, Nvfp4Experts) for layer in weights.layers]
    assert quantised == [False, True, True, True, True, False]
    for layer in weights.layers:
        assert layer.router_bias.abs().min() > 0
        for name in ("input_layernorm", "pre_expert_norm", "post_expert_norm", "post_feedforward_layernorm"):
            assert getattr(layer, name).float().abs().mean() > 1e-3
    for layer in draft.layers:
        assert layer.attention_conv.base_kernel[:, 1].float().abs().mean() > 1e-3
        assert layer.mlp_conv.kernel_projection.float().abs().mean() > 1e-3
    assert draft.successor_codebook.float().std() > 1e-3
    size = sum(path.stat().st_size for path in problems_path().parent.rglob("*") if path.is_file())
    assert size <= LIMIT_BYTES
