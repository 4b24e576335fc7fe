"""Ctrl-C: what is kept is said, and the next run says that it goes on."""

import pytest

import moegeom.pipeline
from moegeom_cli import app


@pytest.fixture
def interrupted_at(monkeypatch):
    """Ctrl-C when the n-th router is begun."""

    def arrange(number: int) -> None:
        measure, begun = moegeom.pipeline.measure_router, []

        def interrupted(*given, **named):
            begun.append(given)
            if len(begun) == number:
                raise KeyboardInterrupt
            return measure(*given, **named)

        monkeypatch.setattr(moegeom.pipeline, "measure_router", interrupted)

    return arrange


@pytest.fixture
def run(place, monkeypatch, capsys):
    def scan(*more: str) -> tuple[int, str]:
        monkeypatch.chdir(place)
        code = app._exit_code(["scan", "model", "--tokens", "rec", "--out", "out", *more])
        return code, capsys.readouterr().err

    return scan


def test_an_interrupted_scan_says_what_is_kept_and_the_next_goes_on_with_it(
    run, interrupted_at, monkeypatch, place
):
    interrupted_at(3)
    code, said = run()
    assert code == 130
    assert said == (
        "interrupted; 2 of 3 routers, and what was begun, are kept in out.partial; the same "
        "command goes on there.\n"
    )
    monkeypatch.undo()
    code, said = run()
    assert code == 0
    assert said == "going on in out.partial: 2 of 3 routers are done\n"
    assert not (place / "out.partial").exists()


def test_a_scan_that_is_interrupted_before_it_measured_leaves_nothing(run, interrupted_at, place):
    interrupted_at(1)
    code, said = run()
    assert (code, said) == (130, "interrupted; nothing was measured yet.\n")
    assert not list(place.glob("out*"))
