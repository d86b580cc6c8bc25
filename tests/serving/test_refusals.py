"""Runs behind all other tests: every sentence in which the plugin refuses or declines something was heard in one."""

from pathlib import Path

import pytest
from sentences import PACKAGE, Heard, written


def test_every_refusal_was_tested(heard: Heard, request: pytest.FixtureRequest) -> None:
    asked_for = {Path(item.path).name for item in request.session.items}
    everything = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    options = request.config.option
    if asked_for != everything or options.keyword or any("::" in word for word in request.config.args):
        pytest.skip("only some of the tests run")
    unheard = heard.unheard()
    assert not unheard, unheard


def test_sentences_are_found_where_they_are() -> None:
    files = {sentence.place.partition(":")[0] for sentence in written()}
    assert {
        "serving/reasons.py",
        "serving/target.py",
        "serving/worker.py",
        "serving/hooks.py",
        "serving/weights.py",
    } <= files
    assert len(list(written())) > 45


def test_a_sentence_without_a_test_is_noticed() -> None:
    listening = Heard()
    places = listening.unheard()
    assert len(places) == len(list(written()))
    line = (
        (PACKAGE / "serving" / "target.py")
        .read_text()
        .splitlines()
        .index('            return "steps of more than one request"')
    )
    listening.texts.add("steps of more than one request")
    assert set(places) - set(listening.unheard()) == {f"serving/target.py:{line + 1}"}
