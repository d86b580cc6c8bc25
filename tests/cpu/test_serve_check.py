"""What the GPU check of the plugin concludes from texts, and the random weights it gives to servers."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import serve_arms
import serve_cases
import serve_texts
import serve_weights
import stock_models

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.config import load_target_config
from sgl_muse_mega.reference.backend import ReferenceBackend


class Stock:
    """Knows how likely every candidate is."""

    name = "stock"

    def __init__(self, scores: dict[int, float]) -> None:
        self.scores, self.asked = scores, []

    def ask(self, operation: str, **options: Any) -> Any:
        assert operation == "generate"
        self.asked.append(options["prompts"])
        return [{"ids": [1], "top": [[[score, token] for token, score in self.scores.items()]]}]


def output(*ids: int, finish: str = "stop") -> dict[str, Any]:
    return {"ids": list(ids), "finish_reason": {"type": finish}, "completion_tokens": len(ids)}


def compared(stock: Stock, ours: dict[str, Any], plain: bool = True) -> serve_texts.Outcome:
    theirs, arm = output(4, 5, 6, 7), SimpleNamespace(name="plugin")
    return serve_texts.compare("texts", stock, arm, [[9, 8]], [theirs], [ours], plain)  # type: ignore[arg-type]


def test_equal_texts() -> None:
    found = compared(Stock({}), output(4, 5, 6, 7))
    assert (found.equal, found.gaps, found.passed) == (1, [], True)


@pytest.mark.parametrize(("other", "passed"), [(-0.2, True), (-0.6, False)])
def test_a_difference_must_be_a_near_tie(other: float, passed: bool) -> None:
    stock = Stock({6: -0.1, 60: -0.1 + other})
    found = compared(stock, output(4, 5, 60, 1))
    assert stock.asked == [[[9, 8, 4, 5]]]
    assert found.gaps == [pytest.approx(-other)]
    assert found.passed is passed


@pytest.mark.parametrize(
    ("stock_behind", "ours_behind", "passed"),
    [(3.0, 0.0, True), (3.0, 0.2, True), (0.2, 0.0, False), (0.0, 3.0, False)],
)
def test_the_reference_may_say_that_stock_is_wrong(stock_behind: float, ours_behind: float, passed: bool) -> None:
    found = compared(Stock({6: -0.1, 60: -5.0}), output(4, 5, 60))
    assert not found.passed  # before it is asked
    found.differing[0]["reference"] = {"first": "", "stock_behind": stock_behind, "ours_behind": ours_behind}
    assert found.passed is passed


def test_a_token_that_stock_would_never_choose() -> None:
    assert compared(Stock({6: -0.1}), output(4, 5, 60)).gaps == [serve_texts.NEVER]


def test_the_reference_is_asked_about_texts_that_differ() -> None:
    """What it would have chosen itself, with and without the token that a request rules out."""
    texts = serve_texts.Texts(1)
    (prompt,) = texts.prompts
    backend = ReferenceBackend(
        load_target_config(tiny.target_directory()),
        load_target(tiny.target_directory(), load_target_config(tiny.target_directory())),
        max_context=256,
        kv_dtype="fp8",
    )
    best, second, third = backend.prefill([*prompt, 20]).topk(3).indices.tolist()
    record: dict[str, Any] = {"outcomes": []}
    stock, arm = Stock({best: -0.1, second: -9.0, third: -9.5}), SimpleNamespace(name="plugin")
    for banned, ours, first in ((None, second, "stock's"), ([best], second, "ours"), (None, best, "ours")):
        theirs = third if ours == second and banned else second if ours == best else best
        found = serve_texts.compare(
            "texts", stock, arm, [prompt], [output(20, theirs, 1)], [output(20, ours, 2)], banned=banned
        )  # type: ignore[arg-type]
        found.cache = "fp8"
        serve_texts.note(texts, found, record, lambda _text: None)
        (text,) = json.loads(json.dumps(record["outcomes"][-1]))["differing"]
        assert (text["prompt"], text["stock"], text["ours"]) == (prompt, [20, theirs, 1], [20, ours, 2])
        assert text["reference"]["first"] == first
        assert (text["reference"]["ours_behind"] == 0) is (first == "ours")
        assert f"{first} 1" in found.note


def test_a_text_that_ends_elsewhere() -> None:
    found = compared(Stock({}), output(4, 5, finish="length"))
    assert "ends earlier" in found.note
    assert not found.passed


def test_changed_logits_may_tip_one_text_of_ten() -> None:
    found = compared(Stock({}), output(4, 50), plain=False)
    assert found.gaps == [None]
    assert not found.passed
    found.texts = 10
    assert found.passed


def test_accept_length_is_pooled() -> None:
    outputs = [output(1, 2, 3) | {"spec_verify_ct": 1}, output(1) | {"spec_verify_ct": 3}]
    assert serve_texts.accept_length(outputs) == 1.0


def test_weights() -> None:
    """Every kind of tensor of a served target, and that tensors differ."""
    state = {
        "model.language_model.norm.weight": torch.empty(64),
        "model.language_model.embed_tokens.weight": torch.empty(200, 64),
        "layers.0.input_layernorm.weight": torch.empty(64),
        "layers.0.post_attention_residual_gate.gate": torch.empty(640),
        "layers.0.mlp.gate.weight": torch.empty(160, 64),
        "layers.0.mlp.gate.e_score_correction_bias": torch.empty(16),
        "layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 64, 32, dtype=torch.uint8),
        "layers.0.mlp.experts.gate_up_proj_weight_scale": torch.zeros(4, 64, 4).to(torch.float8_e4m3fn),
        "layers.0.mlp.experts.gate_up_proj_weight_scale_2": torch.empty(4, 2),
        "layers.0.mlp.experts.gate_up_proj_input_scale": torch.empty(4, 2),
        "layers.0.q.weight": torch.empty(128, 64),
        "layers.1.q.weight": torch.empty(128, 64),
        "counter": torch.ones(3, dtype=torch.int32),
    }
    serve_weights.fill(SimpleNamespace(state_dict=lambda: state))
    assert not torch.equal(state["layers.0.q.weight"], state["layers.1.q.weight"])
    for name, std in (("layers.0.q.weight", 0.125), ("layers.0.mlp.gate.weight", 0.125)):
        assert state[name].std().item() == pytest.approx(std, rel=0.1)
    assert state["model.language_model.embed_tokens.weight"].std().item() == pytest.approx(1, rel=0.1)
    assert state["layers.0.post_attention_residual_gate.gate"].std().item() == pytest.approx(0.1, rel=0.2)
    assert torch.equal(state["model.language_model.norm.weight"], torch.ones(64))
    assert state["layers.0.input_layernorm.weight"].abs().max() < 0.3
    assert not state["layers.0.mlp.gate.e_score_correction_bias"].any()
    assert len(state["layers.0.mlp.experts.gate_up_proj"].unique()) > 200
    scale = state["layers.0.mlp.experts.gate_up_proj_weight_scale"].float()
    assert 0.5 <= scale.min() < scale.max() <= 2
    assert torch.equal(state["counter"], torch.ones(3, dtype=torch.int32))
    draft = {"layers.0.norm.weight": torch.empty(8), "layers.0.attention_conv.base_kernel": torch.empty(2, 2, 320)}
    model = type("DFlash2DraftModel", (), {"state_dict": lambda _self: draft})()
    serve_weights.fill(model)
    assert torch.equal(draft["layers.0.norm.weight"], torch.ones(8))
    assert draft["layers.0.attention_conv.base_kernel"].std().item() == pytest.approx(0.5, rel=0.2)


class Server:
    """Answers as a server would: text and stops from the prompt alone, refusals at the end of the context."""

    def __init__(self, name: str, broken: str = "") -> None:
        self.name, self.broken = name, broken

    def ask(self, operation: str, timeout: float = 0.0, **options: Any) -> Any:
        return getattr(self, operation)(**options)

    def step_time(self, prompt: list[int], new: int) -> dict[str, float]:
        return {"ms": 2.0, "steps": new, "tokens": new}

    def abort(self, prompts: list[list[int]], sampling: dict[str, Any], delays: list[float]) -> dict[str, Any]:
        late = self.broken == "abort"
        reasons = [{"type": "length" if late or delay > 0.1 else "abort"} for delay in delays]
        return {"outputs": [{"ids": [], "finish_reason": reason} for reason in reasons], "flushed": True}

    def generate(
        self,
        prompts: list[list[int]],
        sampling: list[dict[str, Any]],
        together: bool = False,
        top_logprobs: int = 0,
    ) -> list[dict[str, Any]]:
        found = []
        for prompt, params in zip(prompts, sampling, strict=True):
            count = params["max_new_tokens"]
            if len(prompt) + count > serve_texts.CONTEXT:
                found.append({"ids": [], "completion_tokens": 0, "finish_reason": "too long", "cached_tokens": 0})
                continue
            ids = [10 + (sum(prompt) + 7 * i) % 90 for i in range(min(count, 30))]
            ids = [i for i in ids if str(i) not in params.get("logit_bias", {})]
            if self.broken == "bias" and "logit_bias" in params:
                ids = [int(next(iter(params["logit_bias"])))]
            if params.get("top_k") == serve_cases.KEPT:
                ids = self.draw(prompt, params["sampling_seed"])
            cached = 3 if self.broken == "cache" else len(prompt) - 1
            output = {"ids": ids, "completion_tokens": len(ids), "finish_reason": "length", "cached_tokens": cached}
            found.append(output | {"spec_verify_ct": 5, "top": [[[-0.1, ids[0]], [-3.0, 1]]]} if ids else output)
        return found

    def draw(self, prompt: list[int], seed: int) -> list[int]:
        """Three tokens of the two likeliest that `generate` states; a broken server has another temperature."""
        chance, ids = random.Random(seed), list(prompt)
        temperature = serve_cases.TEMPERATURE * (0.4 if self.broken == "temperature" else 1.0)
        for _ in range(3):
            best = 10 + sum(ids) % 90
            second = 1 / (1 + math.exp(2.9 / temperature))
            ids.append(1 if chance.random() < second else best)
        return ids[len(prompt) :] if self.broken != "support" else [*ids[len(prompt) : -1], 5]


def test_cases_that_need_more_than_texts() -> None:
    texts, stock = serve_texts.Texts(5), Server("stock")
    arms = [Server(name, name) for name in ("good", "abort", "cache", "temperature", "support")]  # type: ignore[arg-type]
    found = list(serve_cases.run(texts, stock, arms, draws=400))  # type: ignore[arg-type]
    failed = {(o.case.split(" ")[0], o.arm) for o in found if not o.passed}
    assert failed == {("T12", "abort"), ("T09", "cache"), ("T07", "temperature"), ("T07", "support")}
    assert len(found) == 4 * len(arms)


def test_few_draws_of_a_context_are_not_judged() -> None:
    assert serve_cases.judge([(7,)], lambda _context: {7: 0.99, 8: 0.01}) == (0, 1.0)
    assert serve_cases.judge([(9,)], lambda _context: {7: 0.5, 8: 0.5})[0] == 1


def test_the_whole_comparison() -> None:
    said: list[str] = []
    stock = Server("stock")
    texts, arms = serve_texts.Texts(30), [Server("good"), Server("bad", "bias")]
    record: dict[str, Any] = {}
    serve_texts.run(texts, stock, arms, record, said.append)  # type: ignore[arg-type]
    assert len(said) == len(record["outcomes"])
    serve_texts.sampled(texts, stock, arms, record, said.append)  # type: ignore[arg-type]
    failed = {(o["case"], o["arm"]) for o in record["outcomes"] if not o["passed"]}
    assert failed == {("T04 bias -100", "bad")}
    assert record["accept_length"] == {"stock": 6.0, "good": 6.0, "bad": 6.0}
    assert len(said) == len(record["outcomes"]) + 1


@pytest.mark.parametrize(("ranks", "names"), [(1, {"serve.w8.ratio_stock", "serve.t1.ratio_stock"}), (2, set())])
def test_servers_of_one_gpu_have_figures(ranks: int, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs, the one beside stock is the whole step's, which step_ranks.py writes."""
    import serve_check

    from sgl_muse_mega import results

    saved: list[set[str]] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(results, "save", lambda _command, _environment, _content, figures: saved.append(set(figures)))
    record = {"time": {"ratio": {"w8.full": [1.7], "w8.target": [1.4], "t1": [1.2]}}}
    serve_check.save(record, SimpleNamespace(json=None, save=True, tp=ranks))  # type: ignore[arg-type]
    assert saved == [names]


