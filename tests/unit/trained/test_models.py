"""Models that are trained beside each other: what they share, and what transformers makes of one;
the page is that of its results.
"""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from benchmarks.trained import page
from benchmarks.trained.evaluation import choice_figures, evaluate
from benchmarks.trained.export import as_olmoe
from benchmarks.trained.methods import METHODS
from benchmarks.trained.settings import Settings
from benchmarks.trained.text import HeldOut, batches
from benchmarks.trained.training import build, routers_of

TINY = Settings(
    name="tiny",
    hidden=16,
    layers=2,
    heads=2,
    experts=4,
    top_k=2,
    width=8,
    length=24,
    sequences_per_domain=1,
    steps=3,
    seeds=1,
    renormalise=True,
    held_out_per_domain=2,
    router_dimension=4,
)


@pytest.fixture(scope="module")
def held_out():
    tokens = next(batches(TINY, 7))
    return HeldOut(tokens, tokens.flip(0), 0.0, 1)


def stirred(method, settings=TINY, seed=0):
    """An untrained model whose routers and experts differ enough to be told apart."""
    model = build(METHODS[method], settings, seed)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_every_weight_and_is_evaluated(method, held_out):
    model = build(METHODS[method], TINY, 0)
    tokens = held_out.tokens
    logits, done = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    (loss + sum(routed.loss for routed in done)).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    for evaluated in (METHODS[method], *METHODS[method].also):
        evaluated.prepare(routers_of(model))
        figures = evaluate(model, held_out, evaluated, TINY)
        assert all(math.isfinite(value) for value in figures.values()), figures
        assert figures["bits"] > 0.0


@pytest.mark.parametrize("renormalise", [False, True])
def test_bits_per_byte_are_the_loss_of_transformers(renormalise, held_out):
    settings = dataclasses.replace(TINY, renormalise=renormalise)
    model = stirred("top-k", settings)
    figures = evaluate(model, held_out, METHODS["top-k"], settings)
    exported = as_olmoe(model, settings)
    with torch.no_grad():
        loss = exported(input_ids=held_out.tokens, labels=held_out.tokens).loss.item()
    assert_allclose(figures["bits"] * math.log(2.0), loss, rtol=1e-5)


def test_figures_of_choices_are_those_of_counting():
    chosen = np.array([[0, 1], [1, 0], [2, -1], [0, 1]])
    found = choice_figures(chosen, 4)
    # three of seven slots for experts 0 and 1 each; fair are 7 / 4
    assert_allclose(found["max_vio"], 3 / (7 / 4) - 1)
    assert found["experts_per_token"] == 7 / 4
    # sets {0, 1} three times and {2} once: plug-in entropy and the correction 1 / (2 T)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) + 1 / 8
    assert_allclose(found["effective_sets"], math.exp(entropy))


# ------------------------------------------------------------------------ result files and the page
DOCS = Path(__file__).parents[3] / "docs"


def test_the_committed_page_is_that_of_the_committed_results_which_say_how_they_were_made():
    assert (DOCS / "comparison.md").read_text("utf-8") == page.page(page.load_results())
    results = page.load_results()
    assert results
    for name, held in results.items():
        assert {"claim", "settings", "core", "versions", "text"} <= set(held.facts), name
        for run in held.runs:
            assert re.fullmatch(r"[0-9a-f]{7,40}", run["commit"])
            assert run["steps"] == held.facts["settings"]["steps"]
            assert all(math.isfinite(value) for value in run["figures"].values())
        keys = [(run["method"], run["seed"]) for run in held.runs]
        assert len(keys) == len(set(keys))
