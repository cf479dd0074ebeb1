"""Paths and variables of a pod's spec, as the kubelet stand-in reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrator.testing.spec import expand, replacer


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "one"),
        ("x$(A)$(A)y", "xoneoney"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$one"),
        ("$(NOT_SET)", "$(NOT_SET)"),
        ("$A ${A} $(A", "$A ${A} $(A"),
        ("$(kill $$) $$ $(A", "$(kill $$) $ $(A"),
        ("$(B)", "$(A)"),
        ("100$", "100$"),
    ],
)
def test_variables_are_expanded_as_kubernetes_does(text: str, expanded: str) -> None:
    """Once, and only those that are set."""
    assert expand(text, {"A": "one", "B": "$(A)"}) == expanded


PATHS = {"/ckpts": Path("/real/volumes/c"), "/ckpts/cache": Path("/real/e"), "/app": Path("/src/app")}


@pytest.mark.parametrize(
    ("text", "placed"),
    [
        ("/ckpts", "/real/volumes/c"),
        ("/ckpts/", "/real/volumes/c/"),
        ("/ckpts/000001/x", "/real/volumes/c/000001/x"),
        ("/ckpts/cache/x", "/real/e/x"),
        ("--root=/ckpts:/app", "--root=/real/volumes/c:/src/app"),
        ('cd "/app" && python /app/t.py>/ckpts/log', 'cd "/src/app" && python /src/app/t.py>/real/volumes/c/log'),
        ("/ckpts2", "/ckpts2"),
        ("/ckpts-old /ckpts.old", "/ckpts-old /ckpts.old"),
        ("/data/ckpts", "/data/ckpts"),
        ("data/ckpts ./ckpts ../app", "data/ckpts ./ckpts ../app"),
        ("s3:///ckpts", "s3:///ckpts"),
        ("$HOME/ckpts ${HOME}/ckpts $(pwd)/ckpts ~/app */app", "$HOME/ckpts ${HOME}/ckpts $(pwd)/ckpts ~/app */app"),
    ],
)
def test_paths_are_replaced_where_they_are_whole(text: str, placed: str) -> None:
    """The longest one first, and not inside another path or name."""
    assert replacer(PATHS)(text) == placed


@given(st.text(st.sampled_from("/.-_ $(){}=:x") | st.characters(codec="utf-8")))
def test_text_without_the_paths_stays_as_it_is(text: str) -> None:
    """Whatever it is; and without variables that are set, an expansion only halves double dollars."""
    if "$$" not in text:
        assert expand(text, {}) == text
    if not any(path in text for path in PATHS):
        assert replacer(PATHS)(text) == text
    assert replacer({})(text) == text
    if "$(" not in text:
        assert expand(text, {}) == text.replace("$$", "$")


@given(st.lists(st.sampled_from(["/ckpts", "/ckpts/cache", "/app", "/ckpts2", "/data/ckpts", "word"]), max_size=6))
def test_each_word_is_replaced_by_itself(words: list[str]) -> None:
    """Neighbours change nothing."""
    place = replacer(PATHS)

    assert place(" ".join(words)).split() == [str(PATHS.get(word, word)).replace("'", "") for word in words]