@pytest.mark.parametrize(("ranks", "arms", "pairs"), [(1, "target,full,fp8,t1", "w8.full,t1"), (2, "full", "t1")])
def test_servers_of_the_parts(
    ranks: int, arms: str, pairs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which servers start for one GPU and for two."""
    import serve_check
    import serve_times

    started: list[tuple[str, dict[str, Any], str | None]] = []

    class Arm(Server):
        def ready(self, _timeout: float) -> float:
            return 1.0

        def stop(self) -> None:
            pass

        def profile(self, **_: Any) -> dict[str, float]:
            return {"steps": 4, "idle": 0.25, "_fwd_kernel ": 4000.0}

        def step_time(self, prompt: list[int], new: int) -> dict[str, float]:
            return {"ms": 2.0 if "plugin" in self.name else 4.0, "steps": new, "tokens": new}

    class Servers:
        def start(self, name: str, arguments: dict[str, Any], step: str | None = None, weights: bool = False) -> Arm:
            started.append((name, arguments, step))
            return Arm(name)

    options = SimpleNamespace(
        arms=arms, pairs=pairs, tp=ranks, problems=12, timeout=1.0, draws=30, rounds=2,
    )  # fmt: skip
    record: dict[str, Any] = {"failed": []}
    serve_check.check_texts(Servers(), options, record)  # type: ignore[arg-type]
    assert record["failed"] == []
    assert {name for name, *_ in started} >= {"stock", *set(arms.split(",")) - {"t1", "fp8"}}
    assert ("plugin-t1" in [name for name, *_ in started]) is ("t1" in arms)
    rounded = {name for name, arguments, _ in started if arguments["kv_cache_dtype"] == "fp8_e4m3"}
    assert rounded == ({"stock-fp8", "full-fp8"} if "fp8" in arms else set())
    cases = [outcome["case"] for outcome in record["outcomes"]]
    assert ("texts, fp8 cache" in cases) is ("fp8" in arms)
    assert cases[:2] == ["texts", "accept length"]
    assert all(a["tp_size"] == a["ep_size"] == ranks for _, a, _ in started)
    started.clear()
    monkeypatch.setattr(stock_models, "make", lambda *_: None)
    timed: dict[str, Any] = {"failed": []}
    serve_times.check(Servers(), tmp_path, tmp_path, options, timed, lambda _text: None)  # type: ignore[arg-type]
    assert timed["failed"] == []
    assert set(timed["ms"]) == set(pairs.split(","))
    assert timed["ratio"]["t1"] == [2.0, 2.0]
    assert {found["idle"] for found in timed["plugin_profiles"].values()} == {0.25}
    if ranks == 1:
        assert timed["ratio"]["w8.full.without_attention"] == [1.5, 1.5]

    class Dying(Servers):
        def start(self, name: str, *arguments: Any, **options: Any) -> Arm:
            made = super().start(name, *arguments, **options)
            if name == "w8.full-plugin":
                monkeypatch.setattr(made, "ready", failing)
            return made

    def failing(_timeout: float) -> float:
        raise serve_times.ArmError("w8.full-plugin ended")

    said: list[str] = []
    timed = {"failed": []}
    serve_times.check(Dying(), tmp_path, tmp_path, options, timed, said.append)  # type: ignore[arg-type]
    assert timed["failed"] == (["w8.full"] if "w8.full" in pairs else [])
    assert list(timed["ratio"]) == ["t1"]  # the others go on
    assert any("w8.full-plugin ended" in line for line in said) is ("w8.full" in pairs)


@pytest.mark.parametrize(
    ("busy", "idle"),
    [
        ([], 0.0),
        ([(0.0, 10.0)], 0.0),
        ([(0.0, 1.0), (9.0, 10.0)], 0.8),  # 5 to 9 of 5 to 10
        ([(0.0, 6.0), (2.0, 3.0), (7.0, 9.0), (8.0, 8.5), (9.5, 10.0)], 0.3),
        ([(8.0, 10.0), (0.0, 8.0)], 0.0),
    ],
)
def test_idle_share(busy: list[tuple[float, float]], idle: float) -> None:
    import serve_arm

    assert serve_arm.idle_share(busy) == pytest.approx(idle)


def test_models_of_both_servers(tmp_path: Path) -> None:
    """The rival's folders, with a draft that the kernels can take: taps before the last layer, a block in both
    directions."""
    program = """
import json, pathlib, sys
out, layers = pathlib.Path(sys.argv[1]), int(sys.argv[2])
assert len(sys.argv) == 8
(out / "draft").mkdir(parents=True)
nested = {"target_layer_ids": [0, layers - 1], "block_size": 8}
(out / "draft" / "config.json").write_text(json.dumps({"hidden_size": 64, "dflash_config": nested}))
"""
    (tmp_path / "make_models.py").write_text(program)
    stock_models.make(tmp_path, tmp_path / "models", "14 64 2 32 4 8")
    draft = json.loads((tmp_path / "models" / "draft" / "config.json").read_text())
    nested = {"target_layer_ids": [0, 3, 6, 9, 12], "block_size": 8}
    assert draft == {"hidden_size": 64, "is_causal": False, "dflash_config": nested}
    assert [stock_models.taps(layers)[-1] for layers in (6, 14, 62)] == [4, 12, 60]
    assert len(set(stock_models.taps(6))) == 5


def test_a_server_that_runs_something_else_is_not_measured(tmp_path: Path) -> None:
    arm = object.__new__(serve_arms.Arm)
    arm.name, arm.log, arm._promised = "full", tmp_path / "full.log", serve_arms.PROMISED["full"]
    arm._reply = lambda _timeout: {"ready": 3.0}  # type: ignore[method-assign]
    arm.log.write_text("NVIDIA megakernel: active (sgl-muse-mega)\nMuse megakernel: no step runs whole, as with")
    with pytest.raises(serve_arms.ArmError, match=r"does not say \['steps of one request"):
        arm.ready(1.0)
    with arm.log.open("a") as log:
        log.write("\nMuse megakernel: steps of one request, greedy or sampled, run whole (draft, ...")
    assert arm.ready(1.0) == 3.0


def test_a_server_that_is_gone_is_an_error_of_that_server(tmp_path: Path) -> None:
    """A broken pipe would end the run, other servers' comparisons included."""
    arm = object.__new__(serve_arms.Arm)
    arm.name, arm.log = "full", tmp_path / "full.log"
    arm.log.write_text("out of memory")
    arm._process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    arm._process.wait()
    with pytest.raises(serve_arms.ArmError, match=r"full ended before it was asked for generate:\nout of memory"):
        arm.ask("generate", prompts=[[1]], sampling=[{}])


def test_a_run_that_is_out_of_time_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import serve_check

    stopped: list[bool] = []

    def texts(_servers: Any, _options: Any, record: dict[str, Any]) -> None:
        record["outcomes"] = ["one"]
        time.sleep(60)

    monkeypatch.setattr(serve_check, "check", lambda *_: None)
    monkeypatch.setattr(serve_check, "check_texts", texts)
    monkeypatch.setattr(serve_check, "Servers", lambda *_: SimpleNamespace(stop=lambda: stopped.append(True), arms=[]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    path = tmp_path / "text.json"
    given = ["--stock", str(tmp_path), "--parts", "text", "--seconds", "1", "--json", str(path)]
    try:
        with pytest.raises(SystemExit):
            serve_check.main([*given, "--logs", str(tmp_path / "logs")])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert stopped == [True]
    assert json.loads(path.read_text())["text"] == {
        "failed": ["text: ended before it was done"],
        "outcomes": ["one"],
    }
