"""Registry: discovery by entry point, failures kept as text, unknown names answered with the known ones."""

from __future__ import annotations

import pytest
from attn_spec import Problem
from attn_spec import _registry as registry
from attn_spec._errors import BackendUnavailable, UnknownName
from doubles import Double, Install

PROBLEM = Problem(op="joint_attn_softmax", dtype="float32", keys=4)


def test_backends_are_found_by_entry_point(install: Install) -> None:
    install(one=Double("one"), two=Double("two"))
    assert list(registry.installed()) == ["one", "two"] and list(registry.backends()) == ["one", "two"]


def test_a_backend_that_fails_to_import_keeps_its_reason(install: Install) -> None:
    install(broken=ImportError("libmissing.so: undefined symbol"), fine=Double("fine"))
    assert list(registry.backends()) == ["fine"]
    assert "ImportError: libmissing.so: undefined symbol" in str(registry.load("broken").error)
    with pytest.raises(BackendUnavailable, match="undefined symbol"):
        registry.get_backend("broken")


def test_an_entry_point_that_is_no_backend_is_named(install: Install) -> None:
    install(strange=3)
    assert registry.load("strange").error == "backend_of_strange:BACKEND is a int, not an attn_spec.Backend"


def test_an_unknown_backend_lists_the_installed_ones(install: Install) -> None:
    install(one=Double("one"), two=Double("two"))
    with pytest.raises(UnknownName, match="unknown backend 'three'; known: one, two"):
        registry.get_backend("three")


def test_an_unknown_engine_lists_the_engines() -> None:
    with pytest.raises(UnknownName, match="unknown engine of one 'fast'; known: plain, other"):
        Double("one").engine("fast")
    assert Double("one").engine() == "plain"


def test_order_is_by_priority_and_broken_ones_come_first(install: Install) -> None:
    install(a=Double("a", place=2), b=Double("b", place=1), c=Double("c", devices=("cuda",)), z=ImportError("no"))
    assert registry.in_order("cpu") == ["z", "b", "a"] and registry.in_order("cuda") == ["z", "c"]


def test_explain_asks_every_engine(install: Install) -> None:
    install(a=Double("a"), gone=Double("gone", reason="no device"), broken=ImportError("no"))
    answers = registry.explain(PROBLEM)
    assert answers["a:plain"] == () and answers["gone:plain"] == ("no device",) and "ImportError: no" in answers["broken"][0]
    assert registry.runners(PROBLEM) == ("a",) and registry.runners(PROBLEM, without="a") == ()


def test_names_split_into_backend_and_engine() -> None:
    assert registry.parse("one") == ("one", None) and registry.parse("one:other") == ("one", "other")
