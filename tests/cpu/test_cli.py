import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripted_backend import ScriptedBackend, one_hot_block
from small_models import small_draft, small_target
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import save_draft
from sgl_muse_mega.checkpoint.random_weights import random_draft, random_target
from sgl_muse_mega.checkpoint.target import save_target
from sgl_muse_mega.cli import main
from sgl_muse_mega.commands.pair import Pair
from sgl_muse_mega.reference.backend import ReferenceBackend

Run = Callable[..., tuple[int, str, str]]

CONTEXT = 300
SPECIAL = ("<bos>", "<eos>", "<mask>")
TEMPLATE = "{{ bos_token }}{% for m in messages %}Q: {{ m['content'] }}\nA:{% endfor %}"
PROBLEMS = [
    {"question": "Two and three?", "answer": "2+3=5\n#### 5"},
    {"question": "A thousand and one?", "answer": "#### 1,001"},
    {"question": "Four minus six?", "answer": "4-6\n#### -2"},
]


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=259, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return tokenizer


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair with tokenizer, template and problems, in the layout of the bundled one."""
    root = tmp_path_factory.mktemp("tiny")
    target = small_target(vocab_size=259, max_position_embeddings=CONTEXT, bos_token_id=0)
    draft = small_draft(target, mask_token_id=2)
    seed = random.getrandbits(30)
    save_target(root / "target", target, random_target(target, seed))
    save_draft(root / "draft", draft, random_draft(draft, seed))
    byte_level_tokenizer().save(str(root / "target" / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": TEMPLATE}
    (root / "target" / "tokenizer_config.json").write_text(json.dumps(config))
    (root / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    return root


@pytest.fixture
def run(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line as installed: exit code, stdout, stderr. Results go to a folder of the test."""
    monkeypatch.setattr(tiny, "_ROOT", installed)
    monkeypatch.setattr("sgl_muse_mega.results._SOURCE", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sgl-muse-mega", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return call


def speak(backend: ScriptedBackend, ids: list[int], start: int) -> None:
    backend.forced.update({start + index: token for index, token in enumerate(ids)})


def speaking_pair(monkeypatch: pytest.MonkeyPatch, answers: list[str], right: int = 3) -> None:
    """Pair.backend gives one that answers the n-th prompt with answers[n], from drafts of which `right` are right."""
    ids = [[*byte_level_tokenizer().encode(text, add_special_tokens=False).ids, 1] for text in answers]

    def draft(b: ScriptedBackend, anchor: int, width: int, *_: object) -> object:
        slots = range(b.length + 1, b.length + width)
        return one_hot_block([b.forced.get(p, 5) if i < right else 7 for i, p in enumerate(slots)])

    class Speaker(ScriptedBackend):
        def prefill(self, prompt: list[int]) -> torch.Tensor:  # type: ignore[override]
            self.forced.clear()
            speak(self, ids.pop(0), len(prompt))
            return super().prefill(prompt)

    def backend(self: Pair, prompt_tokens: int, max_new_tokens: int) -> ScriptedBackend:
        return Speaker(vocab_size=259, max_context=CONTEXT, draft=draft)  # type: ignore[arg-type]

    monkeypatch.setattr(Pair, "backend", backend)


def test_generate_streams_and_sums_up(run: Run) -> None:
    code, out, err = run("generate", "Hello", "--max-new-tokens", 20, "--ignore-eos")
    assert (code, err) == (0, "")
    summary = out.splitlines()[-1]
    for part in ("20 tokens", "steps", "mean accept length", "tokens/s", "draft", "verify", "host", "--max-new-tokens"):
        assert part in summary


def test_json_is_one_object_and_plain_decoding_agrees(run: Run) -> None:
    code, out, err = run("generate", "Hello", "--json", "--max-new-tokens", 15, "--ignore-eos")
    assert (code, err) == (0, "")
    spoken = json.loads(out)
    stats = spoken["stats"]
    assert len(spoken["ids"]) == stats["completion_tokens"] == 15
    assert sum(int(n) * steps for n, steps in stats["tokens_per_step"].items()) == 14
    assert stats["accept_length"] == 14 / stats["steps"]
    assert spoken["finish_reason"] == "length"
    plain = json.loads(run("generate", "Hello", "--json", "--max-new-tokens", 15, "--ignore-eos", "--no-draft")[1])
    assert plain["stats"]["tokens_per_step"] == {"1": 14}
    assert plain["text"] == byte_level_tokenizer().decode(plain["ids"])
    # a random model has near ties, which the rounding of a batched verify may flip; the first tokens have none so far
    assert plain["ids"][:4] == spoken["ids"][:4]


def test_text_is_streamed_whole_and_without_the_stop_token(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    speaking_pair(monkeypatch, ["Crème 😀 brûlée"] * 2)
    code, out, _ = run("generate", "Dessert?")
    assert code == 0
    assert out.splitlines()[0] == "Crème 😀 brûlée"
    assert "ended by stop token" in out
    spoken = json.loads(run("generate", "Dessert?", "--json")[1])
    assert spoken["text"] == "Crème 😀 brûlée"
    assert spoken["ids"][-1] == 1
    assert spoken["stats"]["accept_length"] > 3


def test_character_that_never_completes_is_shown_at_the_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    speaking_pair(monkeypatch, ["ab😀"])
    code, out, _ = run("generate", "?", "--max-new-tokens", 4)
    assert code == 0
    assert out.splitlines()[0] == "ab\ufffd"


def test_ascii_terminal_gets_escapes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    speaking_pair(monkeypatch, ["brûlée"])
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert run("generate", "Dessert?")[0] == 0
    terminal.seek(0)
    assert terminal.readline() == "br\\xfbl\\xe9e\n"


def test_prompt_from_a_file_and_the_template(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    prefill = ReferenceBackend.prefill

    def spy(self: ReferenceBackend, ids: list[int]) -> torch.Tensor:
        seen.append(ids)
        return prefill(self, ids)

    monkeypatch.setattr(ReferenceBackend, "prefill", spy)
    (tmp_path / "prompt.txt").write_text("Grüße\n", encoding="utf-8")
    assert run("generate", "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 1)[0] == 0
    assert run("generate", "--raw", "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 1)[0] == 0
    tokenizer = byte_level_tokenizer()
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in seen] == ["<bos>Q: Grüße\nA:", "<bos>Grüße"]


def test_same_seed_same_text(run: Run) -> None:
    sampled = ("--json", "--temperature", 1, "--top-p", 0.9, "--max-new-tokens", 10, "--ignore-eos")
    first, second = (json.loads(run("generate", "Hi", *sampled, "--seed", 11)[1])["ids"] for _ in range(2))
    other = json.loads(run("generate", "Hi", *sampled, "--seed", 12)[1])["ids"]
    assert first == second != other


def test_fp8_cache_and_the_context_limit(run: Run) -> None:
    prompt = "x" * (CONTEXT - 25)
    code, out, _ = run("generate", prompt, "--json", "--kv-cache-dtype", "fp8", "--max-new-tokens", 99, "--ignore-eos")
    spoken = json.loads(out)
    assert code == 0
    assert spoken["finish_reason"] == "context"
    assert spoken["stats"]["prompt_tokens"] + len(spoken["ids"]) == CONTEXT


@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_keeps_what_there_is(run: Run, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    verify = ReferenceBackend.verify
    calls = 0

    def interrupted(self: ReferenceBackend, tokens: list[int]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return verify(self, tokens)

    monkeypatch.setattr(ReferenceBackend, "verify", interrupted)
    code, out, err = run("generate", "Hello", "--ignore-eos", *(["--json"] if as_json else []))
    assert (code, err) == (130, "")
    if as_json:
        assert json.loads(out)["finish_reason"] == "interrupted"
        assert json.loads(out)["stats"]["steps"] == 3
    else:
        assert "3 steps" in out.splitlines()[-1]
        assert out.endswith("ended by Ctrl-C\n")


def refused(result: tuple[int, str, str]) -> str:
    """The one sentence of a refusal."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], "prompt is empty"),
        (["  \n"], "prompt is empty"),
        ([], "neither is given"),
        (["x" * CONTEXT], f"the context holds {CONTEXT}"),
        (["\udcff"], "not valid UTF-8"),
        (["x", "--prompt-file", "there.txt"], "both is given"),
        (["--prompt-file", "/no/such/file"], "/no/such/file cannot be read"),
        (["x", "--width", "0"], "between 1 and 16, found 0"),
        (["x", "--width", "17"], "between 1 and 16, found 17"),
        (["x", "--width", "4", "--no-draft"], "Verify width 4 needs a draft"),
        (["x", "--width", "wide"], "a number or auto, found 'wide'"),
        (["x", "--width", "auto", "--no-draft"], "--width auto needs a draft"),
        (["x", "--width", "auto", "--cost-table", "/no/such/file"], "/no/such/file cannot be read"),
        (["x", "--cost-table", "there.json"], "--cost-table is for automatic widths"),
        (["x", "--tree", "--no-draft"], "--tree needs a draft"),
        (["x", "--tree", "--width", "1"], "A token tree needs drafts"),
        (["x", "--tree", "--nodes", "17"], "between 2 and 16 nodes, found 17"),
        (["x", "--tree", "--nodes", "0"], "between 2 and 16 nodes, found 0"),
        (["x", "--nodes", "4"], "--nodes 4 is for trees"),
        (["x", "--temperature", "-1"], "found -1.0"),
        (["x", "--temperature", "nan"], "found nan"),
        (["x", "--top-p", "0"], "top-p must be above 0"),
        (["x", "--top-p", "1.5"], "found 1.5"),
        (["x", "--top-k", "-1"], "found -1"),
        (["x", "--min-p", "2"], "found 2.0"),
        (["x", "--seed", "-1"], "found -1"),
        (["x", "--max-new-tokens", "0"], "found 0"),
        (["x", "--max-new-tokens", "-1000"], "found -1000"),
        (["x", "--backend", "tpu"], "no backend 'tpu'"),
        (["x", "--kv-cache-dtype", "int4"], "no KV cache type 'int4'"),
        (["x", "--model", "/no/such/model", "--no-draft"], "/no/such/model/config.json does not exist"),
        (["x", "--draft", "/no/such/draft"], "/no/such/draft/config.json does not exist"),
        (["x", "--draft", "/no/such/draft", "--no-draft"], "leave one of them out"),
    ],
)
def test_refusals(run: Run, arguments: list[str], words: str) -> None:
    assert words in refused(run("generate", *arguments))


def test_refused_files(run: Run, tmp_path: Path, installed: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Grüße".encode("latin-1"))
    assert "latin.txt is not UTF-8 text" in refused(run("generate", "--prompt-file", latin))
    assert f"No draft is given for {installed}/target" in refused(run("generate", "x", "--model", installed / "target"))

    other = small_target(vocab_size=259, hidden_size=32, max_position_embeddings=CONTEXT)
    misfit = small_draft(other, mask_token_id=2)
    save_draft(tmp_path / "misfit", misfit, random_draft(misfit, 0))
    assert "hidden_size is 32 in the draft" in refused(run("generate", "x", "--draft", tmp_path / "misfit"))

    few = small_target(vocab_size=100, max_position_embeddings=CONTEXT)
    save_target(tmp_path / "few", few, random_target(few, 0))
    model = ("--model", tmp_path / "few", "--no-draft")
    assert "tokenizer.json does not exist" in refused(run("generate", "x", *model))
    (tmp_path / "few" / "tokenizer.json").write_text("{")
    assert "cannot be read as a tokenizer" in refused(run("generate", "x", *model))
    byte_level_tokenizer().save(str(tmp_path / "few" / "tokenizer.json"))
    assert "no chat template; use --raw" in refused(run("generate", "x", *model))
    assert "only ids below 100" in refused(run("generate", "é", "--raw", *model))
    for template in ("{% for %}", "{{ 1 / 0 }}", "{{ 1 + 'a' }}", "{{ range(10 ** 9) }}"):
        (tmp_path / "few" / "chat_template.jinja").write_text(template)
        assert "chat template" in refused(run("generate", "x", *model))
    (tmp_path / "few" / "chat_template.jinja").write_text("{% if false %}text{% endif %}")
    assert "gives no token" in refused(run("generate", "x", *model))


def test_eval_counts_answers_and_averages(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # forms of an answer: marked, marked with a thousands comma, wrong
    speaking_pair(monkeypatch, ["2+3=5\n#### 5 of 7", "it is 1,001", "#### 2"])
    code, out, err = run("eval", "--save")
    assert (code, err) == (0, "")
    assert "2 of 3 answers right (66.7%)" in out
    (path,) = (tmp_path / "benchmark" / "results").glob("eval-*-cpu.json")
    saved = json.loads(path.read_text())
    rows = saved["rows"]
    assert [row["right"] for row in rows] == [True, True, False]
    assert [row["answer"] for row in rows] == ["5", "1001", "2"]
    tokens, steps = [row["completion_tokens"] - 1 for row in rows], [row["steps"] for row in rows]
    # drafts are right for three of seven slots, so steps give four tokens as long as the text goes on
    assert steps == [-(-n // 4) for n in tokens]
    ratios = [n / v for n, v in zip(tokens, steps, strict=True)]
    assert saved["summary"]["accept_length"] == pytest.approx(
        {
            "per request": sum(ratios) / 3,
            "token-weighted": sum(n * r for n, r in zip(tokens, ratios, strict=True)) / sum(tokens),
            "pooled": sum(tokens) / sum(steps),
        }
    )
    assert saved["summary"]["accept_length_with_first_token"]["pooled"] == (sum(tokens) + 3) / sum(steps)
    assert saved["inputs"]["target"] == saved["inputs"]["draft"] == saved["inputs"]["problems"] == "bundled"
    assert saved["inputs"]["backend"] == "reference"
    assert saved["environment"]["command"] == "sgl-muse-mega eval --save"

    figures = json.loads((path.parent / "figures.json").read_text())
    assert set(figures) == {"eval.answers", "eval.accept_length"}
    keys = {"median", "min", "max", "n", "unit", "gpu", "driver", "date", "commit", "command", "file"}
    assert all(set(figure) == keys and figure["file"] == path.name for figure in figures.values())
    assert figures["eval.answers"]["median"] == 2 / 3
    assert figures["eval.accept_length"]["median"] == sum(tokens) / sum(steps)


def test_eval_that_is_not_the_standard_one_leaves_the_figures_alone(run: Run, tmp_path: Path) -> None:
    results = tmp_path / "benchmark" / "results"
    results.mkdir(parents=True)
    (results / "figures.json").write_text('{"layer.t8.us": {"median": 1}}')
    code, out, _ = run("eval", "--save", "--limit", 1, "--width", 4, "--max-new-tokens", 5)
    assert code == 0
    assert "No named figures" in out
    assert (results / "figures.json").read_text() == '{"layer.t8.us": {"median": 1}}'
    assert run("eval", "--save", "--limit", 1, "--max-new-tokens", 5)[0] == 0
    assert (results / "figures.json").read_text() == '{"layer.t8.us": {"median": 1}}'
    assert run("eval", "--save", "--max-new-tokens", 5)[0] == 0
    assert set(json.loads((results / "figures.json").read_text())) == {
        "layer.t8.us",
        "eval.answers",
        "eval.accept_length",
    }
    assert not list(results.glob(".*"))


@pytest.mark.parametrize(
    "options",
    [["--tree"], ["--width", "auto"], ["--tree", "--width", "auto"], ["--tree", "--nodes", "9", "--width", "auto"]],
)
def test_trees_and_automatic_widths_leave_no_trace_in_the_text(run: Run, tmp_path: Path, options: list[str]) -> None:
    def texts(*more: str) -> tuple[list[str], dict[str, object]]:
        results = tmp_path / "benchmark" / "results"
        for path in results.glob("eval-*"):
            path.unlink()
        code, out, _ = run("eval", "--save", "--max-new-tokens", 24, *more)
        assert code == 0
        assert ("No named figures" in out) == bool(more)
        (path,) = results.glob("eval-*")
        saved = json.loads(path.read_text())
        assert all(sum(row["rows_per_step"].values()) == row["steps"] for row in saved["rows"])
        return [row["text"] for row in saved["rows"]], saved["inputs"]

    cost = tmp_path / "cost.json"
    cost.write_text('{"1": 2, "16": 9}')
    more = [*options, "--cost-table", str(cost)] if "auto" in options else options
    (plain, inputs), (branched, chosen) = texts(), texts(*more)
    assert plain == branched
    assert (inputs["width"], inputs["nodes"], inputs["cost_ms"]) == (8, None, None)
    assert chosen["nodes"] == (9 if "9" in options else 8 if "--tree" in options else None)
    assert (chosen["width"] == "auto") == (chosen["cost_ms"] is not None) == ("auto" in options)


def test_eval_samples_with_one_seed_per_problem(run: Run, tmp_path: Path) -> None:
    def texts() -> list[tuple[int, str]]:
        results = tmp_path / "benchmark" / "results"
        for path in results.glob("eval-*"):
            path.unlink()
        assert run("eval", "--save", "--temperature", 1, "--seed", 5, "--max-new-tokens", 6, "--limit", 2)[0] == 0
        (path,) = results.glob("eval-*")
        return [(row["seed"], row["text"]) for row in json.loads(path.read_text())["rows"]]

    first = texts()
    assert [seed for seed, _ in first] == [5, 6]
    assert first == texts()


def test_eval_interrupted_sums_up_and_saves_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = ReferenceBackend.prefill
    prompts = 0

    def interrupted(self: ReferenceBackend, ids: list[int]) -> torch.Tensor:
        nonlocal prompts
        prompts += 1
        if prompts == 3:
            raise KeyboardInterrupt
        return prefill(self, ids)

    monkeypatch.setattr(ReferenceBackend, "prefill", interrupted)
    code, out, _ = run("eval", "--save", "--max-new-tokens", 5)
    assert code == 130
    assert "of 2 answers right" in out
    assert "of 3 asked for" in out
    assert "nothing was saved" in out
    assert not (tmp_path / "benchmark").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"question": "a", "answer": "#### 1"}\n{"question": "b"}\n', "Line 2 of"),
        (b'{"question": "a", "answer": "#### 1"}\n\n{oops}\n', "Line 3 of"),
        (b'{"question": "a", "answer": "1"}\n', "no number behind ####"),
        (b'["a"]\n', "not a JSON object"),
        (b"[" * 100_000, "Line 1 of"),
        (b'{"question": "\\ud800", "answer": "#### 1"}\n', "question in line 1 of"),
        (b'{"question": "  ", "answer": "#### 1"}\n', "no text under 'question'"),
        (b"", "holds no problem"),
        (b'{"question": "\xff", "answer": "#### 1"}\n', "not UTF-8"),
        (b'{"question": "' + b"x" * CONTEXT + b'", "answer": "#### 1"}\n', "question in line 1 of"),
    ],
)
def test_eval_refuses_bad_problems(run: Run, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "problems.jsonl").write_bytes(content)
    assert words in refused(run("eval", tmp_path / "problems.jsonl", "--save"))
    assert not (tmp_path / "benchmark").exists()


def test_eval_refuses_bad_options(run: Run, tmp_path: Path) -> None:
    assert "cannot be read" in refused(run("eval", tmp_path / "nowhere.jsonl"))
    assert "at least 1, found 0" in refused(run("eval", "--limit", 0))
    assert "at least 1, found -9" in refused(run("eval", "--max-new-tokens", -9))
    assert "between 1 and 16, found 99" in refused(run("eval", "--width", 99))
